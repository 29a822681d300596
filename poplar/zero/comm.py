"""The only caller of collectives.

    ProcessGroupComm   talks over a torch.distributed group (NCCL, gloo, or gloo with device tensors staged through
    host) LoopbackComm       has the same interface, world size and buffers, but talks to nobody: for profiling one
    rank alone

Collectives on data return a ``Work``: they run while the caller computes, and are complete after ``wait()``. All of
them are sums or copies; nothing is ever divided here. Votes and weights travel over a gloo group of their own on the
host, so that they never synchronise an accelerator.

[Note: one order for everyone]
Every rank must issue the same collectives in the same order: NCCL matches them by order alone, and gloo's
point-to-point messages of one pair are matched first to first. Nothing here can repair a different order, so callers
derive theirs from something all ranks share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from poplar.errors import CommunicationError, ConfigError, ShapeError

DEFAULT_TIMEOUT_S = 600.0


class Work(Protocol):
    """A collective on its way."""

    def wait(self) -> object:
        """Return when the result is in place (on an accelerator: when the current stream may read it)."""
        ...


class Communicator(Protocol):
    """What the stages need of a group.

    ``offsets`` has world_size + 1 entries; rank r's shard is [offsets[r], offsets[r + 1]).
    """

    rank: int
    world_size: int

    def all_gather(self, full: Tensor, offsets: Sequence[int], name: str = "") -> Work: ...
    def reduce_scatter(self, full: Tensor, offsets: Sequence[int], name: str = "") -> Work: ...
    def all_reduce(self, full: Tensor, name: str = "") -> Work: ...
    def broadcast(self, tensor: Tensor, src: int, name: str = "") -> None: ...
    def gather_floats(self, values: Sequence[float]) -> list[list[float]]: ...
    def gather_objects(self, value: Any) -> list[Any]: ...
    def broadcast_object(self, value: Any, src: int) -> Any: ...
    def barrier(self) -> None: ...


class Done:
    """Work with nothing left to do."""

    def wait(self) -> None:
        return


class _Messages:
    """Point-to-point messages in flight, and what to do once they have arrived."""

    def __init__(self, requests: list[Any], then: Callable[[], None] | None = None):
        self._requests = requests
        self._then = then

    def wait(self) -> None:
        for request in self._requests:
            request.wait()
        self._requests = []
        if self._then is not None:
            then, self._then = self._then, None
            then()


class GlooTransport:
    """gloo by point-to-point messages, straight into views of the flat buffer.

    On CPU this is 1.3 to 5 times faster than gloo's own all-gather and reduce-scatter, takes unequal shards without
    padding, accepts every dtype, and sums in one order, so that a repeated run is bitwise the same.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        # Everyone begins with its right neighbour, so that no rank is everybody's first target.
        self._peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def _send(self, tensor: Tensor, peer: int) -> Any:
        return dist.isend(tensor, group=self.group, group_dst=peer)

    def _receive(self, tensor: Tensor, peer: int) -> Any:
        return dist.irecv(tensor, group=self.group, group_src=peer)

    def all_gather(self, full: Tensor, offsets: Sequence[int]) -> Work:
        own = full[offsets[self.rank] : offsets[self.rank + 1]]
        requests = []
        for peer in reversed(self._peers):
            if offsets[peer + 1] > offsets[peer]:
                requests.append(self._receive(full[offsets[peer] : offsets[peer + 1]], peer))
        if own.numel():
            requests += [self._send(own, peer) for peer in self._peers]
        return _Messages(requests)

    def reduce_scatter(self, full: Tensor, offsets: Sequence[int]) -> Work:
        own = full[offsets[self.rank] : offsets[self.rank + 1]]
        requests, parts = [], {}
        if own.numel():
            arrived = own.new_empty((self.world_size - 1, own.numel()))
            for row, peer in enumerate(reversed(self._peers)):
                parts[peer] = arrived[row]
                requests.append(self._receive(arrived[row], peer))
        for peer in self._peers:
            if offsets[peer + 1] > offsets[peer]:
                requests.append(self._send(full[offsets[peer] : offsets[peer + 1]], peer))

        def add_in_rank_order() -> None:
            for peer in sorted(parts):
                own.add_(parts[peer])

        return _Messages(requests, add_in_rank_order)

    def all_reduce(self, full: Tensor) -> Work:
        work = dist.all_reduce(full, group=self.group, async_op=True)
        assert work is not None
        return work

    def broadcast(self, tensor: Tensor, src: int) -> None:
        dist.broadcast(tensor, group=self.group, group_src=src)


class NcclTransport:
    """NCCL's native collectives; its list calls where shards are unequal."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        # torch 2.13 renamed the single-tensor calls and warns at the old names.
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def _views(self, full: Tensor, offsets: Sequence[int]) -> list[Tensor]:
        return [full[start:stop] for start, stop in zip(offsets, offsets[1:], strict=False)]

    def all_gather(self, full: Tensor, offsets: Sequence[int]) -> Work:
        views = self._views(full, offsets)
        if _equal_shards(offsets):
            work = self._all_gather(full, views[self.rank], group=self.group, async_op=True)
        else:
            work = dist.all_gather(views, views[self.rank], group=self.group, async_op=True)
        assert work is not None
        return work

    def reduce_scatter(self, full: Tensor, offsets: Sequence[int]) -> Work:
        views = self._views(full, offsets)
        if _equal_shards(offsets):
            work = self._reduce_scatter(views[self.rank], full, group=self.group, async_op=True)
        else:
            work = dist.reduce_scatter(views[self.rank], views, group=self.group, async_op=True)
        assert work is not None
        return work

    def all_reduce(self, full: Tensor) -> Work:
        work = dist.all_reduce(full, group=self.group, async_op=True)
        assert work is not None
        return work

    def broadcast(self, tensor: Tensor, src: int) -> None:
        dist.broadcast(tensor, group=self.group, group_src=src)


class HostStagedTransport:
    """gloo for tensors on an accelerator: through (pinned) host memory and back.

    The road for clusters that mix vendors, where no native library connects all cards.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._gloo = GlooTransport(group)
        self.rank = self._gloo.rank

    def _to_host(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda")
        return host.copy_(tensor)

    def all_gather(self, full: Tensor, offsets: Sequence[int]) -> Work:
        host = torch.empty(full.shape, dtype=full.dtype, pin_memory=full.device.type == "cuda")
        own = slice(offsets[self.rank], offsets[self.rank + 1])
        host[own].copy_(full[own])
        return _Messages([self._gloo.all_gather(host, offsets)], partial(_copy, full, host))

    def reduce_scatter(self, full: Tensor, offsets: Sequence[int]) -> Work:
        host = self._to_host(full)
        own = slice(offsets[self.rank], offsets[self.rank + 1])
        return _Messages([self._gloo.reduce_scatter(host, offsets)], partial(_copy, full[own], host[own]))

    def all_reduce(self, full: Tensor) -> Work:
        host = self._to_host(full)
        return _Messages([self._gloo.all_reduce(host)], partial(_copy, full, host))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        host = self._to_host(tensor)
        self._gloo.broadcast(host, src)
        tensor.copy_(host)


class ProcessGroupComm:
    """Collectives over a torch.distributed group, and votes over a gloo group of the same ranks.

    Args:
        group: the ranks; None: the default group.
        device: where the tensors live; decides the transport.

    Collective: every rank of ``group`` constructs it at the same place.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"):
        if not dist.is_initialized():
            raise ConfigError("there is no process group; start under torchrun, or call join_process_group() first")
        self.group: dist.ProcessGroup = group if group is not None else dist.distributed_c10d._get_default_group()
        self.rank = dist.get_rank(self.group)
        if self.rank < 0:
            raise ConfigError(f"process {dist.get_rank()} is not in the group it was given; pass a group that it is in")
        self.world_size = dist.get_world_size(self.group)
        self._transport = choose_transport(self.group, torch.device(device))
        ranks = dist.get_process_group_ranks(self.group)
        self._control = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def all_gather(self, full: Tensor, offsets: Sequence[int], name: str = "") -> Work:
        """Fill the other ranks' slices of ``full`` (1D, (offsets[-1],)); the own slice is already in place.

        Collective. Sends the own slice to world_size - 1 ranks (ring on NCCL): ZeRO, arXiv:1910.02054, section 7.
        """
        _check_fits(full, offsets, self.world_size)
        return Done() if self.world_size == 1 else self._transport.all_gather(full, offsets)

    def reduce_scatter(self, full: Tensor, offsets: Sequence[int], name: str = "") -> Work:
        """Sum ``full`` (1D, (offsets[-1],)) over the ranks into the own slice of ``full``.

        ``full`` is not to be written before the work is waited for; afterwards only the own slice has a meaning.
        Collective. Sends (world_size - 1) / world_size of the bytes: ZeRO, arXiv:1910.02054, section 7.
        """
        _check_fits(full, offsets, self.world_size)
        return Done() if self.world_size == 1 else self._transport.reduce_scatter(full, offsets)

    def all_reduce(self, full: Tensor, name: str = "") -> Work:
        """Sum ``full`` over the ranks, in place. Collective."""
        return Done() if self.world_size == 1 else self._transport.all_reduce(full)

    def broadcast(self, tensor: Tensor, src: int, name: str = "") -> None:
        """Overwrite ``tensor`` (contiguous) with rank ``src``'s, whatever its dtype. Collective; blocks."""
        if self.world_size > 1 and tensor.numel():
            self._transport.broadcast(tensor.detach().reshape(-1).view(torch.uint8), src)

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's ``values`` (as many on all), by rank. Collective; on the host."""
        own = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(rows, own, group=self._control)
        return [row.tolist() for row in rows]

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, by rank; for rare, small things. Collective; on the host."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def broadcast_object(self, value: Any, src: int) -> Any:
        """Return rank ``src``'s ``value``; for rare, small things. Collective; on the host."""
        box = [value]
        dist.broadcast_object_list(box, group=self._control, group_src=src)
        return box[0]

    def barrier(self) -> None:
        """Return when every rank has called it. Collective."""
        self.gather_floats([0.0])


class LoopbackComm:
    """One rank of ``world_size`` with nobody at the other end.

    Buffers have their real sizes, so that memory and compute are those of a real run; the other ranks' slices are
    filled with copies of the own shard (finite values of the right scale). In votes the other ranks answer 0: they
    have no samples and no complaints.
    """

    def __init__(self, rank: int = 0, world_size: int = 1):
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must be in [0, {world_size}), got {rank}")
        self.rank = rank
        self.world_size = world_size

    def all_gather(self, full: Tensor, offsets: Sequence[int], name: str = "") -> Work:
        _check_fits(full, offsets, self.world_size)
        own = full[offsets[self.rank] : offsets[self.rank + 1]]
        for rank, (start, stop) in enumerate(zip(offsets, offsets[1:], strict=False)):
            if rank == self.rank:
                continue
            if own.numel() == 0:
                full[start:stop].zero_()
            for begin in range(start, stop, max(1, own.numel())):
                end = min(stop, begin + own.numel())
                full[begin:end].copy_(own[: end - begin])
        return Done()

    def reduce_scatter(self, full: Tensor, offsets: Sequence[int], name: str = "") -> Work:
        _check_fits(full, offsets, self.world_size)
        arrived = full.new_empty((self.world_size - 1) * (offsets[self.rank + 1] - offsets[self.rank]))

        def release() -> None:
            nonlocal arrived
            arrived = full.new_empty(0)

        return _Messages([], release)

    def all_reduce(self, full: Tensor, name: str = "") -> Work:
        return Done()

    def broadcast(self, tensor: Tensor, src: int, name: str = "") -> None:
        return

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values) if rank == self.rank else [0.0] * len(values) for rank in range(self.world_size)]

    def gather_objects(self, value: Any) -> list[Any]:
        return [value if rank == self.rank else None for rank in range(self.world_size)]

    def broadcast_object(self, value: Any, src: int) -> Any:
        return value

    def barrier(self) -> None:
        return


def join_process_group(
    backend: str | None = None, device: torch.device | str = "cpu", timeout_s: float = DEFAULT_TIMEOUT_S
) -> dist.ProcessGroup | None:
    """Join the group of the launcher that started this process (torchrun or Slurm).

    Returns:
        the default group; None if no launcher is at work, which means world size 1.

    Collective. Does nothing if a group has been joined already.
    """
    if dist.is_initialized():
        return dist.group.WORLD
    environment = launcher_environment()
    if environment is None:
        return None
    os.environ.update(environment)
    if backend is None:
        backend = "nccl" if torch.device(device).type == "cuda" and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return dist.group.WORLD


def launcher_environment() -> dict[str, str] | None:
    """Return RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as the launcher meant them; None without one.

    Raises:
        ConfigError: Slurm started several processes without saying where the first of them listens.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        defaults = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        return {name: os.environ.get(name, defaults.get(name, "")) for name in names}
    if "SLURM_PROCID" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        address = os.environ.get("MASTER_ADDR") or os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
        if not address:
            raise ConfigError("under Slurm, MASTER_ADDR must name the host of task 0; export it in the batch script")
        # A port from the job's number, so that two jobs on one host do not meet.
        port = str(20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000)
        values = (
            os.environ["SLURM_PROCID"],
            os.environ["SLURM_NTASKS"],
            os.environ.get("SLURM_LOCALID", "0"),
            address,
            os.environ.get("MASTER_PORT", port),
        )
        return dict(zip(names, values, strict=True))
    return None


def choose_transport(
    group: dist.ProcessGroup, device: torch.device
) -> GlooTransport | NcclTransport | HostStagedTransport:
    backends = str(dist.get_backend_config(group))
    if device.type == "cpu":
        if "gloo" not in backends:
            raise ConfigError(f"parameters on the CPU need a gloo group, this group has {backends}; use backend='gloo'")
        return GlooTransport(group)
    if "nccl" in backends:
        return NcclTransport(group)
    return HostStagedTransport(group)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _equal_shards(offsets: Sequence[int]) -> bool:
    size = offsets[1] - offsets[0]
    return all(stop - start == size for start, stop in zip(offsets, offsets[1:], strict=False))


def _check_fits(full: Tensor, offsets: Sequence[int], world_size: int) -> None:
    if full.dim() != 1 or len(offsets) != world_size + 1 or offsets[0] != 0 or offsets[-1] != full.numel():
        raise ShapeError(
            f"expected a 1D buffer of {offsets[-1]} elements and {world_size + 1} offsets from 0; "
            f"got shape {tuple(full.shape)} and offsets {list(offsets)}"
        )


def check_same(comm: Communicator, value: Any, what: str) -> None:
    """Raise on every rank if the ranks' ``value`` differ; the message names the first that does.

    Raises:
        CommunicationError: ``value`` is not the same everywhere.
    Collective.
    """
    values = comm.gather_objects(value)
    for rank, other in enumerate(values):
        if other is not None and other != values[0] and values[0] is not None:
            raise CommunicationError(
                f"{what} must be the same on every rank: rank 0 has {values[0]!r}, rank {rank} {other!r}"
            )

"""The only caller of collectives (with transport.py, which moves the bytes).

    ProcessGroupComm   talks over a torch.distributed group
    LoopbackComm       has the same interface, world size and buffers, but talks to nobody: to profile one rank alone

Collectives on data return a ``Work``: they run while the caller computes, and are complete after ``wait()``. All of
them are sums or copies; nothing is ever divided here. Votes and weights travel over a gloo group of their own on the
host, so that they never synchronise an accelerator.

[Note: one order for everyone]
Every rank must issue the same collectives in the same order: NCCL matches them by order alone, and gloo's
point-to-point messages of one pair are matched first to first. Nothing here can repair a different order, so callers
derive theirs from something all ranks share.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from poplar.errors import CommunicationError, ConfigError, ShapeError, StepError
from poplar.zero.shared_memory import SharedMemoryTransport
from poplar.zero.transport import DEFAULT_TIMEOUT_S, Done, Messages, Transport, Work, choose_transport

T = TypeVar("T")


class Communicator(Protocol):
    """What the stages need of a group.

    ``offsets`` has world_size + 1 entries; rank r's shard is [offsets[r], offsets[r + 1]).
    """

    rank: int
    world_size: int
    shard_rank: int
    """Which of the shards this rank owns; ``rank``, unless shards are replicated."""
    shard_world_size: int
    """Number of shards."""
    replica: int
    """0 on the ranks that speak for their shard where every element must count once."""

    def all_gather(self, full: Tensor, offsets: Sequence[int], name: str = "") -> Work: ...
    def reduce_scatter(self, full: Tensor, offsets: Sequence[int], name: str = "") -> Work: ...
    def all_reduce(self, full: Tensor, name: str = "") -> Work: ...
    def broadcast(self, tensor: Tensor, src: int, name: str = "") -> None: ...
    def gather_floats(self, values: Sequence[float]) -> list[list[float]]: ...
    def gather_objects(self, value: Any) -> list[Any]: ...
    def broadcast_object(self, value: Any, src: int) -> Any: ...
    def barrier(self) -> None: ...


_communicators: weakref.WeakSet[ProcessGroupComm] = weakref.WeakSet()


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
        self.shard_rank, self.shard_world_size, self.replica = self.rank, self.world_size, 0
        self._transport = choose_transport(self.group, torch.device(device))
        ranks = dist.get_process_group_ranks(self.group)
        self._control = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        _communicators.add(self)

    def release(self) -> None:
        """Let go of the groups. The communicator is of no use afterwards."""
        if dist.is_initialized() and "_control" in vars(self):
            dist.destroy_process_group(self._control)
        for name in ("group", "_control", "_transport", "_row", "_column"):
            vars(self).pop(name, None)

    @property
    def transport_name(self) -> str:
        """How data travels between all ranks: "shared memory", "gloo", "NCCL" or "gloo through host memory"."""
        return self._transport.name

    @property
    def shared_memory_bytes(self) -> int:
        """Bytes of messages sent through shared memory so far."""
        return sum(way.sent_bytes for way in self._transports() if isinstance(way, SharedMemoryTransport))

    def _transports(self) -> list[Transport]:
        return [self._transport]

    def all_gather(self, full: Tensor, offsets: Sequence[int], name: str = "") -> Work:
        """Fill the other ranks' slices of ``full`` (1D, (offsets[-1],)); the own slice is already in place.

        Collective. Sends the own slice to world_size - 1 ranks (ring on NCCL): ZeRO, arXiv:1910.02054, section 7.
        """
        check_fits(full, offsets, self.world_size)
        return Done() if self.world_size == 1 else self._transport.all_gather(full, offsets)

    def reduce_scatter(self, full: Tensor, offsets: Sequence[int], name: str = "") -> Work:
        """Sum ``full`` (1D, (offsets[-1],)) over the ranks into the own slice of ``full``.

        ``full`` is not to be written before the work is waited for; afterwards only the own slice has a meaning.
        Collective. Sends (world_size - 1) / world_size of the bytes: ZeRO, arXiv:1910.02054, section 7.
        """
        check_fits(full, offsets, self.world_size)
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

    Buffers have their real sizes, so that memory and compute are those of a real run; through shared memory that takes
    a little less, since sums need no buffer to receive in. The other ranks' slices are filled with copies of the own
    shard (finite values of the right scale). In votes the other ranks answer 0: they
    have no samples and no complaints.
    """

    def __init__(self, rank: int = 0, world_size: int = 1):
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must be in [0, {world_size}), got {rank}")
        self.rank = self.shard_rank = rank
        self.world_size = self.shard_world_size = world_size
        self.replica = 0

    def all_gather(self, full: Tensor, offsets: Sequence[int], name: str = "") -> Work:
        check_fits(full, offsets, self.world_size)
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
        check_fits(full, offsets, self.world_size)
        arrived = full.new_empty((self.world_size - 1) * (offsets[self.rank + 1] - offsets[self.rank]))

        def release() -> None:
            nonlocal arrived
            arrived = full.new_empty(0)

        return Messages([], release)

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
    # See [Note: the end of gloo's threads]. NCCL could wait in its end for a rank that has failed, so it is left out.
    atexit.register(end_process_group if backend == "gloo" else _release_communicators)
    return dist.group.WORLD


def end_process_group() -> None:
    """End the process group, and let go of every communicator over it; they are of no use afterwards.

    [Note: the end of gloo's threads] A thread of gloo may still hold a tensor when the result has been handed out. If
    the interpreter ends meanwhile, the thread cannot take its lock any more, and the process aborts. So the threads are
    joined before, which takes that nobody holds the group.
    """
    _release_communicators()
    if dist.is_initialized():
        dist.destroy_process_group()


def _release_communicators() -> None:
    for comm in list(_communicators):
        comm.release()


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


def check_fits(full: Tensor, offsets: Sequence[int], world_size: int) -> None:
    if full.dim() != 1 or len(offsets) != world_size + 1 or offsets[0] != 0 or offsets[-1] != full.numel():
        raise ShapeError(
            f"expected a 1D buffer of {offsets[-1]} elements and {world_size + 1} offsets from 0; "
            f"got shape {tuple(full.shape)} and offsets {list(offsets)}"
        )


def raise_together(comm: Communicator, own: BaseException | None, what: str) -> None:
    """Raise on every rank if one comes with an error: its own there, StepError with its text elsewhere. Collective."""
    if any(row[0] for row in comm.gather_floats([float(own is not None)])):
        raise_failure(comm, own, what)


def raise_failure(comm: Communicator, own: BaseException | None, what: str) -> NoReturn:
    """Raise on every rank; to be called once all know that some rank has failed. Collective."""
    texts = comm.gather_objects(f"{type(own).__name__}: {own}" if own is not None else None)
    if own is not None:
        raise own
    rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
    raise StepError(f"rank {rank} {what}: {text}")


def from_rank_0(comm: Communicator, make: Callable[[], T]) -> T:
    """Return what ``make`` gives on rank 0; what it raises there is raised everywhere. Collective.

    For what every rank could make from the same numbers, but must not make even a little differently, since the ranks'
    next collectives depend on it: unlike processors round differently.
    """
    made: tuple[Any, Exception | None]
    try:
        made = make(), None
    except Exception as error:
        made = None, error
    result, failure = comm.broadcast_object(made, 0)
    if failure is not None:
        raise failure
    return result


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

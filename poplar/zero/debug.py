"""Debug mode: ranks that drift apart are caught at the first difference, and told by name.

``CheckedComm`` compares, before every collective, what each rank is about to do: kind, name, dtype, size, shards.
``check_replicas`` compares, after every step, what all ranks must share: whole parameters, learning rates, loss scale.
Off, neither exists.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from poplar.errors import CommunicationError
from poplar.zero.comm import Communicator, Done, Work
from poplar.zero.stage import Stage


class CheckedComm:
    """A communicator that makes sure that all ranks mean the same collective before it is issued.

    Each is complete when the call returns: between two of them the ranks ask each other, and must not block there with
    works under way: see [Note: nobody waits in a circle] in shared_memory.py.
    """

    def __init__(self, inner: Communicator):
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.shard_rank = inner.shard_rank
        self.shard_world_size = inner.shard_world_size
        self.replica = inner.replica
        self._count = 0

    def all_gather(self, full: Tensor, offsets: Sequence[int], name: str = "") -> Work:
        self._check("all_gather", full, name, tuple(offsets))
        self.inner.all_gather(full, offsets, name).wait()
        return Done()

    def reduce_scatter(self, full: Tensor, offsets: Sequence[int], name: str = "") -> Work:
        self._check("reduce_scatter", full, name, tuple(offsets))
        self.inner.reduce_scatter(full, offsets, name).wait()
        return Done()

    def all_reduce(self, full: Tensor, name: str = "") -> Work:
        self._check("all_reduce", full, name, ())
        self.inner.all_reduce(full, name).wait()
        return Done()

    def broadcast(self, tensor: Tensor, src: int, name: str = "") -> None:
        self._check("broadcast", tensor, name, (src,))
        self.inner.broadcast(tensor, src, name)

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        self._compare(("gather_floats", "a vote", None, (len(values),), ()))
        return self.inner.gather_floats(values)

    def gather_objects(self, value: Any) -> list[Any]:
        self._compare(("gather_objects", "", None, (), ()))
        return self.inner.gather_objects(value)

    def broadcast_object(self, value: Any, src: int) -> Any:
        return self.inner.broadcast_object(value, src)

    def barrier(self) -> None:
        self._compare(("barrier", "", None, (), ()))
        self.inner.barrier()

    def _check(self, kind: str, tensor: Tensor, name: str, extra: tuple[int, ...]) -> None:
        self._compare((kind, name, str(tensor.dtype), tuple(tensor.shape), extra))

    def _compare(self, own: tuple[Any, ...]) -> None:
        self._count += 1
        for rank, other in enumerate(self.inner.gather_objects(own)):
            if other is not None and other != own:
                raise CommunicationError(
                    f"collective {self._count}: rank {self.rank} is at {_tell(own)}, rank {rank} at {_tell(other)}; "
                    "the ranks' models, arguments or control flow differ"
                )


def check_replicas(stage: Stage, optimizer: Optimizer, loss_scale: float) -> None:
    """Raise on every rank if whole parameters, learning rates or the loss scale differ between ranks.

    Raises:
        CommunicationError: names the first parameter (or setting) that differs.
    Collective: gathers all parameters at stage 3.
    """
    comm = stage.comm
    rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
    own: list[tuple[str, Any]] = [("the learning rates", rates), ("the loss scale", loss_scale)]
    stage.unshard_all()
    for unit in stage.units:
        for buffer in unit.buffers:
            for piece in buffer.pieces:
                own.append((f"parameter {piece.names[0]}", _checksum(piece.param.detach())))
    stage.reshard_all()
    for rank, other in enumerate(comm.gather_objects(own)):
        for (name, mine), (_, theirs) in zip(own, other or own, strict=True):
            if mine != theirs:
                raise CommunicationError(f"{name} differs after the step: rank {comm.rank} and rank {rank}")


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())


def _tell(call: tuple[Any, ...]) -> str:
    kind, name, dtype, shape, extra = call
    return f"{kind} of {name or 'a value'}" + (f" ({dtype}, shape {shape}, {list(extra)})" if dtype else f" {shape}")

"""Flat buffers: the parameters of a unit laid end to end, cut into one contiguous shard per rank.

    index        0         a         b              numel  padded_numel
    full         | weight  | bias    | scalar | ... |  pad |       one 1D buffer per (unit, dtype, requires_grad)
    offsets      0            o1           o2          o3          rank r owns [offsets[r], offsets[r + 1]): any cut

Parameters are ordered by optimizer group, so that what one rank owns of one group is one piece: the optimizer runs over
few long tensors. Names, odd sizes, scalars, empty and tiny parameters, mixed dtypes, frozen parameters and loading at
another world size all go through this one table of (names, start, stop, group).

[Note: padding]
Two kinds, both 0 in parameters and gradients, and neither in the table, so that no checkpoint ever holds them.
At the end, equal shards are padded to a multiple of world_size, since native collectives want equal parts; this part
belongs to no optimizer group. Between parameters, a gap of under 16 bytes lets each begin on a 16-byte boundary, which
fast matrix multiplication on accelerators needs; it lies inside an optimizer tensor, where an element-wise optimizer
makes nothing of 0 with gradient 0. Uneven shards are cut at any offset, with no padding at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

ALIGNMENT_BYTES = 16

NO_GROUP = -1
"""Group of a trainable parameter that the optimizer was not given: reduced and counted in the norm, never stepped."""


@dataclass(eq=False)
class Piece:
    """One parameter's place in its flat buffer."""

    names: tuple[str, ...]
    """All names of the parameter; more than one if it is tied."""
    param: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    start: int
    stop: int
    group: int
    """Index of the parameter's optimizer group."""

    def view_of(self, full: Tensor) -> Tensor:
        """Return the parameter, in its own shape and memory layout, as a view of the whole buffer."""
        return full.as_strided(self.shape, self.stride, full.storage_offset() + self.start)


@dataclass(eq=False)
class GroupSlice:
    """What this rank updates of one optimizer group in one flat buffer, as positions in the whole buffer."""

    group: int
    start: int
    stop: int
    pieces: tuple[Piece, ...] = field(default=())


class FlatBuffer:
    """Parameters of one unit, one dtype (compute and master) and one ``requires_grad``, as one buffer.

    Args:
        params: (names, parameter, optimizer group) each.
        dtypes: of the whole buffer (compute), and of what the optimizer sees (master).
        ratios: share of each rank.

    Attributes:
        full: 1D, (padded_numel,): whole parameters; None while resharded (stage 3).
        shard: 1D: the part this rank's optimizer updates, in the parameters' dtype; [update_start, update_stop):
            everything at stage 0, this rank's shard otherwise. A view of ``full`` at stages 0 to 2, memory of its own
            at 3.
        master: 1D, like ``shard``: what the optimizer sees. ``shard`` itself, or with mixed
            precision a float32 copy of it.
        grad: 1D, like ``shard``, in ``reduce_dtype``: gradient summed over ranks and micro-steps; None between steps.
    """

    def __init__(
        self,
        params: Sequence[tuple[tuple[str, ...], nn.Parameter, int]],
        dtypes: tuple[torch.dtype, torch.dtype],
        ratios: Sequence[float],
        rank: int,
    ):
        """Lay the parameters end to end and cut them; allocates nothing."""
        ordered = sorted(params, key=lambda item: item[2] if item[2] != NO_GROUP else math.inf)
        self.pieces: list[Piece] = []
        self.dtype, self.master_dtype = dtypes
        alignment = max(1, ALIGNMENT_BYTES // self.dtype.itemsize)
        stop = 0
        for names, param, group in ordered:
            start = -(-stop // alignment) * alignment
            stop = start + param.numel()
            self.pieces.append(Piece(names, param, param.shape, dense_stride(param), start, stop, group))
        self.requires_grad = ordered[0][1].requires_grad
        self.numel = stop
        self.offsets = shard_offsets(stop, ratios)
        self.padded_numel = self.offsets[-1]
        self.rank = rank
        self.reduce_dtype = (
            torch.promote_types(self.dtype, torch.float32) if self.dtype.is_floating_point else self.dtype
        )
        self.full: Tensor | None = None
        self.shard: Tensor = torch.empty(0)
        self.master: Tensor = self.shard
        self.grad: Tensor | None = None
        self._holes: list[Tensor] | None = None
        self.replicated = False  # True at stage 0: every rank updates everything

    @property
    def update_start(self) -> int:
        return 0 if self.replicated else self.shard_start

    @property
    def update_stop(self) -> int:
        return self.padded_numel if self.replicated else self.shard_stop

    @property
    def shard_start(self) -> int:
        return self.offsets[self.rank]

    @property
    def shard_stop(self) -> int:
        return self.offsets[self.rank + 1]

    def own(self, full: Tensor) -> Tensor:
        """Return this rank's shard of a whole buffer."""
        return full[self.shard_start : self.shard_stop]

    def owned_grad(self) -> Tensor | None:
        """Return the gradient of this rank's shard: over all ranks, every element exactly once, at every stage."""
        return self.own(self.grad) if self.replicated and self.grad is not None else self.grad

    def bind(self, full: Tensor) -> None:
        """Let the parameters be views of ``full``.

        ``p.data = view`` and not ``nn.Parameter(view)``: a parameter made from a view shares the buffer's version
        counter, and refilling the buffer would then break backward.
        """
        self.full = full
        for piece in self.pieces:
            piece.param.data = piece.view_of(full)

    def unbind(self) -> None:
        """Let go of the whole buffer; the parameters keep their shapes but read as NaN.

        The shape is needed by autograd, and NaN makes a use of a resharded parameter show instead of computing with
        stale values. One scalar, expanded, stands for all elements.
        """
        self.full = None
        if self._holes is None:
            value = math.nan if self.dtype.is_floating_point or self.dtype.is_complex else 0
            hole = torch.full((), value, dtype=self.dtype, device=self.shard.device)
            self._holes = [hole.expand(piece.shape) for piece in self.pieces]
        for piece, hole in zip(self.pieces, self._holes, strict=True):
            piece.param.data = hole

    def zero_padding(self, full: Tensor) -> None:
        """Write 0 where ``full`` holds no parameter."""
        ends = [0] + [piece.stop for piece in self.pieces]
        starts = [piece.start for piece in self.pieces] + [self.padded_numel]
        for stop, start in zip(ends, starts, strict=True):
            if stop < start:
                full[stop:start].zero_()

    def group_slices(self) -> Iterator[GroupSlice]:
        """Yield what this rank updates of each optimizer group: at most one slice a group, none empty."""
        for group in dict.fromkeys(piece.group for piece in self.pieces):
            members = [piece for piece in self.pieces if piece.group == group]
            start = max(members[0].start, self.update_start)
            stop = min(members[-1].stop, self.update_stop)
            if start < stop:
                yield GroupSlice(group, start, stop, tuple(p for p in members if p.start < stop and p.stop > start))


def shard_offsets(numel: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Return world_size + 1 offsets that cut ``numel`` elements in ``ratios``.

    Equal ratios give equal shards of ceil(numel / world_size) elements: see [Note: padding]. Others give the nearest
    whole elements, with no padding.
    """
    world_size = len(ratios)
    if all(ratio == ratios[0] for ratio in ratios):
        size = -(-numel // world_size)
        return tuple(size * rank for rank in range(world_size + 1))
    total, reached, offsets = math.fsum(ratios), 0.0, [0]
    for ratio in ratios:
        reached += ratio
        offsets.append(round(numel * min(1.0, reached / total)))
    # The last rank with a share takes what rounding left; ranks after it own nothing.
    last = max(rank for rank, ratio in enumerate(ratios) if ratio > 0)
    return tuple(offsets[: last + 1] + [numel] * (world_size - last))


def dense_stride(param: Tensor) -> tuple[int, ...]:
    """Return the strides ``param`` keeps inside a flat buffer: its own where dense (transposed, channels_last)."""
    # Dense: sorted by stride, each stride is the number of elements below it.
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(param.stride(), param.shape, strict=True) if n > 1):
        if stride != expected:
            return torch.empty(param.shape, device="meta").stride()
        expected *= size
    return param.stride()

"""Flat buffers: any parameters, any ratios; every element is somebody's, once, and views are the parameters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import poplar
from poplar.zero.flat import ALIGNMENT_BYTES, NO_GROUP, FlatBuffer, dense_stride, shard_offsets
from poplar.zero.transport import NcclTransport

quick = settings(max_examples=60, deadline=None)

COUNTS = st.integers(0, 500)
RATIOS = st.lists(st.sampled_from([0.0, 0.1, 1.0, 1.0, 7.3]), min_size=1, max_size=6).filter(any)
SHAPES = st.lists(st.sampled_from([(), (1,), (0, 3), (3,), (2, 3), (7, 5), (2, 3, 5)]), min_size=1, max_size=7)


def _buffer(
    shapes: list[tuple[int, ...]],
    groups: list[int] | None = None,
    ratios: list[float] | None = None,
    rank: int = 0,
    dtype: torch.dtype = torch.float32,
) -> FlatBuffer:
    params = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    members = [((f"p{i}",), param, (groups or [0] * len(params))[i]) for i, param in enumerate(params)]
    return FlatBuffer(members, (dtype, dtype), ratios or [1.0], rank)


def _filled(buffer: FlatBuffer) -> Tensor:
    """Return a whole buffer with the parameters' values, and rubbish in the padding."""
    full = torch.full((buffer.padded_numel,), 9, dtype=buffer.dtype)
    for piece in buffer.pieces:
        piece.view_of(full).copy_(piece.param.detach())
    return full


# Where the shards are cut.


@quick
@given(numel=COUNTS, world_size=st.integers(1, 7), ratio=st.sampled_from([0.1, 1.0, 3.0]))
def test_equal_ratios_give_equal_shards_and_pad_less_than_one_element_a_rank(
    numel: int, world_size: int, ratio: float
) -> None:
    """H13: shards are equal unless asked otherwise; Z26, Z47: padded to equal chunks, whatever the size."""
    offsets = shard_offsets(numel, [ratio] * world_size)
    sizes = {stop - start for start, stop in zip(offsets, offsets[1:], strict=False)}
    assert offsets[0] == 0 and len(offsets) == world_size + 1 and len(sizes) == 1
    assert numel <= offsets[-1] < numel + world_size


def test_the_documentation_says_how_shards_are_cut() -> None:
    """H13."""
    text = (Path(poplar.__file__).parents[1] / "docs" / "zero.md").read_text()
    assert "Shards are equal unless `shard_ratios` says otherwise" in text


@quick
@given(numel=COUNTS, ratios=RATIOS)
def test_uneven_shards_are_the_nearest_whole_elements_without_padding(numel: int, ratios: list[float]) -> None:
    if len(set(ratios)) == 1:
        ratios = [*ratios, 2 * max(ratios)]
    offsets = shard_offsets(numel, ratios)
    assert offsets[0] == 0 and offsets[-1] == numel and list(offsets) == sorted(offsets)
    for rank, ratio in enumerate(ratios):
        size = offsets[rank + 1] - offsets[rank]
        assert abs(size - numel * ratio / sum(ratios)) <= 1 + 1e-9
        assert ratio > 0 or size == 0


@pytest.mark.parametrize(
    ("ratios", "is_native"), [([1.0] * 3, True), ([2.0, 2.0, 2.0], True), ([1.0, 2.0, 1.0], False)]
)
def test_only_skewed_shards_leave_the_native_collectives(
    monkeypatch: pytest.MonkeyPatch, ratios: list[float], is_native: bool
) -> None:
    """Z47: an uneven all-gather is a broadcast for every rank on NCCL; equal shards never pay for that."""
    calls = []

    def record(name: str) -> Any:
        return lambda *args, **kwargs: calls.append(name) or object()

    transport = NcclTransport.__new__(NcclTransport)
    transport.group, transport.rank, transport.world_size = None, 1, 3  # type: ignore[assignment]
    monkeypatch.setattr("torch.distributed.all_gather_single", record("native"))
    monkeypatch.setattr("torch.distributed.reduce_scatter_single", record("native"))
    monkeypatch.setattr("torch.distributed.all_gather", record("list"))
    monkeypatch.setattr("torch.distributed.reduce_scatter", record("list"))
    for numel in (1, 7, 32001):
        offsets = shard_offsets(numel, ratios)
        full = torch.zeros(offsets[-1])
        transport.all_gather(full, offsets)
        transport.reduce_scatter(full, offsets)
    assert calls == ["native" if is_native else "list"] * 6


# Where the parameters lie.


@quick
@given(
    shapes=SHAPES, data=st.data(), ratios=RATIOS, dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16])
)
def test_every_element_is_owned_once_and_views_are_the_parameters(
    shapes: list[tuple[int, ...]], data: st.DataObject, ratios: list[float], dtype: torch.dtype
) -> None:
    """Z22, Z23, Z26: scalars, empty and odd parameters, more ranks than elements; one table for all of it."""
    groups = data.draw(st.lists(st.sampled_from([0, 1, 2, NO_GROUP]), min_size=len(shapes), max_size=len(shapes)))
    owners = torch.zeros(10_000, dtype=torch.int64)
    for rank in range(len(ratios)):
        buffer = _buffer(shapes, groups, ratios, rank, dtype)
        owners[buffer.shard_start : buffer.shard_stop] += 1
        by_group: dict[int, list[tuple[int, int]]] = {}
        for piece in buffer.group_slices():
            assert buffer.shard_start <= piece.start < piece.stop <= buffer.shard_stop
            assert all(p.group == piece.group and p.start < piece.stop and p.stop > piece.start for p in piece.pieces)
            by_group.setdefault(piece.group, []).append((piece.start, piece.stop))
        assert all(len(slices) == 1 for slices in by_group.values()), "one optimizer tensor a group"
        updated = {index for slices in by_group.values() for start, stop in slices for index in range(start, stop)}
        for piece in buffer.pieces:
            mine = range(max(piece.start, buffer.shard_start), min(piece.stop, buffer.shard_stop))
            assert updated.issuperset(mine), f"{piece.names} is not updated whole"
    assert owners[: buffer.padded_numel].eq(1).all() and not owners[buffer.padded_numel :].any()
    ends = 0
    order = [piece.group for piece in buffer.pieces if piece.group != NO_GROUP]
    assert order == sorted(order), "groups are contiguous"
    for piece in buffer.pieces:
        assert piece.start >= ends and piece.start * dtype.itemsize % ALIGNMENT_BYTES == 0
        assert piece.stop - piece.start == math.prod(piece.shape)
        ends = piece.stop
    assert ends == buffer.numel


@quick
@given(shapes=SHAPES, world_size=st.integers(1, 4))
def test_padding_is_zeroed_and_nothing_else(shapes: list[tuple[int, ...]], world_size: int) -> None:
    buffer = _buffer(shapes, ratios=[1.0] * world_size)
    full = _filled(buffer)
    buffer.zero_padding(full)
    for piece in buffer.pieces:
        assert torch.equal(piece.view_of(full), piece.param)
    inside = torch.zeros(buffer.padded_numel, dtype=torch.bool)
    for piece in buffer.pieces:
        inside[piece.start : piece.stop] = True
    assert not full[~inside].any()


@pytest.mark.parametrize(
    ("tensor", "keeps"),
    [
        (torch.randn(3, 5), True),
        (torch.randn(5, 3).t(), True),
        (torch.randn(2, 3, 4).permute(2, 0, 1), True),
        (torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), True),
        (torch.randn(4, 1, 3).expand(4, 2, 3), False),
        (torch.randn(6, 6)[:, ::2], False),
        (torch.randn(6, 6)[:4, :4], False),
        (torch.randn(3, 1)[:, :1].t(), True),
        (torch.empty(0, 4), True),
        (torch.tensor(1.0), True),
    ],
)
def test_dense_layouts_are_kept_and_others_made_contiguous(tensor: Tensor, keeps: bool) -> None:
    stride = dense_stride(tensor)
    assert stride == (tensor.stride() if keeps else torch.empty(tensor.shape).stride())
    full = torch.zeros(tensor.numel() + 3)
    full[3:].as_strided(tensor.shape, stride, 3).copy_(tensor)
    assert torch.equal(full[3:].as_strided(tensor.shape, stride, 3), tensor), "no two elements share a place"


# Binding.


def test_bound_parameters_follow_the_buffer_and_backward_survives_a_refill() -> None:
    buffer = _buffer([(2, 3), ()])
    matrix, scalar = (piece.param for piece in buffer.pieces)
    buffer.bind(_filled(buffer))
    assert buffer.full is not None
    before = matrix.detach().clone()
    loss = (matrix * scalar).sum()
    refilled = buffer.full.detach().clone()
    buffer.full.copy_(refilled)  # as a gather does, between forward and backward
    loss.backward()
    assert torch.equal(scalar.grad, before.sum())
    buffer.full.zero_()
    assert not matrix.any() and matrix.requires_grad and matrix.is_leaf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64])
def test_unbound_parameters_keep_their_shape_cost_one_element_and_read_as_nan(dtype: torch.dtype) -> None:
    trains = dtype != torch.int64
    params = [nn.Parameter(torch.ones(shape).to(dtype), trains) for shape in ((4, 5), (0, 2), ())]
    buffer = FlatBuffer([((str(i),), param, 0) for i, param in enumerate(params)], (dtype, dtype), [1.0], 0)
    buffer.bind(_filled(buffer))
    buffer.unbind()
    assert buffer.full is None
    for piece in buffer.pieces:
        assert piece.param.shape == piece.shape and piece.param.dtype == dtype
        assert piece.param.untyped_storage().nbytes() == dtype.itemsize
        assert torch.isnan(piece.param).all() if trains else not piece.param.any()


@pytest.mark.parametrize("replicated", [True, False])
def test_owned_gradients_hold_every_element_once_at_every_stage(replicated: bool) -> None:
    """X06, X10: what the norm is taken of, over all ranks, is the gradient; at stage 0 too."""
    ratios, parts = [1.0, 0.0, 2.5], []
    for rank in range(3):
        buffer = _buffer([(4, 5), (3,)], ratios=ratios, rank=rank)
        buffer.replicated = replicated
        assert buffer.owned_grad() is None
        whole = torch.arange(buffer.padded_numel, dtype=torch.float32)
        buffer.grad = whole if replicated else buffer.own(whole)
        parts.append(buffer.owned_grad())
    assert torch.equal(torch.cat(parts), whole)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2],
)
def test_gradients_are_summed_in_float32_or_better(dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
    """Z46."""
    assert _buffer([(3,)], dtype=dtype).reduce_dtype == reduce_dtype

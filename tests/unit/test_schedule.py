"""The order of a stage 3 micro-step: whatever was recorded, every rank can follow it, and its recorder finds all."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from poplar.zero.schedule import Op, complete_order, prefetching

NUM_UNITS = 5
quick = settings(max_examples=150, deadline=None)


def _unshard(unit: int, **flags: bool) -> Op:
    return Op("unshard", unit, **flags)


def _reduce(unit: int) -> Op:
    return Op("reduce", unit)


@st.composite
def recordings(draw: st.DrawFn) -> tuple[list[Op], list[int], list[int]]:
    """Return what a rank may record, the units that stay whole, and the trainable ones."""
    always = sorted(draw(st.sets(st.integers(0, NUM_UNITS - 1), max_size=2)))
    trainable = sorted(draw(st.sets(st.integers(0, NUM_UNITS - 1), min_size=1)))
    forward = draw(st.lists(st.integers(0, NUM_UNITS - 1), max_size=8))
    ops = [_unshard(unit) for unit in forward]
    whole = None  # a unit stays whole until it is reduced, or another is needed: no gather is recorded before that
    for unit in draw(st.permutations(forward)) if draw(st.booleans()) else forward[::-1]:
        if unit != whole and draw(st.integers(0, 4)):
            ops.append(_unshard(unit, in_backward=True))
            whole = whole if unit in always else unit
        if unit in trainable and draw(st.integers(0, 4)):
            ops.append(_reduce(unit))
            whole = None if whole == unit else whole
    return ops, always, trainable


def _complete(recording: tuple[list[Op], list[int], list[int]], training: bool) -> list[Op]:
    ops, always, trainable = recording
    ops = ops if training else [op for op in ops if op.kind == "unshard" and not op.in_backward]
    return complete_order(ops, always=always, all_units=range(NUM_UNITS), trainable=trainable, training=training)


@quick
@given(recording=recordings(), training=st.booleans())
def test_every_unit_is_gathered_and_every_trainable_one_reduced(
    recording: tuple[list[Op], list[int], list[int]], training: bool
) -> None:
    """A rank may use what the recording did not: all is gathered at some place, and what has gradients is reduced."""
    _, always, trainable = recording
    order = _complete(recording, training)
    assert {op.unit for op in order if op.kind == "unshard"} == set(range(NUM_UNITS))
    assert {op.unit for op in order if op.kind == "reduce"} == (set(trainable) if training else set())
    assert order[: len(always)] == [_unshard(unit, until_backward=True) for unit in always]
    assert all(op.unit not in always for op in order[len(always) :] if op.kind == "unshard")
    assert order == _complete(recording, training), "the same on every rank"


@quick
@given(recording=recordings())
def test_reductions_keep_their_order_and_are_as_many(recording: tuple[list[Op], list[int], list[int]]) -> None:
    """What a recording reduced twice (shared weights, in reentrant checkpoints) is reduced twice."""
    recorded = [op.unit for op in recording[0] if op.kind == "reduce"]
    reduced = [op.unit for op in _complete(recording, True) if op.kind == "reduce"]
    assert reduced[: len(recorded)] == recorded
    assert sorted(reduced[len(recorded) :], reverse=True) == reduced[len(recorded) :]


@quick
@given(recording=recordings())
def test_who_recorded_finds_each_unit_whole_or_further_on(recording: tuple[list[Op], list[int], list[int]]) -> None:
    """Replay the recording against the order, as stage 3 does: no need ever lies behind, and none comes too late."""
    ops, always, _ = recording
    order = _complete(recording, True)
    position, kept, used = 0, set(always), set()
    for op in ops:
        if op.kind == "reduce":
            kept -= {op.unit} - set(always)
            continue
        if op.in_backward and op.unit not in always:
            kept -= used - {op.unit}  # a frozen unit is freed once backward has moved on
            used.add(op.unit)
        if op.unit in kept:
            continue
        places = [p for p in range(position, len(order)) if order[p].kind == "unshard" and order[p].unit == op.unit]
        assert places, f"{op} is not in {order[position:]}"
        position = places[0] + 1
        if op.in_backward or order[places[0]].until_backward:
            kept.add(op.unit)


@quick
@given(ops=st.lists(st.builds(Op, st.sampled_from(["unshard", "reduce"]), st.integers(0, 3)), max_size=14))
def test_prefetching_moves_a_gather_ahead_of_one_reduction_and_changes_nothing_else(ops: list[Op]) -> None:
    moved = prefetching(ops)
    assert Counter(moved) == Counter(ops)
    for kind in ("unshard", "reduce"):
        assert [op for op in moved if op.kind == kind] == [op for op in ops if op.kind == kind]
    before, after = ([i for i, op in enumerate(o) if op.kind == "unshard"] for o in (ops, moved))
    for old, new in zip(before, after, strict=True):
        assert new == old - (old > 0 and ops[old - 1].kind == "reduce")


def test_plain_blocks_are_gathered_one_ahead_and_the_last_stays() -> None:
    """Root 0, blocks 1 to 3: the order that the collectives of a step are counted by."""
    recorded = [_unshard(1), _unshard(2), _unshard(3), _unshard(3, in_backward=True), _reduce(3)]
    recorded += [_unshard(2, in_backward=True), _reduce(2), _unshard(1, in_backward=True), _reduce(1), _reduce(0)]
    order = complete_order(recorded, always=[0], all_units=range(4), trainable=range(4), training=True)
    assert [f"{op.kind[0]}{op.unit}" for op in order] == "u0 u1 u2 u3 u2 r3 u1 r2 r1 r0".split()
    assert [op.unit for op in order if op.until_backward] == [0, 3]


def test_a_frozen_unit_needed_twice_in_backward_is_gathered_twice() -> None:
    """Z05: it is freed in between, since nothing tells that it is needed again."""
    recorded = [_unshard(0), _unshard(1), _unshard(0, in_backward=True), _reduce(1), _unshard(0, in_backward=True)]
    order = complete_order(recorded, always=[], all_units=range(2), trainable=[1], training=True)
    assert [op.unit for op in order if op.kind == "unshard"] == [0, 1, 0, 0]


def test_an_unused_unit_is_gathered_after_the_one_defined_before_it_and_kept() -> None:
    recorded = [_unshard(0), _unshard(2), _unshard(2, in_backward=True), _reduce(2), _unshard(0, in_backward=True)]
    order = complete_order(recorded, always=[], all_units=range(4), trainable=range(4), training=True)
    forward = [op for op in order if op.kind == "unshard"][:4]
    assert [op.unit for op in forward] == [0, 1, 2, 3]
    assert all(op.until_backward for op in forward if op.unit in (1, 3))
    assert [op.unit for op in order if op.kind == "reduce"] == [2, 3, 1, 0]

"""The order of a stage 3 micro-step's collectives, known to every rank before the first of them.

[Note: recording the order]
At stage 3 a rank cannot know from its own forward what the others gather: it may have no samples, or take another
branch. So one order is made once and holds for all. The lowest rank with samples runs its first micro-batch alone, and
tells the others over the host each time it needs a unit; they gather with it, without computing. Values are the real
ones, so that control flow that depends on data is right. Gradients are dropped, random state and buffers put back. What
the run was missing is then filled in: a unit it did not use is gathered at its place by definition, and reduced, so
that another rank may use it.

[Note: running ahead]
Recorded as it happens, a unit is gathered when it is needed. To overlap, a gather may be issued before it is needed,
and ``prefetching`` moves every gather of backward ahead of the reduction just before it. When a rank needs a unit
further down the order, everything before it is issued first: units it skips are gathered (and stay whole until the end
of the phase, so that using them out of order is right too), reductions it is not ready for carry what there is. Only a
unit that the rest of the order does not hold is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Op:
    """One place in the order: gather a unit's parameters, or reduce its gradients."""

    kind: Literal["unshard", "reduce"]
    unit: int
    """Index of the unit."""
    until_backward: bool = False
    """For "unshard": the unit stays whole from forward to its backward."""
    in_backward: bool = False
    """For "unshard": it was backward that needed the unit."""


def complete_order(
    recorded: Sequence[Op], *, always: Sequence[int], all_units: Sequence[int], trainable: Sequence[int], training: bool
) -> list[Op]:
    """Make a recorded micro-step into the order for all ranks.

    Args:
        recorded: unshards at first need, reductions at completion, in the order they happened.
        always: units that stay whole from the begin of forward to the end of backward; gathered first.
        all_units: every unit, in definition order.
        trainable: units with something to reduce.
    """
    ops = [Op("unshard", unit, until_backward=True) for unit in always]
    body = [op for op in recorded if op.kind == "reduce" or op.unit not in always]
    body = _insert_unused(body, [unit for unit in all_units if unit not in always])
    ops += prefetching(_kept_over(body)) if training else body
    reduced = {op.unit for op in ops if op.kind == "reduce"}
    if training:
        ops += [Op("reduce", unit) for unit in reversed(trainable) if unit not in reduced]
    return ops


def prefetching(ops: Sequence[Op]) -> list[Op]:
    """Move every gather ahead of the reduction just before it: see [Note: running ahead]."""
    result = list(ops)
    position = 0
    while position + 1 < len(result):
        if result[position].kind == "reduce" and result[position + 1].kind == "unshard":
            result[position], result[position + 1] = result[position + 1], result[position]
            position += 1
        position += 1
    return result


def _kept_over(ops: Sequence[Op]) -> list[Op]:
    """Gather once what forward uses last and backward first, whatever was reduced meanwhile.

    Two gathers in backward stay two: a frozen unit is freed between them, since nothing tells that it is needed again.
    """
    result: list[Op] = []
    last: int | None = None  # place of the last gather
    for op in ops:
        if op.kind == "unshard":
            if last is not None and _is_same_use(result[last:], op):
                result[last] = replace(result[last], until_backward=True)
                continue
            last = len(result)
        result.append(op)
    return result


def _is_same_use(since_last_gather: Sequence[Op], op: Op) -> bool:
    """Return whether the unit of the last gather can stay whole for ``op``, which gathers it again."""
    last, *reductions = since_last_gather
    return last.unit == op.unit and not last.in_backward and all(other.unit != op.unit for other in reductions)


def _insert_unused(ops: Sequence[Op], all_units: Sequence[int]) -> list[Op]:
    """Gather each unit that the recording did not use, after the unit defined before it."""
    result = list(ops)
    for position, unit in enumerate(all_units):
        if any(op.kind == "unshard" and op.unit == unit for op in result):
            continue
        before = set(all_units[:position])
        first_use: dict[int, int] = {}
        for place, op in enumerate(result):
            if op.kind == "unshard":
                first_use.setdefault(op.unit, place)
        after = max((place for other, place in first_use.items() if other in before), default=-1)
        # A rank that uses it needs it in backward too, where the order does not gather it again.
        result.insert(after + 1, Op("unshard", unit, until_backward=True))
    return result

"""What training takes on processors: steps of the plan as it would be by the curves, and the curves corrected by them.

    curves of ranks alone -> plan -> a few of its steps -> factors by rank, collectives -> plan -> a few steps -> ...

[Note: rehearsal]
A rank's curve is measured alone, and a processor is not the same among others: caches, memory channels and clock rates
are shared, a core that waits gets slow, and for seconds at a time it is a tenth or a third slower for no reason that
shows. But there the process itself waits in its collectives, so that the engine knows how long; a step less that is
the rank's own compute in the very work that is to be predicted. So each rank's curve gives the shape, and steps of the
plan its height:

    factor of a rank = median over the steps of (step - waited) / (compute of its micro-batches by its curve)
    collectives      = median over the steps of  step - (step by the corrected curves)

No stage is favoured by a slow second: the steps are taken in visits, every stage once a visit, few steps each. And each
visit takes the steps of the plan as the visits before have corrected it, since a step tells most of batches like
its own. What the collectives add is shared out over micro-steps and step by the bytes that they send (stage 2: a
reduce-scatter in every micro-step and an all-gather at the end; stage 3: all in micro-steps). Where the corrected
curves leave nothing for them, they are 0 and the curves a little lower, so that a step like those takes their median.

The plan is always that of "exact", since which strategy is going to plan is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from poplar.allocator import allocate
from poplar.errors import InfeasiblePlanError
from poplar.plan import ClusterProfile
from poplar.planning.cost import Row, predict
from poplar.profiling.collectives import balanced_sizes
from poplar.profiling.together import Choice, StepTaker
from poplar.zero.comm import from_rank_0

NUM_VISITS = 3
"""Odd, with few steps in each: those of one visit share a slow second, and the median is to leave out a whole visit."""
MIN_STEPS, MAX_STEPS = 1, 4
"""Of a visit."""
VISIT_S = 0.6
"""About how long the steps of a visit may take; long steps take longer."""
LONG_STEP_S = 2.0
"""A step need not be longer to tell how a rank's curve is off; then the plan of a smaller global batch is rehearsed."""
LONG_REHEARSAL_S = 60.0
"""Where all visits would take longer, there is one."""


@dataclass(frozen=True, kw_only=True)
class RehearsedStep:
    """A step of all ranks together."""

    rows: tuple[Row, ...]
    """The micro-batch sizes of every rank."""
    seconds: float
    waited_s: tuple[float, ...]
    """By rank: what of it its process waited in collectives."""


def rehearse(
    taker: StepTaker,
    profiles: Sequence[ClusterProfile],
    global_batch_size: int | None,
    reference: ClusterProfile | None = None,
) -> list[ClusterProfile]:
    """Return the profiles corrected by steps of all ranks: see [Note: rehearsal].

    Args:
        profiles: one a stage, by each rank alone.
        reference: a profile corrected before, at another speed of the processors. It is rehearsed among the others, and
            their times are scaled to its, so that they can be compared.

    Raises:
        ProfileError: another rank failed; the failing rank raises its own error.
    Collective.
    """
    parts = [_Part(profile) for profile in (*profiles, *([reference] if reference is not None else []))]
    for number in range(1, NUM_VISITS + 1):
        for part in parts:
            part.visit(taker, global_batch_size)
        if sum(step.seconds for part in parts for step in part.steps) * NUM_VISITS > number * LONG_REHEARSAL_S:
            break

    def result() -> list[ClusterProfile]:
        level = 1.0
        if reference is not None:
            steps = parts.pop().steps
            level = median([step.seconds / predict(reference, step.rows).step_s for step in steps] or [1.0])
        return [corrected(part.profile, part.steps).scaled(1 / level) for part in parts]

    return from_rank_0(taker.comm, result)


class _Part:
    """A profile and its steps so far."""

    def __init__(self, profile: ClusterProfile):
        self.profile = profile
        self.steps: list[RehearsedStep] = []

    def visit(self, taker: StepTaker, global_batch_size: int | None) -> None:
        """Take some steps. Collective."""

        def choose(profile: ClusterProfile) -> Choice:
            known = corrected(profile, self._steps_that_fit(profile))
            rows = rows_to_rehearse(known, global_batch_size)
            if not rows:
                return [], 0
            step_s = max(predict(known, rows).step_s, 1e-9)
            return [rows], round(min(MAX_STEPS, max(MIN_STEPS, VISIT_S / step_s)))

        self.profile, found = taker.take(self.profile, choose)
        self.steps = self._steps_that_fit(self.profile)
        if found is not None:
            waited_s = found.waited_s[:, 0].T.tolist()
            self.steps += [
                RehearsedStep(rows=found.kinds[0], seconds=seconds, waited_s=tuple(waited))
                for seconds, waited in zip(found.seconds[0].tolist(), waited_s, strict=True)
            ]

    def _steps_that_fit(self, profile: ClusterProfile) -> list[RehearsedStep]:
        """Return the steps so far without sizes that have turned out not to fit: those tell nothing any more."""
        limits = [rank.max_micro_batch_size for rank in profile.ranks]
        return [
            step
            for step in self.steps
            if all(max(row, default=0) <= limit for row, limit in zip(step.rows, limits, strict=True))
        ]


def rows_to_rehearse(profile: ClusterProfile, global_batch_size: int | None) -> tuple[Row, ...]:
    """Return the micro-batch sizes of every rank by the plan that ``profile`` leads to; without a batch, balanced ones.

    No row at all: no rank computes.
    """
    sizes = balanced_sizes(profile.ranks, global_batch_size)
    if not any(sizes):
        return ()
    if global_batch_size is None:
        return tuple((size,) for size in sizes)
    try:
        plan = allocate(profile, global_batch_size)
        assert plan.predicted is not None
        if plan.predicted.step_s > LONG_STEP_S:
            share = LONG_STEP_S / plan.predicted.step_s
            plan = allocate(profile, max(1, int(global_batch_size * share)))
    except InfeasiblePlanError:  # model state leaves no room on a card; planning is going to say so
        return ()
    return tuple(row.micro_batch_sizes for row in plan.ranks)


def corrected(profile: ClusterProfile, steps: Sequence[RehearsedStep]) -> ClusterProfile:
    """Return ``profile`` as ``steps`` correct it: see [Note: rehearsal].

    The step it then predicts for steps that are alike is their median.
    """
    if not steps:
        return profile
    bare = profile.with_collectives(0.0, 0.0)
    compute_s = {step.rows: predict(bare, step.rows).compute_s for step in steps}
    factors: dict[int, float] = {}
    for rank in range(profile.world_size):
        ratios = [
            (step.seconds - step.waited_s[rank]) / compute_s[step.rows][rank] for step in steps if any(step.rows[rank])
        ]
        if ratios and median(ratios) > 0:
            factors[rank] = median(ratios)
    # A rank that had nothing to do is likely to be off as the others are.
    usual = median(factors.values()) if factors else 1.0
    ranks = tuple(rank.scaled(factors.get(index, usual)) for index, rank in enumerate(profile.ranks))
    bare = replace(bare, ranks=ranks)
    step_s = {step.rows: predict(bare, step.rows).step_s for step in steps}
    by_share = median((step.seconds - step_s[step.rows]) / _num_shares(profile.zero_stage, step.rows) for step in steps)
    if by_share < 0:
        return bare.scaled(median(step.seconds / step_s[step.rows] for step in steps))
    return bare.with_collectives(
        by_share if profile.zero_stage >= 2 else 0.0, by_share if profile.zero_stage <= 2 else 0.0
    )


def _num_shares(zero_stage: int, rows: Sequence[Row]) -> int:
    """Return how many equal shares the collectives of a step have."""
    return {2: len(rows[0]) + 1, 3: len(rows[0])}.get(zero_stage, 1)

"""Seconds of a stage's collectives that compute does not hide, on cards: real steps, less what compute takes.

[Note: calibration]
How much of a collective hides behind compute depends on the sizes of the messages, the order of the units, the library,
the links and on what else there is to do; a model of all that would be a guess. So once the curves are known, the real
engine takes a few steps over the real group, each rank with a micro-batch that takes it about as long as the others, as
a plan would give it. With c the slowest rank's curve at its size, o the slowest optimizer step, T1 a step of one
micro-step and T2 one of two:

    stages 0, 1    step_collective_s = T1 - c - o
    stages 2, 3    micro_step_collective_s = T2 - T1 - c,  step_collective_s = T1 - c - o - micro_step_collective_s

none of them below 0. Votes at both ends of a step, imbalance inside a micro-step and everything else that a step costs
beyond compute are in these numbers, and so in predictions. Processors are not steady enough for such differences: see
rehearsal.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from poplar.curve import curve_of
from poplar.plan import ClusterProfile, RankProfile
from poplar.planning.cost import Row
from poplar.profiling.together import Choice, StepTaker, TimedSteps
from poplar.zero.comm import from_rank_0

MIN_ROUNDS, MAX_ROUNDS = 3, 7
ROUNDS_S = 1.5
"""About how long the measured steps of a stage may take together."""
LONG_MICRO_STEP_S = 2.0
"""A micro-step need not be longer to show what its collectives cost."""


def balanced_sizes(ranks: Sequence[RankProfile], global_batch_size: int | None) -> list[int]:
    """Return micro-batches by rank that take about as long, as large as memory and the global batch allow."""
    curves = [curve_of(rank) for rank in ranks]
    able = [curve for curve in curves if curve.max_micro_batch_size > 0]
    if not able:
        return [0] * len(ranks)
    times = np.unique(np.concatenate([curve.seconds_array()[1:] for curve in able]))
    longest_s = min(LONG_MICRO_STEP_S, *(curve.seconds(curve.max_micro_batch_size) for curve in able))
    chosen: list[int] = []
    for seconds in times:
        sizes = [curve.largest_within(float(seconds)) for curve in curves]
        if chosen and (seconds > longest_s or (global_batch_size is not None and sum(sizes) > global_batch_size)):
            break
        chosen = sizes
    return chosen


def calibrate(taker: StepTaker, profile: ClusterProfile, global_batch_size: int | None) -> ClusterProfile:
    """Return ``profile`` with what its collectives add: see [Note: calibration].

    Raises:
        ProfileError: another rank failed; the failing rank raises its own error.
    Collective.
    """

    def choose(profile: ClusterProfile) -> Choice:
        sizes = balanced_sizes(profile.ranks, global_batch_size)
        if not any(sizes):
            return [], 0
        kinds = [[(size,) * count for size in sizes] for count in ((1, 2) if profile.zero_stage >= 2 else (1,))]
        expected_s = sum(_compute_s(profile, rows) for rows in kinds)
        return kinds, int(min(MAX_ROUNDS, max(MIN_ROUNDS, ROUNDS_S / max(expected_s, 1e-9))))

    profile, steps = taker.take(profile, choose)
    if steps is None:
        return profile
    return from_rank_0(taker.comm, lambda: _calibrated(profile, steps))


def _calibrated(profile: ClusterProfile, steps: TimedSteps) -> ClusterProfile:
    medians_s = np.median(steps.seconds, axis=1)
    one_s, *two_s = (seconds - _compute_s(profile, rows) for rows, seconds in zip(steps.kinds, medians_s, strict=True))
    micro_step_s = max(0.0, two_s[0] - one_s) if two_s else 0.0
    return profile.with_collectives(float(micro_step_s), float(max(0.0, one_s - micro_step_s)))


def _compute_s(profile: ClusterProfile, rows: Sequence[Row]) -> float:
    """Return the seconds of a step of alike micro-steps without its collectives."""
    micro_step_s = max(curve_of(rank).seconds(row[0]) for rank, row in zip(profile.ranks, rows, strict=True))
    return len(rows[0]) * micro_step_s + max(rank.optimizer_step_s for rank in profile.ranks)

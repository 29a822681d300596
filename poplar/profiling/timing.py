"""What repeated measurements of one thing say: how long the warm-up was, the median, and by how much they disagree.

[Note: warm-up]
The first runs of anything are slow: contexts are made, kernels compiled, algorithms searched, caches filled; by how
many runs differs, by ten or a thousand times. So no fixed number is left out: the warm-up ends with the first run that
the next one confirms. After it the median counts, of more runs where they disagree.

[Note: the undisturbed quarter]
What disturbs a processor only makes it slower, for seconds at a time, and each size in other moments: medians of a few
runs then differ by what happened to be going on. Their lower quartiles are runs that nothing disturbed, so that sizes,
cards and stages can be compared. How slow the processor is in the mean is for steps of all ranks to tell
(rehearsal.py). Not so under a CPU quota, where being stopped is the rule and not a disturbance.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

AGREEMENT = 0.1
"""Runs that differ by no more than this share agree."""
MIN_REPEATS = 6
MIN_TO_LEAVE_OUT = 5
"""Of fewer runs even the outermost count in the spread: a few may agree by chance."""
MAX_REPEATS = 9
MAX_WARM_UP = 10


@dataclass(frozen=True)
class Timing:
    """The outcome of repeated runs."""

    seconds: float
    """Median after the warm-up; if asked for, the lower quartile."""
    spread: float
    """Width of the middle half, of fewer than 5 runs that of all, as a share of the median."""
    num_repeats: int
    """Runs that count."""
    is_warm: bool
    """Whether two runs in a row agreed; before that, the later half of the runs counts."""

    @property
    def is_settled(self) -> bool:
        """Whether more runs would tell nothing new."""
        enough = self.num_repeats >= MIN_REPEATS and (self.spread <= AGREEMENT or self.num_repeats >= MAX_REPEATS)
        return enough and (self.is_warm or self.num_repeats >= MAX_WARM_UP)


def summarize(runs_s: Sequence[float], undisturbed: bool = False) -> Timing:
    """Return what the seconds of one or more runs, in the order they happened, say.

    Args:
        undisturbed: take the lower quartile: see [Note: the undisturbed quarter].
    """
    agreeing = (
        index
        for index, (one, other) in enumerate(zip(runs_s, runs_s[1:], strict=False))
        if abs(one - other) <= AGREEMENT * max(one, other)
    )
    start = next(agreeing, None)
    counted = sorted(runs_s[len(runs_s) // 2 if start is None else start :])
    median_s = statistics.median(counted)
    lower, upper = counted[0], counted[-1]
    if len(counted) >= MIN_TO_LEAVE_OUT:
        lower, _, upper = statistics.quantiles(counted, n=4, method="inclusive")
    spread = (upper - lower) / median_s if median_s > 0 else 0.0
    seconds = (
        statistics.quantiles(counted, n=4, method="inclusive")[0] if undisturbed and len(counted) > 1 else median_s
    )
    return Timing(seconds=seconds, spread=spread, num_repeats=len(counted), is_warm=start is not None)


def sizes_to_time(largest: int) -> list[int]:
    """Return the micro-batch sizes to time: all up to 6, else powers of two, and the largest."""
    if largest <= 6:
        return list(range(1, largest + 1))
    return [2**power for power in range((largest - 1).bit_length())] + [largest]

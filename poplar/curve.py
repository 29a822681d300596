"""Seconds of a micro-step by micro-batch size, fitted to a few measured sizes.

The curve is a natural cubic spline through the measured points (arXiv:2408.12596), made safe for planning:

    medians of repeated sizes -> steadied within their spreads -> isotonic regression -> spline (or PCHIP)
                              -> read once at every whole size -> array

[Note: why the curve is safe to plan with] Searches invert the curve ("the largest batch within t seconds") and sum it,
which needs three things of it: positive, non-decreasing, and never read where nothing ran. Noise breaks the second (a
larger batch measured faster), so that the points are made non-decreasing first. A spline may still swing between points
that are; then the whole curve is the monotone PCHIP interpolation, and ``note`` says so. Sizes above ``max`` raise.
Between the largest timed size and ``max``, which trained but was not timed, the curve goes on as a straight line.

[Note: the planner's curse] A search for the least time finds the points that noise made too fast, builds the plan on
them, and is disappointed. A measured time is known only to within its spread, so in that interval the curve takes the
value nearest to a straight line through all points (fixed costs, and so much a sample). Where measurements are sharp,
as on an idle card, nothing moves, and the steps of real hardware stay.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from poplar.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from poplar.plan import RankProfile

_ROUNDING = 1e-12
"""Relative dip of a spline that is rounding, not a swing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """Seconds of one micro-step for every micro-batch size from 0 to ``max_micro_batch_size``."""

    max_micro_batch_size: int
    """The largest size that may be asked for."""
    method: str
    """``"natural cubic spline"``, ``"pchip"``, ``"line"`` (two points), ``"proportional"`` (one), ``"none"`` (none)."""
    note: str
    """What was done to the points, in words; empty when they were taken as they are."""
    _seconds: NDArray[np.float64]

    def seconds(self, micro_batch_size: int) -> float:
        """Return the seconds of one micro-step; 0 samples take 0.0.

        Raises:
            ConfigError: ``micro_batch_size`` is negative, or above the largest size that ran.
        """
        if not 0 <= micro_batch_size <= self.max_micro_batch_size:
            raise ConfigError(
                f"the curve holds for micro-batch sizes from 0 to {self.max_micro_batch_size}, got {micro_batch_size}; "
                "profile again to know larger ones"
            )
        return float(self._seconds[micro_batch_size])

    def seconds_array(self) -> NDArray[np.float64]:
        """Return the seconds of every size: 1D, (max_micro_batch_size + 1,), read-only, non-decreasing."""
        return self._seconds

    def largest_within(self, seconds: float) -> int:
        """Return the largest size whose micro-step takes at most ``seconds``; 0 if none does."""
        return max(0, int(np.searchsorted(self._seconds, seconds, side="right")) - 1)


def fit_curve(points: Iterable[tuple[int, float]], max_micro_batch_size: int | None = None) -> Curve:
    """Fit a curve to measured (micro_batch_size, seconds) points; equal arguments share one curve.

    Args:
        points: in any order; a size measured several times counts with its median. None at all: a card that holds
            shards only, whose curve ends at 0.
        max_micro_batch_size: the largest size that trained; None: the largest in ``points``. Points above it still
            shape the curve.

    Raises:
        ConfigError: a size below 1, seconds that are not finite or not above 0, or a maximum without points.
    """
    points = tuple((size, seconds) for size, seconds in points)
    if max_micro_batch_size is None:
        max_micro_batch_size = max((size for size, _ in points), default=0)
    for size, seconds in points:
        if size < 1 or not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(f"a point needs a size of 1 or more and finite seconds above 0; got ({size}, {seconds})")
    if max_micro_batch_size < 0 or (max_micro_batch_size > 0 and not points):
        raise ConfigError(f"a curve up to micro-batch size {max_micro_batch_size} cannot be fitted to {points}")
    return _fit(points, max_micro_batch_size)


def curve_of(rank: RankProfile) -> Curve:
    """Return the fitted curve of a rank's profile."""
    return _fit(rank.points, rank.max_micro_batch_size, rank.point_spreads)


@lru_cache(maxsize=2048)
def _fit(points: tuple[tuple[int, float], ...], maximum: int, spreads: tuple[tuple[int, float], ...] = ()) -> Curve:
    if not points:
        return Curve(max_micro_batch_size=0, method="none", note="", _seconds=_frozen(np.zeros(1)))
    repeats = defaultdict(list)
    for size, seconds in points:
        repeats[size].append(seconds)
    sizes = sorted(repeats)
    measured = [median(repeats[size]) for size in sizes]
    steadied = _steadied(np.array(sizes, float), np.array(measured), dict(spreads)) if spreads else measured
    fitted = isotonic(steadied)
    moved = [size for size, before, after in zip(sizes, steadied, fitted, strict=True) if before != after]
    notes = []
    if moved:
        listed = ", ".join(map(str, moved))
        notes.append(f"measured times fell with the batch size and were smoothed (at sizes {listed})")
    method, seconds_array, swing = _interpolate(np.array(sizes, float), np.array(fitted), max(maximum, sizes[-1]))
    if swing is not None:
        notes.append(f"a cubic spline would decrease near size {swing}, so the curve is monotone PCHIP")
    if maximum > sizes[-1]:
        notes.append(f"times above {sizes[-1]}, the largest batch that was timed, go on as a straight line")
    return Curve(
        max_micro_batch_size=maximum,
        method=method,
        note="; ".join(notes),
        _seconds=_frozen(seconds_array[: maximum + 1].copy()),
    )


def _interpolate(
    sizes: NDArray[np.float64], seconds: NDArray[np.float64], maximum: int
) -> tuple[str, NDArray[np.float64], int | None]:
    """Return the method, the seconds of sizes 0 to ``maximum``, and where a spline was refused (or None)."""
    # Imported here, since it takes longer than importing all of Poplar, which many uses of it never need.
    from scipy.interpolate import CubicSpline, PchipInterpolator

    first, last = int(sizes[0]), int(sizes[-1])
    whole_sizes = np.arange(maximum + 1, dtype=float)
    if len(sizes) == 1:
        return "proportional", whole_sizes * (seconds[0] / sizes[0]), None
    inside = whole_sizes[first : last + 1]
    swing = None
    if len(sizes) == 2:
        method, values = "line", np.interp(inside, sizes, seconds)
    else:
        method, values = "natural cubic spline", CubicSpline(sizes, seconds, bc_type="natural")(inside)
        swing = _first_swing(values)
        if swing is not None:
            swing += first
            method, values = "pchip", PchipInterpolator(sizes, seconds)(inside)
    slopes = np.diff(seconds) / np.diff(sizes)
    # Below: the first slope, but no cheaper per sample than the first point was (its fixed costs do not vanish).
    # Above: the last slope, but no flatter than the whole curve (noise can flatten the last piece to nothing).
    shorter, longer = whole_sizes[1:first], whole_sizes[last + 1 :]
    below = np.maximum(seconds[0] * shorter / first, seconds[0] - slopes[0] * (first - shorter))
    chord = (seconds[-1] - seconds[0]) / (last - first)
    # Points that are flat all along say nothing of larger sizes: assume the worst, no gain per sample.
    slope = max(slopes[-1], chord) or seconds[-1] / last
    above = seconds[-1] + slope * (longer - last)
    return method, np.maximum.accumulate(np.concatenate([[0.0], below, values, above])), swing


def _first_swing(values: NDArray[np.float64]) -> int | None:
    """Return the index at which ``values`` fall or are not positive; None if nowhere."""
    bad = values <= 0
    bad[1:] |= np.diff(values) < -_ROUNDING * values[-1]
    return int(np.argmax(bad)) if bad.any() else None


def _steadied(sizes: NDArray[np.float64], seconds: NDArray[np.float64], spreads: Mapping[int, float]) -> list[float]:
    """Return ``seconds`` moved towards a straight line, each by half its spread at most: [Note: the planner's curse].

    Args:
        spreads: by size, the width of the middle half of its measurements as a share of the median.
    """
    if len(sizes) < 3:
        return seconds.tolist()
    # Least squares of relative differences, since noise is a share of the time: fixed_s / t + sample_s * n / t = 1.
    # Written out and summed exactly, so that unlike processors, whose linear algebra differs, find the same line.
    x, y = (1 / seconds).tolist(), (sizes / seconds).tolist()
    xx, yy, xy = (math.fsum(a * b for a, b in zip(u, v, strict=True)) for u, v in ((x, x), (y, y), (x, y)))
    determinant = xx * yy - xy * xy
    if determinant <= 0:
        return seconds.tolist()
    fixed_s = (yy * math.fsum(x) - xy * math.fsum(y)) / determinant
    sample_s = (xx * math.fsum(y) - xy * math.fsum(x)) / determinant
    slack = seconds * np.array([spreads.get(int(size), 0.0) for size in sizes]) / 2
    slack = np.minimum(slack, seconds / 2)
    return np.clip(fixed_s + sample_s * sizes, seconds - slack, seconds + slack).tolist()


def isotonic(values: Sequence[float]) -> list[float]:
    """Return the non-decreasing sequence nearest to ``values`` in absolute deviation.

    Pools adjacent violators, a pool counting with its median rather than its mean: one wild measurement, say a first
    call that compiled kernels, then moves its neighbours little.
    """
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and median(pools[-2]) > median(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [median(pool) for pool in pools for _ in pool]


def _frozen(array: NDArray[np.float64]) -> NDArray[np.float64]:
    array.flags.writeable = False
    return array

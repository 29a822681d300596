"""What a step costs: the one formula that planning, the simulator and reports share.

Stages 0 and 1: every rank runs its own micro-steps and waits once, at the end, so that the slowest rank's sum counts.
Stages 2 and 3: the collectives of a micro-step tie the ranks together, so that each micro-step costs its slowest rank
plus the collectives that compute does not hide. Then come the step's own collectives and the slowest optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from poplar.curve import curve_of
from poplar.errors import ConfigError, InfeasiblePlanError, PlanMismatchError
from poplar.plan import ClusterProfile, Plan, Prediction, RankProfile

Row = tuple[int, ...]
"""The micro-batch sizes of one rank, one per micro-step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Kind:
    """Ranks with the same curve and the same limit; a cluster of a thousand cards has a few of them."""

    ranks: tuple[int, ...]
    seconds: np.ndarray
    """1D, (limit + 1,): seconds of a micro-step by its size, non-decreasing, 0.0 at 0."""

    @property
    def limit(self) -> int:
        """The largest micro-batch a rank of this kind may get."""
        return len(self.seconds) - 1


def group_ranks(profile: ClusterProfile, limits: Sequence[int]) -> tuple[Kind, ...]:
    """Group the ranks that may take samples by what they measured.

    Args:
        limits: the largest micro-batch by rank, at most what the rank measured; a rank with 0 is left out.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    curves = [curve_of(measured) for measured in profile.ranks]  # equal measurements share one
    for rank, (curve, limit) in enumerate(zip(curves, limits, strict=True)):
        if limit > 0:
            groups.setdefault((id(curve), limit), []).append(rank)
    return tuple(
        Kind(ranks=tuple(ranks), seconds=curves[ranks[0]].seconds_array()[: limit + 1])
        for (_, limit), ranks in groups.items()
    )


def predict(profile: ClusterProfile, plan: Plan | Sequence[Sequence[int]]) -> Prediction:
    """Predict a step of ``plan`` on the cluster of ``profile``.

    For every rank, compute and idle time and the collectives add up to the step.

    Args:
        plan: a plan, or the micro-batch sizes of every rank.

    Raises:
        PlanMismatchError: another number of ranks than in the profile.
        InfeasiblePlanError: a micro-batch is larger than what the rank can run.
        ConfigError: unequal numbers of micro-steps at stages 2 and 3.
    """
    rows = [rank.micro_batch_sizes for rank in plan.ranks] if isinstance(plan, Plan) else [tuple(row) for row in plan]
    if len(rows) != profile.world_size:
        raise PlanMismatchError(f"the profile is of {profile.world_size} ranks, the plan has {len(rows)} rows")
    seconds = _seconds_by_row(profile, rows)
    optimizer_step_s = max(rank.optimizer_step_s for rank in profile.ranks)
    own_s = [math.fsum(seconds[_key(rank, row)]) for rank, row in zip(profile.ranks, rows, strict=True)]
    if profile.zero_stage <= 1:
        slowest_s, num_micro_steps = max(own_s), 0
    else:
        num_micro_steps = len(rows[0])
        if any(len(row) != num_micro_steps for row in rows):
            raise ConfigError(
                f"at stage {profile.zero_stage} every rank needs the same number of micro-steps (some may be 0); got "
                f"{[len(row) for row in rows]}"
            )
        slowest_s = math.fsum(map(max, zip(*seconds.values(), strict=True)))
    collective_s = num_micro_steps * profile.micro_step_collective_s + profile.step_collective_s
    return Prediction(
        step_s=_settled(slowest_s + optimizer_step_s + collective_s),
        compute_s=tuple(own + rank.optimizer_step_s for own, rank in zip(own_s, profile.ranks, strict=True)),
        idle_s=tuple(
            (slowest_s - own) + (optimizer_step_s - rank.optimizer_step_s)
            for own, rank in zip(own_s, profile.ranks, strict=True)
        ),
        collective_s=collective_s,
        peak_memory_bytes=tuple(
            peak_memory_bytes(rank, max(row, default=0)) for rank, row in zip(profile.ranks, rows, strict=True)
        ),
    )


def _settled(seconds: float) -> float:
    """Return 12 digits of ``seconds``: sums in another order then compare as equal."""
    return float(f"{seconds:.12g}")


def _key(rank: RankProfile, row: Row) -> tuple[object, ...]:
    return rank.points, rank.point_spreads, rank.max_micro_batch_size, row


def _seconds_by_row(profile: ClusterProfile, rows: Sequence[Row]) -> dict[tuple[object, ...], list[float]]:
    """Return the seconds of every micro-step of every different (curve, row)."""
    seconds: dict[tuple[object, ...], list[float]] = {}
    for index, (rank, row) in enumerate(zip(profile.ranks, rows, strict=True)):
        key = _key(rank, row)
        if key in seconds:
            continue
        largest = max(row, default=0)
        if largest > rank.max_micro_batch_size:
            raise InfeasiblePlanError(
                f"rank {index} ({rank.device}) fits at most {rank.max_micro_batch_size} samples at stage "
                f"{profile.zero_stage}, the plan asks for {largest}; make the plan anew, or lower the micro-batch"
            )
        if min(row, default=0) < 0:
            raise ConfigError(f"micro-batch sizes must be 0 or more; rank {index} has {min(row)}")
        seconds[key] = curve_of(rank).seconds_array()[np.array(row, dtype=np.intp)].tolist()
    return seconds


def peak_memory_bytes(rank: RankProfile, micro_batch_size: int) -> int | None:
    """Return the peak bytes of a step with micro-batches up to this size, on straight lines between measured sizes.

    A rank without samples holds its model state. None: the profile measured no memory.
    """
    points = dict(rank.memory_points)
    if rank.state_bytes is not None:
        points.setdefault(0, rank.state_bytes)
    if not points or (micro_batch_size == 0 and 0 not in points):
        return None
    sizes = sorted(points)
    peaks = [points[size] for size in sizes]
    if micro_batch_size > sizes[-1] and len(sizes) > 1:
        slope = max(0.0, (peaks[-1] - peaks[-2]) / (sizes[-1] - sizes[-2]))
        return round(peaks[-1] + slope * (micro_batch_size - sizes[-1]))
    return round(float(np.interp(micro_batch_size, sizes, peaks)))

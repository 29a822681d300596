"""A step of a plan laid out in time: what each rank does when, by the curves and the formula of ``cost.py``.

    stages 0, 1   | micro-steps one after the other       | idle | collectives | optimizer | idle |
    stages 2, 3   | micro-step | idle | collectives | ... | idle | collectives | optimizer | idle |

A stretch of micro-steps after which the ranks meet is a round: all of them at stages 0 and 1, each at stages 2 and 3.
Collectives that compute hides are not seen, as they cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poplar.curve import curve_of
from poplar.plan import ClusterProfile, Plan
from poplar.planning.cost import predict

COMPUTE, IDLE, COLLECTIVE, OPTIMIZER = "compute", "idle", "collectives", "optimizer"


@dataclass(frozen=True)
class Span:
    """What a rank does from ``begin_s`` to ``end_s`` of a step."""

    kind: str
    """``COMPUTE`` (one micro-step), ``IDLE``, ``COLLECTIVE`` or ``OPTIMIZER``."""
    begin_s: float
    end_s: float
    micro_batch_size: int = 0
    """Samples of a micro-step."""


def timeline(profile: ClusterProfile, plan: Plan) -> tuple[tuple[Span, ...], ...]:
    """Return the spans of a step by rank, without gaps; all ranks end together, after the predicted seconds.

    Raises:
        PlanMismatchError, InfeasiblePlanError, ConfigError: as ``predict``, the plan does not go with the profile.
    """
    predict(profile, plan)  # refuses what has no price
    rows = [rank.micro_batch_sizes for rank in plan.ranks]
    lanes = _Lanes(len(rows))
    seconds = [curve_of(rank).seconds_array() for rank in profile.ranks]
    rounds: list[list[tuple[int, ...]]] = (
        [list(rows)] if profile.zero_stage <= 1 else [[(size,) for size in sizes] for sizes in zip(*rows, strict=True)]
    )
    for sizes_by_rank in rounds:
        for rank, sizes in enumerate(sizes_by_rank):
            for size in sizes:
                lanes.add(rank, COMPUTE, float(seconds[rank][size]), size)
        lanes.meet()
        if profile.zero_stage >= 2:
            lanes.add_to_all(COLLECTIVE, [profile.micro_step_collective_s] * len(rows))
    lanes.add_to_all(COLLECTIVE, [profile.step_collective_s] * len(rows))
    lanes.add_to_all(OPTIMIZER, [rank.optimizer_step_s for rank in profile.ranks])
    return tuple(tuple(spans) for spans in lanes.spans)


class _Lanes:
    """The spans of every rank so far."""

    def __init__(self, num_ranks: int):
        self.spans: list[list[Span]] = [[] for _ in range(num_ranks)]
        self._ends_s = [0.0] * num_ranks

    def add(self, rank: int, kind: str, seconds: float, micro_batch_size: int = 0) -> None:
        """Let ``rank`` go on; nothing is added for no time."""
        if seconds > 0:
            begin_s = self._ends_s[rank]
            self._ends_s[rank] = begin_s + seconds
            self.spans[rank].append(Span(kind, begin_s, begin_s + seconds, micro_batch_size))

    def meet(self) -> None:
        """Let every rank wait for the last one."""
        last_s = max(self._ends_s)
        for rank, end_s in enumerate(self._ends_s):
            self.add(rank, IDLE, last_s - end_s)
            self._ends_s[rank] = last_s

    def add_to_all(self, kind: str, seconds: Sequence[float]) -> None:
        """Let every rank go on by its own seconds, and wait for the last one."""
        for rank, own_s in enumerate(seconds):
            self.add(rank, kind, own_s)
        self.meet()

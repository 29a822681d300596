"""From profiles to a plan: choose each rank's micro-batches, and the ZeRO stage, for the least predicted step time.

    profiles -> kinds of ranks -> rows by a strategy (exact.py, strategies.py) -> prediction (cost.py)
             -> outcome by stage -> the fastest that fits -> Plan, with notes (notes.py); parts in planning/

Pure: no torch, no clock, no randomness; the same profiles give the same plan.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from poplar.config import STRATEGIES, ZERO_STAGES
from poplar.errors import ConfigError, InfeasiblePlanError
from poplar.plan import ClusterProfile, Plan, RankPlan, RankProfile
from poplar.planning.cost import Kind, Row, group_ranks, predict
from poplar.planning.exact import exact_rows
from poplar.planning.notes import (
    bound_notes,
    curve_notes,
    group_alike,
    idle_notes,
    leaving_out_notes,
    listed,
    rank_names,
)
from poplar.planning.strategies import equal_rows, flops_rows, poplar_rows

MIN_SHARD_GAIN = 0.02
"""Uneven shards are taken only where they are predicted to save this share of a step."""

LARGEST_GLOBAL_BATCH_SIZE = 10**8
"""A plan names every micro-batch, so that more would fill the memory."""

_GIB = 2**30

Limits = int | Mapping[int, int] | Sequence[int | None]
"""The largest micro-batch: of every rank, by rank number, or one entry a rank (None: what the rank measured)."""


@dataclass(frozen=True, kw_only=True)
class StageOutcome:
    """What planning with one profile came to."""

    zero_stage: int
    plan: Plan | None
    """None: the stage does not fit."""
    problem: str = ""
    """Why it does not fit, and on which card. With a plan: why it may not fit."""

    @property
    def fits(self) -> bool:
        return self.plan is not None

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step; infinite where the stage does not fit."""
        return self.plan.predicted.step_s if self.plan is not None and self.plan.predicted is not None else math.inf

    @property
    def has_uneven_shards(self) -> bool:
        ratios = self.plan.shard_ratios if self.plan is not None else None
        return ratios is not None and max(ratios) - min(ratios) > 1e-9

    def describe(self) -> str:
        """Return the outcome in a line: fits or not and why, the step time and its parts."""
        if self.plan is None or self.plan.predicted is None:
            return f"stage {self.zero_stage}: does not fit: {self.problem}"
        predicted = self.plan.predicted
        idle = sum(predicted.idle_s) / (len(predicted.idle_s) * predicted.step_s) if predicted.step_s else 0.0
        shards = ", uneven shards" if self.has_uneven_shards else ""
        doubt = f"; may not fit: {self.problem}" if self.problem else ""
        return (
            f"stage {self.zero_stage}{shards}: {predicted.step_s:.4g} s a step: compute up to "
            f"{max(predicted.compute_s):.4g} s, collectives {predicted.collective_s:.4g} s, "
            f"idle {idle:.0%} on average{doubt}"
        )


def allocate(
    profile: ClusterProfile | Sequence[ClusterProfile],
    global_batch_size: int,
    strategy: str = "exact",
    *,
    zero_stage: int | str = "auto",
    max_micro_batch_size: Limits | None = None,
    equal_micro_steps: bool = False,
) -> Plan:
    """Plan a step of exactly ``global_batch_size`` samples.

    Args:
        profile: of one stage, or of several; of several the stage with the least predicted step time is taken, and
            the plan's notes say how the others fared. Uneven shards win only by ``MIN_SHARD_GAIN``.
        strategy: "exact", "poplar", "flops" or "equal". Batches chosen by hand: ``Plan.manual``.
        zero_stage: a fixed stage; "auto" takes any that was profiled.
        max_micro_batch_size: bounds below what the ranks measured; 0 gives a rank no samples.
        equal_micro_steps: as many micro-steps on every rank at stages 0 and 1 too; a rank may idle (0) in some.

    Raises:
        ConfigError: an argument is wrong, or "flops" meets a card that the catalogue lacks.
        InfeasiblePlanError: no profiled stage fits, or the wishes cannot be met together; the message says which.
    """
    outcomes = explain(
        profile,
        global_batch_size,
        strategy,
        zero_stage=zero_stage,
        max_micro_batch_size=max_micro_batch_size,
        equal_micro_steps=equal_micro_steps,
    )
    return choose_outcome(outcomes)


def explain(
    profile: ClusterProfile | Sequence[ClusterProfile],
    global_batch_size: int,
    strategy: str = "exact",
    *,
    zero_stage: int | str = "auto",
    max_micro_batch_size: Limits | None = None,
    equal_micro_steps: bool = False,
) -> tuple[StageOutcome, ...]:
    """Plan with every profile by itself; arguments and ConfigErrors as in ``allocate``."""
    profiles = _checked_profiles(profile, zero_stage)
    global_batch_size = _checked_global_batch_size(global_batch_size)
    if strategy not in STRATEGIES:
        hint = " (batches by hand: Plan.manual)" if strategy == "manual" else ""
        raise ConfigError(f"strategy must be one of {', '.join(STRATEGIES)}; got {strategy!r}{hint}")
    bounds = _checked_bounds(max_micro_batch_size, profiles[0].world_size)
    outcomes = []
    for candidate in profiles:
        try:
            plan = _plan_stage(candidate, global_batch_size, strategy, bounds, equal_micro_steps)
            outcomes.append(StageOutcome(zero_stage=candidate.zero_stage, plan=plan, problem=_doubt(candidate)))
        except InfeasiblePlanError as error:
            outcomes.append(StageOutcome(zero_stage=candidate.zero_stage, plan=None, problem=str(error)))
    return tuple(outcomes)


def choose_outcome(outcomes: Sequence[StageOutcome]) -> Plan:
    """Return the plan of the fastest outcome, of equal ones the lowest stage; its notes tell of all, if there are more.

    A stage that may not fit is taken only where no other does.

    Raises:
        InfeasiblePlanError: none fits.
    """
    if not any(outcome.fits for outcome in outcomes):
        if len(outcomes) == 1:
            raise InfeasiblePlanError(outcomes[0].problem)
        raise InfeasiblePlanError("no stage fits:\n" + "\n".join(f"  {outcome.describe()}" for outcome in outcomes))

    def fastest(candidates: Sequence[StageOutcome]) -> StageOutcome | None:
        return min(candidates, key=lambda outcome: (outcome.step_s, outcome.zero_stage), default=None)

    fitting = [outcome for outcome in outcomes if outcome.fits and not outcome.problem]
    fitting = fitting or [outcome for outcome in outcomes if outcome.fits]
    even = fastest([outcome for outcome in fitting if not outcome.has_uneven_shards])
    uneven = fastest([outcome for outcome in fitting if outcome.has_uneven_shards])
    gains = uneven is not None and (even is None or uneven.step_s <= (1 - MIN_SHARD_GAIN) * even.step_s)
    chosen = uneven if gains else even
    assert chosen is not None and chosen.plan is not None
    if len(outcomes) == 1:
        return chosen.plan
    lines = [("taken: " if outcome is chosen else "") + outcome.describe() for outcome in outcomes]
    return replace(chosen.plan, notes=(*lines, *chosen.plan.notes))


def _checked_profiles(
    profile: ClusterProfile | Sequence[ClusterProfile], zero_stage: int | str
) -> tuple[ClusterProfile, ...]:
    profiles = (profile,) if isinstance(profile, ClusterProfile) else tuple(profile)
    if not profiles or not all(isinstance(one, ClusterProfile) for one in profiles):
        raise ConfigError(f"allocate needs a ClusterProfile, or several; got {type(profile).__name__}: {profile!r}")
    world_sizes = {one.world_size for one in profiles}
    if len(world_sizes) > 1:
        raise ConfigError(f"the profiles are of different clusters: they have {sorted(world_sizes)} ranks")
    kinds = {(one.precision, tuple(rank.device for rank in one.ranks)) for one in profiles}
    if len(kinds) > 1:
        first, second, *_ = sorted(kinds)
        raise ConfigError(
            f"the profiles are of different clusters: one in {first[0]} on {', '.join(first[1])}, another in "
            f"{second[0]} on {', '.join(second[1])}; plan with profiles of one cluster"
        )
    shards = [(one.zero_stage, one.shard_ratios) for one in profiles]
    if len(set(shards)) < len(shards):
        stage = max(shards, key=shards.count)[0]
        raise ConfigError(f"two profiles are of stage {stage} with the same shards; give one of them")
    if zero_stage == "auto":
        return profiles
    if zero_stage not in ZERO_STAGES or isinstance(zero_stage, bool):
        raise ConfigError(f'zero_stage must be 0, 1, 2, 3 or "auto"; got {zero_stage!r}')
    wanted = tuple(one for one in profiles if one.zero_stage == zero_stage)
    if not wanted:
        profiled = sorted({one.zero_stage for one in profiles})
        raise InfeasiblePlanError(
            f"zero_stage={zero_stage} cannot be planned: the profiles are of {listed('stage', profiled)}; profile "
            f"stage {zero_stage} too"
        )
    return wanted


def _checked_global_batch_size(global_batch_size: int) -> int:
    try:
        checked = operator.index(global_batch_size)
    except TypeError:
        checked = 0
    if not 1 <= checked <= LARGEST_GLOBAL_BATCH_SIZE or isinstance(global_batch_size, bool):
        raise ConfigError(
            f"global_batch_size must be an integer from 1 to {LARGEST_GLOBAL_BATCH_SIZE}; got {global_batch_size!r}"
        )
    return checked


def _checked_bounds(limits: Limits | None, world_size: int) -> list[int | None]:
    """Return the wished largest micro-batch by rank."""
    if limits is None or isinstance(limits, int):
        bounds: list[int | None] = [limits] * world_size
    elif isinstance(limits, Mapping):
        unknown = sorted(set(limits) - set(range(world_size)))
        if unknown:
            raise ConfigError(f"max_micro_batch_size names rank {unknown[0]}; the ranks are 0 to {world_size - 1}")
        bounds = [limits.get(rank) for rank in range(world_size)]
    else:
        bounds = list(limits)
        if len(bounds) != world_size:
            raise ConfigError(f"max_micro_batch_size needs one entry a rank: {world_size}; got {len(bounds)}")
    for rank, bound in enumerate(bounds):
        if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 0):
            raise ConfigError(f"max_micro_batch_size must be an integer, 0 or more; rank {rank} has {bound!r}")
    return bounds


def _plan_stage(
    profile: ClusterProfile,
    global_batch_size: int,
    strategy: str,
    bounds: Sequence[int | None],
    equal_micro_steps: bool,
) -> Plan:
    _check_state_fits(profile)
    limits = [
        min(global_batch_size, rank.max_micro_batch_size, rank.max_micro_batch_size if bound is None else bound)
        for rank, bound in zip(profile.ranks, bounds, strict=True)
    ]
    kinds = group_ranks(profile, limits)
    if not kinds:
        raise InfeasiblePlanError(_nothing_fits(profile))
    rows = _rows(profile, kinds, global_batch_size, strategy)
    if profile.zero_stage <= 1:
        rows = [tuple(size for size in row if size) for row in rows]
        if equal_micro_steps:
            longest = max(map(len, rows))
            rows = [row + (0,) * (longest - len(row)) for row in rows]
    predicted = predict(profile, rows)
    notes = [*profile.notes, *curve_notes(profile, kinds)] + bound_notes(profile, bounds)
    if strategy == "exact":
        notes += idle_notes(profile, rows, limits, predicted.step_s)
        notes += leaving_out_notes(profile, limits, predicted.step_s, global_batch_size)
    return Plan(
        zero_stage=profile.zero_stage,
        global_batch_size=global_batch_size,
        ranks=tuple(
            RankPlan(micro_batch_sizes=row, device=rank.device, device_id=rank.device_id)
            for row, rank in zip(rows, profile.ranks, strict=True)
        ),
        strategy=strategy,
        predicted=predicted,
        precision=profile.precision,
        shard_ratios=profile.shard_ratios,
        notes=tuple(notes),
    )


def _rows(profile: ClusterProfile, kinds: Sequence[Kind], global_batch_size: int, strategy: str) -> list[Row]:
    if strategy == "flops":
        return flops_rows(profile, kinds, global_batch_size, _ratings(profile))
    searches: dict[str, Callable[[ClusterProfile, Sequence[Kind], int], list[Row]]] = {
        "exact": exact_rows,
        "poplar": poplar_rows,
        "equal": equal_rows,
    }
    return searches[strategy](profile, kinds, global_batch_size)


def _ratings(profile: ClusterProfile) -> list[float]:
    """Return the data sheets' peaks by rank.

    Raises:
        ConfigError: a card is not in the catalogue.
    """
    from poplar.catalog import find_card

    precision = profile.precision if profile.precision in ("fp32", "fp16", "bf16") else "fp32"
    peaks = {}
    for rank in profile.ranks:
        if rank.device not in peaks:
            try:
                peaks[rank.device] = find_card(rank.device).peak_tflops(precision)
            except ConfigError as error:
                raise ConfigError(f"strategy flops needs every card's rating: {error}") from error
    return [peaks[rank.device] for rank in profile.ranks]


def _check_state_fits(profile: ClusterProfile) -> None:
    for index, rank in enumerate(profile.ranks):
        if rank.state_bytes is None or rank.memory_limit_bytes is None:
            continue
        missing = rank.state_bytes - rank.memory_limit_bytes
        if missing > 0:
            raise InfeasiblePlanError(
                f"{missing} bytes are missing on rank {index} ({rank.device}): it holds {_size(rank.state_bytes)} of "
                f"model state at stage {profile.zero_stage} and may use {_size(rank.memory_limit_bytes)}"
            )


def _doubt(profile: ClusterProfile) -> str:
    """Say which card may not hold the whole model state of stage 0: it ran nothing, and its memory is not known."""
    if profile.zero_stage > 0:
        return ""
    doubtful = [
        index
        for index, rank in enumerate(profile.ranks)
        if rank.max_micro_batch_size == 0 and (rank.state_bytes is None or rank.memory_limit_bytes is None)
    ]
    return f"no batch ran on {rank_names(profile, doubtful)}" if doubtful else ""


def _nothing_fits(profile: ClusterProfile) -> str:
    able = [index for index, rank in enumerate(profile.ranks) if rank.max_micro_batch_size > 0]
    if able:
        return (
            f"max_micro_batch_size leaves nobody to compute: {listed('rank', able)} could, and it bounds "
            f"{'them' if len(able) > 1 else 'it'} to 0"
        )
    details = [
        f"{rank_names(profile, ranks)} {room}"
        for room, ranks in group_alike(profile, range(profile.world_size), lambda rank: _room(profile.ranks[rank]))
    ]
    said = "".join(f"\n  {note}" for note in profile.notes)
    return f"not one sample fits on any card at stage {profile.zero_stage}: {'; '.join(details)}{said}"


def _room(rank: RankProfile) -> str:
    if rank.state_bytes is None or rank.memory_limit_bytes is None:
        return "took no batch"
    room = _size(rank.memory_limit_bytes - rank.state_bytes)
    return f"may use {_size(rank.memory_limit_bytes)}, of which model state leaves {room}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if abs(num_bytes) >= 0.1 * _GIB else f"{num_bytes / 2**20:.2f} MiB"

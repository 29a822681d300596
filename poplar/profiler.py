"""Measure every card at every ZeRO stage, and plan with what was measured.

    profile     for each stage: rule out by arithmetic -> each rank alone (profiling/rank.py) -> all agree
                for all stages: steps together (profiling/rehearsal.py; on cards collectives.py) -> ClusterProfile
    make_plan   profile -> where uneven shards promise more, profile that stage with them -> explain -> the fastest

[Note: alone, then together]
A rank is measured over a loopback: nobody to wait for, so that an out-of-memory on one rank cannot hang another and a
slow card cannot colour a fast card's curve. Whatever happens to a rank there is told to all by a vote afterwards, and
raises on all. Only then do the ranks take steps together, few, with micro-batches that are known to fit.

[Note: no trace]
Models and optimizers are built by calling the recipe and dropped again, the optimizer moves nothing (its learning rate
is 0), random state is put back, memory is given back.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

from poplar.allocator import choose_outcome, explain
from poplar.config import STRATEGIES, ZERO_STAGES, Recipe
from poplar.device import Device, current_device
from poplar.errors import ConfigError
from poplar.plan import ClusterProfile, Plan
from poplar.planning.shards import best_suggestion
from poplar.profiling.session import ProfileSession, ProfileSettings
from poplar.rng import preserved_random_state
from poplar.zero.comm import (
    Communicator,
    LoopbackComm,
    ProcessGroupComm,
    check_same,
    from_rank_0,
    join_process_group,
    raise_together,
)
from poplar.zero.precision import PoplarWarning

if TYPE_CHECKING:
    import torch.distributed as dist


@overload
def profile(recipe: Recipe, *, zero_stage: int, **settings: Any) -> ClusterProfile: ...
@overload
def profile(
    recipe: Recipe, *, zero_stage: Sequence[int] | str = "all", **settings: Any
) -> tuple[ClusterProfile, ...]: ...
def profile(
    recipe: Recipe,
    *,
    zero_stage: int | Sequence[int] | str = "all",
    group: dist.ProcessGroup | None = None,
    comm: Communicator | None = None,
    device: Device | None = None,
    memory_fraction: float | None = None,
    **settings: Any,
) -> ClusterProfile | tuple[ClusterProfile, ...]:
    """Measure ``recipe`` on every rank: time and memory by micro-batch size, and the collectives.

    Args:
        zero_stage: one stage, several, or "all".
        group: the ranks; None: the launcher's group, or this process alone.
        comm: a communicator instead of ``group``.
        device: what this rank runs on; None: the accelerator of this local rank, or the CPU.
        memory_fraction: share of its free memory that this rank may use; may differ between ranks. With ``device``
            it is the device's.
        settings: fields of ``ProfileSettings``.

    Returns:
        ClusterProfile for one stage, else a tuple of them in the order of the stages; the same on every rank. A stage
        whose model state cannot fit some card has no points, and the profile says how many bytes are missing.

    Raises:
        ConfigError: an argument is wrong; on ranks where it is right StepError.
        CommunicationError: the ranks were given different arguments.
        ProfileError: another rank failed; the failing rank raises its own error.
    Collective.
    """
    comm, device = _place(group, comm, device, memory_fraction)
    stages, checked = _agree(comm, zero_stage, settings)
    profiles = _measure(recipe, stages, checked, comm, device)
    return profiles[0] if isinstance(zero_stage, int) else profiles


def make_plan(
    recipe: Recipe,
    global_batch_size: int,
    zero_stage: int | str = "auto",
    strategy: str = "exact",
    **settings: Any,
) -> Plan:
    """Profile ``recipe`` on every rank and plan steps of exactly ``global_batch_size`` samples.

    Args:
        zero_stage: 0 to 3; "auto" rules out by arithmetic the stages whose model state does not fit, profiles the
            others, and takes the one with the least predicted step time.
        strategy: "exact", "poplar", "flops" or "equal". With "exact" and no ``shard_ratios``, cards with room hold more
            of the model state where that lets a small card run larger batches and is at least 2% faster.
        settings: keyword arguments of ``profile`` and fields of ``ProfileSettings``.

    Returns:
        the plan, the same on every rank; its notes tell how the other stages fared.

    Raises:
        ConfigError: an argument is wrong.
        InfeasiblePlanError: no stage fits; the message says on which rank, and how many bytes are missing.
        ProfileError: another rank failed; the failing rank raises its own error.
    Collective.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"strategy must be one of {', '.join(STRATEGIES)}; got {strategy!r}")
    comm, device = _place(
        settings.pop("group", None),
        settings.pop("comm", None),
        settings.pop("device", None),
        settings.pop("memory_fraction", None),
    )
    stages = stages_to_try(comm) if zero_stage == "auto" else zero_stage
    profiles = profile_to_plan(recipe, global_batch_size, stages, strategy, comm=comm, device=device, **settings)
    return plan_together(comm, profiles, global_batch_size, strategy)


def stages_to_try(comm: Communicator) -> tuple[int, ...]:
    """Return the stages among which "auto" chooses; on a single rank all are the same."""
    return ZERO_STAGES if comm.world_size > 1 else ZERO_STAGES[:1]


def plan_together(
    comm: Communicator, profiles: Sequence[ClusterProfile], global_batch_size: int, strategy: str
) -> Plan:
    """Return rank 0's plan from ``profiles``, with notes on every stage.

    Raises:
        ConfigError, InfeasiblePlanError: as ``allocate``, on every rank.
    Collective.
    """
    return from_rank_0(comm, lambda: choose_outcome(explain(profiles, global_batch_size, strategy)))


def profile_to_plan(
    recipe: Recipe,
    global_batch_size: int,
    zero_stage: int | Sequence[int] | str,
    strategy: str,
    *,
    comm: Communicator,
    device: Device,
    **settings: Any,
) -> tuple[ClusterProfile, ...]:
    """Profile all that a plan is chosen from: the stages, and what uneven shards promise to make faster.

    Args:
        zero_stage, settings: as for ``profile``.
        strategy: "exact" alone weighs batches and shards together, where ``shard_ratios`` leaves them open.

    Returns:
        the profile of each stage, and of one stage perhaps another one with uneven shards.
    Collective.
    """
    stages, checked = _agree(comm, zero_stage, {**settings, "global_batch_size": global_batch_size}, strategy)
    profiles = _measure(recipe, stages, checked, comm, device)
    # Ratios are by rank of the whole cluster, not of a group that is repeated in it.
    if strategy == "exact" and checked.shard_ratios is None and comm.shard_world_size == comm.world_size:
        suggestion = from_rank_0(comm, lambda: best_suggestion(profiles, global_batch_size))
        if suggestion is not None:
            uneven = replace(checked, shard_ratios=suggestion.shard_ratios)
            # It has to beat the others by a few percent only, so it is compared with one of them in the same turns.
            stage = suggestion.profile.zero_stage
            even = next(one for one in profiles if one.zero_stage == stage)
            profiles += _measure(recipe, (stage,), uneven, comm, device, even)
    return profiles


def _measure(
    recipe: Recipe,
    stages: Sequence[int],
    settings: ProfileSettings,
    comm: Communicator,
    device: Device,
    reference: ClusterProfile | None = None,
) -> tuple[ClusterProfile, ...]:
    with _without_trace():
        return ProfileSession(recipe, settings, comm, device, reference).profile_stages(stages)


def _agree(
    comm: Communicator, zero_stage: Any, settings: dict[str, Any], strategy: str | None = None
) -> tuple[tuple[int, ...], ProfileSettings]:
    """Return stages and settings once all ranks have the same: what the ranks do together depends on them.

    Raises:
        ConfigError: an argument is wrong; on the ranks where it is right StepError.
        CommunicationError: the ranks were given different ones.
    Collective.
    """
    problem: Exception | None = None
    stages: tuple[int, ...] = ()
    try:
        stages = _checked_stages(zero_stage)
        checked = _checked_settings(settings)
    except ConfigError as error:
        problem = error
    raise_together(comm, problem, "was given arguments of profiling that are wrong")
    shared = {
        "strategy": strategy,
        "zero_stage": stages,
        "precision": checked.precision,
        "max_grad_norm": checked.max_grad_norm,
        "shard_ratios": repr(checked.shard_ratios),  # not checked yet
        "global_batch_size": checked.global_batch_size,
        "max_micro_batch_size": checked.max_micro_batch_size,
        "cache_dir": "given" if checked.cache_dir is not None else None,
        "refresh": checked.refresh,
    }
    check_same(comm, shared, "the arguments of profiling")
    return stages, checked


def _checked_stages(zero_stage: Any) -> tuple[int, ...]:
    if isinstance(zero_stage, str):
        stages: tuple[Any, ...] = ZERO_STAGES if zero_stage == "all" else (zero_stage,)
    else:
        stages = (zero_stage,) if not isinstance(zero_stage, Sequence) else tuple(zero_stage)
    if not stages or any(isinstance(stage, bool) or stage not in ZERO_STAGES for stage in stages):
        raise ConfigError(f'zero_stage must be 0, 1, 2, 3, several of them, or "all"; got {zero_stage!r}')
    return stages


def _checked_settings(settings: dict[str, Any]) -> ProfileSettings:
    try:
        return ProfileSettings(**settings)
    except TypeError as error:
        raise ConfigError(f"profiling: {error}") from error


def _place(
    group: dist.ProcessGroup | None, comm: Communicator | None, device: Device | None, memory_fraction: float | None
) -> tuple[Communicator, Device]:
    """Return how to talk to the other ranks, and what this rank runs on. Collective."""
    if device is not None and memory_fraction is not None:
        raise ConfigError("memory_fraction has no effect with device=, which has its own; make the device with it")
    device = device or current_device(memory_fraction)
    if comm is None:
        joined = group if group is not None else join_process_group(device=device.torch_device)
        comm = LoopbackComm(0, 1) if joined is None else ProcessGroupComm(joined, device.torch_device)
    return comm, device


@contextmanager
def _without_trace() -> Iterator[None]:
    """See [Note: no trace]; warnings of the engine are for training, where they come again."""
    with preserved_random_state(), warnings.catch_warnings(), _quick_collection():
        warnings.simplefilter("ignore", PoplarWarning)
        yield


@contextmanager
def _quick_collection() -> Iterator[None]:
    """Keep what is there out of garbage collection, which happens often inside and takes 0.1 s with torch imported."""
    is_ours = gc.get_freeze_count() == 0
    if is_ours:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()

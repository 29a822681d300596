"""Measure every card at every ZeRO stage, and plan with what was measured.

    profile     for each stage: rule out by arithmetic -> each rank alone (profiler_rank.py) -> all agree
                                -> real steps together (profiler_collectives.py) -> ClusterProfile
    make_plan   profile -> explain every stage -> the fastest that fits

[Note: alone, then together]
A rank is measured over a loopback: nobody to wait for, so that an out-of-memory on one rank cannot hang another and a
slow card cannot colour a fast card's curve. Whatever happens to a rank there is told to all by a vote afterwards, and
raises on all. Only then do the ranks take steps together, few, with micro-batches that are known to fit.

[Note: no trace]
Models and optimizers are built by calling the recipe and dropped again, the optimizer moves nothing (its learning rate
is 0), random state is put back, memory is given back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from poplar.allocator import choose_outcome, explain
from poplar.config import PRECISIONS, STRATEGIES, ZERO_STAGES, Recipe
from poplar.device import Device, current_device
from poplar.errors import ConfigError, ProfileError, StepError
from poplar.plan import ClusterProfile, Plan, RankProfile, check_shard_ratios
from poplar.profiler_cache import ProfileCache
from poplar.profiler_collectives import balanced_sizes, calibrate
from poplar.profiler_probe import EngineSettings, ProbeBatches, RankProbe, give_back
from poplar.profiler_rank import Effort, Measured, measure_rank
from poplar.profiler_state import RecipeFacts, learn_facts
from poplar.rng import preserved_random_state
from poplar.zero.comm import (
    Communicator,
    LoopbackComm,
    ProcessGroupComm,
    check_same,
    join_process_group,
    raise_together,
)
from poplar.zero.precision import PoplarWarning, resolve_precision

if TYPE_CHECKING:
    import os

    import torch.distributed as dist

T = TypeVar("T")
_MIB = 2**20
LARGEST_MICRO_BATCH_SIZE = 4096
STAGE_BUDGET_S = {"card": 60.0, "cpu": 5.0}
"""Default of ``stage_budget_s``. A CPU rank has much memory and nothing to gain from large micro-batches."""


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """How recipes are profiled; fields as the keyword arguments of ``profile`` and ``make_plan``.

    Raises:
        ConfigError: a field is out of range.
    """

    precision: str = "fp32"
    max_grad_norm: float | None = None
    """As in training, since clipping takes time."""
    shard_ratios: Sequence[float] | None = None
    """Share of the model state by rank. None: equal."""
    units: Any = None
    """As ``initialize``'s."""
    global_batch_size: int | None = None
    """Micro-batches above it are of no use, and not tried."""
    max_micro_batch_size: int | None = None
    """The largest micro-batch to try. None: as far as memory goes, 4096 at most."""
    memory_margin: float = 0.05
    """Share of the usable memory left free: training has the collectives' buffers and fragmentation on top."""
    stage_budget_s: float | None = None
    """About how long measuring one stage may take. None: 60 on cards, 5 on CPU ranks."""
    point_budget_s: float = 0.5
    """About how long one size may be repeated while its times disagree."""
    cache_dir: str | os.PathLike[str] | None = None
    """Folder of earlier profiles, taken instead of measuring where nothing that matters has changed. None: measure."""
    refresh: bool = False
    """Measure anew, and replace what ``cache_dir`` holds."""

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision must be one of {', '.join(PRECISIONS)}; got {self.precision!r}")
        for name in ("global_batch_size", "max_micro_batch_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} must be an integer, 1 or more; got {value!r}")
        if not 0 <= self.memory_margin < 1:
            raise ConfigError(f"memory_margin must be at least 0 and below 1; got {self.memory_margin!r}")
        for name in ("stage_budget_s", "point_budget_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name} must be 0 or more seconds; got {value!r}")
        if self.refresh and self.cache_dir is None:
            raise ConfigError("refresh=True replaces what cache_dir holds; give cache_dir too")

    def effort(self, device: Device) -> Effort:
        """Return how far measuring on ``device`` goes."""
        is_plain_cpu = device.torch_device.type == "cpu" and not device.is_emulated
        default_s = STAGE_BUDGET_S["cpu" if is_plain_cpu else "card"]
        wishes = (LARGEST_MICRO_BATCH_SIZE, self.global_batch_size, self.max_micro_batch_size)
        return Effort(
            largest_wanted=min(wish for wish in wishes if wish is not None),
            memory_margin=self.memory_margin,
            stage_budget_s=default_s if self.stage_budget_s is None else self.stage_budget_s,
            point_budget_s=self.point_budget_s,
        )


def profile(
    recipe: Recipe,
    *,
    zero_stage: int | Sequence[int] | str = "all",
    group: dist.ProcessGroup | None = None,
    comm: Communicator | None = None,
    device: Device | None = None,
    memory_fraction: float | None = None,
    **settings: Any,
) -> Any:
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
        ConfigError: an argument is wrong.
        ProfileError: another rank failed; the failing rank raises its own error.
    Collective.
    """
    stages = _checked_stages(zero_stage)
    checked = _checked_settings(settings)
    comm, device = _place(group, comm, device, memory_fraction)
    with _without_trace():
        session = _Session(recipe, checked, comm, device)
        profiles = tuple(session.profile_stage(stage) for stage in stages)
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
        strategy: "exact", "poplar", "flops" or "equal".
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
    stages = _checked_stages("all" if zero_stage == "auto" else zero_stage)
    group, device = settings.get("group"), settings.get("device")
    comm, device = _place(group, settings.get("comm"), device, settings.pop("memory_fraction", None))
    settings.update(group=None, comm=comm, device=device)
    profiles = profile(recipe, zero_stage=stages, global_batch_size=global_batch_size, **settings)
    plan = choose_outcome(explain(profiles, global_batch_size, strategy))
    check_same(comm, plan.to_json(), "the plan")
    return plan


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
    with preserved_random_state(), warnings.catch_warnings():
        warnings.simplefilter("ignore", PoplarWarning)
        yield


class _Session:
    """One call of ``profile``: what its stages share."""

    def __init__(self, recipe: Recipe, settings: ProfileSettings, comm: Communicator, device: Device):
        self._settings = settings
        self._comm = comm
        self._device = device
        self._batches = ProbeBatches(recipe, device)
        self._runs_s: dict[int, list[float]] = {}
        """Micro-steps of stages 0 and 1, which are the same work."""
        ratios = settings.shard_ratios
        self._ratios = None if ratios is None else check_shard_ratios(ratios, comm.shard_world_size)
        native = comm.gather_objects(device.native_dtypes()) if settings.precision == "auto" else []
        precision = resolve_precision(settings.precision, native)
        self._engines = EngineSettings(
            recipe=recipe,
            precision=precision.name,
            max_grad_norm=settings.max_grad_norm,
            shard_ratios=self._ratios,
            units=settings.units,
        )
        self._facts: RecipeFacts = self._together(
            "reading the recipe", lambda: learn_facts(recipe, precision, self._batches.make(1))
        )
        self._cache = ProfileCache(settings, comm, device, self._facts, precision.name)

    def profile_stage(self, zero_stage: int) -> ClusterProfile:
        """Return the profile of a stage. Collective."""
        cached = self._cache.read(zero_stage)
        if cached is not None:
            return cached
        least_bytes = self._facts.least_state_bytes(zero_stage, self._share)
        usable_bytes = self._usable_bytes()
        misses = usable_bytes is not None and least_bytes > usable_bytes
        if any(row[0] for row in self._comm.gather_floats([float(misses)])):
            return self._assemble(zero_stage, self._comm.gather_objects(self._ruled_out(least_bytes, misses)))
        measured = self._together(
            f"being profiled at stage {zero_stage}", lambda: self._measure(zero_stage, least_bytes)
        )
        rows: list[Measured] = self._comm.gather_objects(measured)
        result = self._calibrated(zero_stage, rows)
        self._cache.write(result)
        return result

    @property
    def _share(self) -> float:
        return 1 / self._comm.shard_world_size if self._ratios is None else self._ratios[self._comm.shard_rank]

    def _usable_bytes(self) -> int | None:
        limit = self._device.memory_limit_bytes
        return None if limit is None else limit - self._device.allocated_bytes()

    def _together(self, doing: str, work: Callable[[], T]) -> T:
        """Do ``work`` on every rank; if it raises on one, raise on all. Collective."""
        failure: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:
            failure = error
        try:
            raise_together(self._comm, failure, f"failed while {doing}")
        except StepError as error:
            if failure is not None:
                raise
            raise ProfileError(str(error)) from None
        return result

    def _measure(self, zero_stage: int, least_bytes: int) -> Measured:
        place = self._comm.shard_rank, self._comm.shard_world_size
        runs_s = self._runs_s if zero_stage < 2 else None
        probe = RankProbe(self._engines, self._batches, zero_stage, place, self._device, runs_s)
        with self._device.unpaced():
            return measure_rank(probe, self._settings.effort(self._device), least_bytes)

    def _ruled_out(self, least_bytes: int, misses: bool) -> Measured:
        """Return the profile of a rank at a stage that cannot fit this rank, or another one."""
        usable_bytes = self._usable_bytes()
        note: tuple[str, ...] = ()
        if misses and usable_bytes is not None:
            note = (f"its model state misses {(least_bytes - usable_bytes) / _MIB:.1f} MiB of memory; not profiled",)
        return Measured(
            profile=RankProfile(
                device=self._device.name,
                device_id=self._device.device_id,
                points=(),
                max_micro_batch_size=0,
                state_bytes=least_bytes,
                memory_limit_bytes=usable_bytes,
            ),
            notes=note,
        )

    def _calibrated(self, zero_stage: int, rows: Sequence[Measured]) -> ClusterProfile:
        """Return the profile with what the collectives add. Collective."""
        rows = list(rows)
        while True:
            profiles = [row.profile for row in rows]
            sizes = balanced_sizes(profiles, self._settings.global_batch_size)
            if self._comm.world_size == 1 or not any(sizes):
                return self._assemble(zero_stage, rows)
            found = calibrate(self._engines, self._batches, zero_stage, profiles, sizes, self._comm, self._device)
            give_back(self._device)
            if not found.failed_ranks:
                return replace(
                    self._assemble(zero_stage, rows),
                    micro_step_collective_s=found.micro_step_collective_s,
                    step_collective_s=found.step_collective_s,
                )
            for rank in found.failed_ranks:
                rows[rank] = _bounded(rows[rank], sizes[rank] - 1)

    def _assemble(self, zero_stage: int, rows: Sequence[Measured]) -> ClusterProfile:
        return ClusterProfile(
            zero_stage=zero_stage,
            ranks=tuple(row.profile for row in rows),
            precision=self._engines.precision,
            shard_ratios=self._ratios,
            notes=tuple(
                f"rank {rank} ({row.profile.device}), stage {zero_stage}: {note}"
                for rank, row in enumerate(rows)
                for note in row.notes
            ),
        )


def _bounded(row: Measured, largest: int) -> Measured:
    """Return a rank's profile without the sizes above ``largest``, with which it ran out of memory among others."""
    profile = row.profile
    return Measured(
        profile=replace(
            profile,
            max_micro_batch_size=largest if any(size <= largest for size, _ in profile.points) else 0,
            points=tuple(point for point in profile.points if point[0] <= largest),
            memory_points=tuple(point for point in profile.memory_points if point[0] <= largest),
            point_spreads=tuple(point for point in profile.point_spreads if point[0] <= largest),
        ),
        notes=(*row.notes, f"a micro-batch of {largest + 1} fits it alone, but not among others"),
    )

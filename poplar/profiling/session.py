"""One call of ``profile``: its settings, and each stage from arithmetic to steps of all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from poplar.config import PRECISIONS, Recipe
from poplar.device import Device
from poplar.errors import ConfigError, ProfileError, StepError
from poplar.plan import ClusterProfile, RankProfile, check_shard_ratios
from poplar.profiling.cache import ProfileCache
from poplar.profiling.collectives import calibrate
from poplar.profiling.parts import EngineSettings, ProbeBatches
from poplar.profiling.probe import RankProbe
from poplar.profiling.rank import Effort, Measured, measure_rank
from poplar.profiling.rehearsal import rehearse
from poplar.profiling.state import RecipeFacts, learn_facts
from poplar.profiling.together import StepTaker
from poplar.zero.comm import Communicator, raise_together
from poplar.zero.precision import resolve_precision

if TYPE_CHECKING:
    import os

T = TypeVar("T")
_MIB = 2**20
LARGEST_MICRO_BATCH_SIZE = 4096
CARD_BUDGETS_S = (60.0, 0.5)
"""Defaults of ``stage_budget_s`` and ``point_budget_s``."""
CPU_BUDGETS_S = (1.4, 0.15)
"""The same for a plain CPU rank: it has much memory, and little to gain from large micro-batches."""


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
    """About how long measuring one stage may take; then no larger micro-batch is tried. None: 60, on CPU ranks 1.4."""
    point_budget_s: float | None = None
    """About how long one size may be repeated while its times disagree. None: 0.5, on CPU ranks 0.15."""
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

    def effort(self, device: Device, world_size: int) -> Effort:
        """Return how far measuring on ``device`` goes, one of ``world_size`` ranks."""
        is_plain_cpu = device.torch_device.type == "cpu" and not device.is_emulated
        stage_s, point_s = CPU_BUDGETS_S if is_plain_cpu else CARD_BUDGETS_S
        wishes = (LARGEST_MICRO_BATCH_SIZE, self.global_batch_size, self.max_micro_batch_size)
        return Effort(
            largest_wanted=min(wish for wish in wishes if wish is not None),
            memory_margin=self.memory_margin,
            stage_budget_s=stage_s if self.stage_budget_s is None else self.stage_budget_s,
            point_budget_s=point_s if self.point_budget_s is None else self.point_budget_s,
            # A single rank takes no steps with others, which would tell how slow the processor is in the mean.
            undisturbed=device.is_emulated and world_size > 1,
        )


class ProfileSession:
    """One call of ``profile``: what its stages share.

    Args:
        reference: see ``rehearse``.
    """

    def __init__(
        self,
        recipe: Recipe,
        settings: ProfileSettings,
        comm: Communicator,
        device: Device,
        reference: ClusterProfile | None = None,
    ):
        self._settings = settings
        self._reference = reference
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
        self._cache = ProfileCache(settings, comm, device, self._facts, precision.name, reference)

    def profile_stages(self, zero_stages: Sequence[int]) -> tuple[ClusterProfile, ...]:
        """Return the profile of each stage. Collective."""
        found: dict[int, ClusterProfile] = {}
        fresh = []
        for stage in zero_stages:
            cached = self._cache.read(stage)
            if cached is None:
                fresh.append(stage)
            found[stage] = self._measure_stage(stage) if cached is None else cached
        if fresh and self._comm.world_size > 1:
            taker = StepTaker(engines=self._engines, batches=self._batches, comm=self._comm, device=self._device)
            batch = self._settings.global_batch_size
            if all(row[0] for row in self._comm.gather_floats([self._device.torch_device.type == "cpu"])):
                # Those from the cache too: they were measured at another time, and are to be compared with the others.
                corrected = rehearse(taker, list(found.values()), batch, self._reference)
                found = dict(zip(found, corrected, strict=True))
                fresh = [*found]
            else:
                found |= {stage: calibrate(taker, found[stage], batch) for stage in fresh}
        for stage in fresh:
            if any(rank.points for rank in found[stage].ranks):
                self._cache.write(found[stage])
        return tuple(found[stage] for stage in zero_stages)

    def _measure_stage(self, zero_stage: int) -> ClusterProfile:
        """Return the profile of a stage by each rank alone. Collective."""
        least_bytes = self._facts.least_state_bytes(zero_stage, self._share)
        usable_bytes = self._usable_bytes()
        misses = usable_bytes is not None and least_bytes > usable_bytes
        if any(row[0] for row in self._comm.gather_floats([float(misses)])):
            return self._assemble(zero_stage, self._comm.gather_objects(self._ruled_out(least_bytes, misses)))
        measured = self._together(
            f"being profiled at stage {zero_stage}", lambda: self._measure(zero_stage, least_bytes)
        )
        return self._assemble(zero_stage, self._comm.gather_objects(measured))

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
        with self._device.hurried():
            return measure_rank(probe, self._settings.effort(self._device, self._comm.world_size), least_bytes)

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

    def _assemble(self, zero_stage: int, rows: Sequence[Measured]) -> ClusterProfile:
        return ClusterProfile(
            zero_stage=zero_stage,
            ranks=tuple(row.profile for row in rows),
            precision=self._engines.precision,
            shard_ratios=self._ratios,
            sharded_state_bytes=self._facts.sharded_state_bytes(zero_stage),
            notes=tuple(
                f"rank {rank} ({row.profile.device}), stage {zero_stage}: {note}"
                for rank, row in enumerate(rows)
                for note in row.notes
            ),
        )

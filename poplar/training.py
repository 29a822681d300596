"""The minimal loop: profile, plan, train, tell what it gave.

    join the ranks -> profile -> plan -> engine -> for each step: step, schedule, log -> held-out loss -> closing table

[Note: steps of the equal split]
What the plan gains is measured, not predicted: some steps in the middle of the run are cut as the equal split would cut
them. A step has the same samples and the same result either way, so they train the model like all others, only slower.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
import torch.distributed as dist

from poplar.allocator import allocate
from poplar.config import ZERO_STAGES, Batch, Recipe
from poplar.device import Device
from poplar.emulation import start_device
from poplar.engine import Engine, StepResult
from poplar.errors import ConfigError, InfeasiblePlanError
from poplar.fit_config import FitConfig
from poplar.loader import PlannedLoader, eval_batches
from poplar.plan import ClusterProfile, Plan, profile_of
from poplar.profiler import profile
from poplar.progress import Progress, RunFiles
from poplar.self_test import check_vendors
from poplar.startup import initialize
from poplar.tables import closing_table, describe_plan
from poplar.zero.comm import (
    Communicator,
    LoopbackComm,
    ProcessGroupComm,
    end_process_group,
    join_process_group,
    launcher_environment,
)


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a run gave; the same on every rank, but for ``engine``."""

    engine: Engine
    """Holds the trained model: ``engine.full_state_dict()``, ``engine.save(path)``."""
    plan: Plan
    profile: ClusterProfile | None
    """Of the plan's stage; None where nothing was profiled."""
    steps: int
    """Optimizer steps, skipped ones included."""
    loss: float
    """Of the last step."""
    eval_loss: float | None
    """On the held-out set after the last step; None without one."""
    step_s: float | None
    """Measured seconds of a step of the plan; None where the run was too short to tell."""
    equal_step_s: float | None
    """Measured seconds of a step of the equal split; None where it was not measured."""
    idle_shares: tuple[float, ...]
    """By rank: share of the plan's steps spent waiting for other ranks and for data."""
    run_dir: str | None

    @property
    def samples_per_s(self) -> float | None:
        return self.plan.global_batch_size / self.step_s if self.step_s else None


def fit(recipe: Recipe, config: FitConfig | None = None, **settings: Any) -> FitResult:
    """Train ``recipe`` with batches that Poplar measures and chooses.

    Args:
        recipe: what to train.
        config: how; or its fields as ``settings``, of which ``global_batch_size`` is needed.

    Raises:
        ConfigError: a setting is wrong, or the data set is smaller than the global batch.
        PlanMismatchError: the plan, or a list by rank, is for another number of ranks.
        InfeasiblePlanError: no stage fits.
        ProfileError, ModelError, StepError: from the profiler and the engine.
    Collective.
    """
    config = config if config is not None else FitConfig(**settings)
    comm, device = join(config)
    dataset = recipe.dataset()
    _check_dataset(dataset, config)
    with RunFiles(config.run_dir if comm.rank == 0 else None) as files:
        files.write("config.json", config.to_json(world_size=comm.world_size, torch=torch.__version__))
        plan, profile = choose_plan(recipe, config, comm, device)
        files.write("plan.json", plan.to_json())
        if profile is not None:
            files.write("profile.json", profile.to_json())
        show = config.progress and comm.rank == 0
        if show:
            print(describe_plan(plan, profile), end="\n\n", flush=True)
        engine = _build(recipe, config, plan, comm, device)
        loader = PlannedLoader(
            dataset, plan, comm.rank, recipe.collate, seed=config.seed, num_workers=config.num_workers
        )
        equal = _equal_split(plan, profile, config)
        loop = _Loop(recipe, config, engine, loader, files, equal)
        # An emulated card has the memory of a card: going over it is an error here too.
        with device.metered(engine.module, engine.optimizer) if device.is_emulated else nullcontext():
            loop.run()
        result = loop.result(profile)
        if show:
            print(_closing(result), flush=True)
    return result


def join(config: FitConfig) -> tuple[Communicator, Device]:
    """Join the ranks that the launcher started; return how to talk to them, and what this rank runs on. Collective.

    Raises:
        ConfigError, PlanMismatchError: a list by rank is for another number of ranks.
        CommunicationError: cards of two makers in one NCCL group.
    """
    launcher = launcher_environment() or {"RANK": "0", "WORLD_SIZE": "1"}
    rank = dist.get_rank() if dist.is_initialized() else int(launcher["RANK"])
    config.check_world_size(dist.get_world_size() if dist.is_initialized() else int(launcher["WORLD_SIZE"]))
    device = start_device(config.emulate, rank, config.memory_fraction(rank))
    group = join_process_group(config.backend, device.torch_device)
    if group is None:
        return LoopbackComm(0, 1), device
    comm = ProcessGroupComm(group, device.torch_device)
    check_vendors(comm.gather_objects(device.vendor), dist.get_backend(group))
    return comm, device


def leave(comm: Communicator) -> None:
    """End the process group, once every rank is here: rank 0 hosts the store that the others need to the end."""
    comm.barrier()
    end_process_group()


def choose_plan(
    recipe: Recipe, config: FitConfig, comm: Communicator, device: Device
) -> tuple[Plan, ClusterProfile | None]:
    """Return the plan that the settings give, or profile and make one; and the profile of its stage. Collective."""
    given = config.given_plan()
    if given is not None:
        names = comm.gather_objects(device.name)
        rows = [replace(row, device=row.device or name) for row, name in zip(given.ranks, names, strict=True)]
        return replace(given, ranks=tuple(rows)), None
    profiles = profile_stages(recipe, config, comm, device)
    plan = allocate(profiles, config.global_batch_size, config.strategy)
    return plan, profile_of(plan, profiles)


def profile_stages(recipe: Recipe, config: FitConfig, comm: Communicator, device: Device) -> tuple[ClusterProfile, ...]:
    """Profile the stages that the settings leave open. Collective."""
    return profile(
        recipe,
        zero_stage=ZERO_STAGES if config.zero_stage == "auto" else (int(config.zero_stage),),
        comm=comm,
        device=device,
        precision=config.precision,
        max_grad_norm=config.max_grad_norm,
        global_batch_size=config.global_batch_size,
        cache_dir=config.profile_cache_dir,
        refresh=config.refresh,
    )


def _check_dataset(dataset: Any, config: FitConfig) -> None:
    if not hasattr(dataset, "__len__"):
        raise ConfigError(f"the data set must be map-style, with a length; got {type(dataset).__name__}")
    if len(dataset) < config.global_batch_size:
        raise ConfigError(
            f"the data set has {len(dataset)} samples, fewer than one global batch of {config.global_batch_size}; "
            "lower global_batch_size"
        )


def _build(recipe: Recipe, config: FitConfig, plan: Plan, comm: Communicator, device: Device) -> Engine:
    """Build model and engine: weights from one seed on all ranks, what comes after from one of the rank's own."""
    _seed(config.seed)
    model = recipe.model()
    engine = initialize(
        model,
        recipe.optimizer(model),
        recipe.loss,
        plan=plan,
        weight=recipe.weight,
        reduction=recipe.reduction,
        max_grad_norm=config.max_grad_norm,
        comm=comm,
        device=device,
    )
    _seed(config.seed, 1 + comm.rank)
    return engine


def _seed(*key: int) -> None:
    """Seed Python's, numpy's and torch's generators; different keys give unrelated streams."""
    words = numpy.random.SeedSequence(key).generate_state(3)
    random.seed(int(words[0]))
    numpy.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))


def _equal_split(plan: Plan, profile: ClusterProfile | None, config: FitConfig) -> Plan | None:
    """Return the equal split at the plan's stage; None where it cannot be measured, or is what the plan does anyway."""
    if profile is None or config.compare_steps == 0:
        return None
    try:
        equal = allocate(profile, plan.global_batch_size, "equal")
    except InfeasiblePlanError:
        return None
    same = [row.micro_batch_sizes for row in equal.ranks] == [row.micro_batch_sizes for row in plan.ranks]
    return None if same else equal


class _Clock:
    """Seconds of steps, and what of them was waiting, from the end of one step to the end of the next.

    So a collective that one step leaves to the next is counted: a clock around each step alone would miss it.
    """

    def __init__(self) -> None:
        self._laps: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        self._last: tuple[float, float] | None = None

    def restart(self) -> None:
        """Leave the next step out: it begins with something else, or is the first of its kind."""
        self._last = None

    def lap(self, waited_s: float, *, by_plan: bool, counts: bool) -> float:
        """End a step; return its seconds, NaN for one left out. ``waited_s``: waited in the whole process so far."""
        now = (time.perf_counter(), waited_s)
        last, self._last = self._last, now
        if last is None:
            return math.nan
        if counts:
            self._laps[by_plan].append((now[0] - last[0], now[1] - last[1]))
        return now[0] - last[0]

    def step_s(self, *, by_plan: bool) -> float | None:
        """Return the median seconds of a step; None without one."""
        laps = self._laps[by_plan]
        return statistics.median(seconds for seconds, _ in laps) if laps else None

    def idle_share(self) -> float:
        """Return the share of the plan's steps that was spent waiting; NaN without one."""
        total_s = sum(seconds for seconds, _ in self._laps[True])
        return sum(waited for _, waited in self._laps[True]) / total_s if total_s else math.nan


class _Loop:
    """The steps of a run, with their measurements."""

    def __init__(
        self,
        recipe: Recipe,
        config: FitConfig,
        engine: Engine,
        loader: PlannedLoader,
        files: RunFiles,
        equal: Plan | None,
    ):
        self.recipe, self.config, self.engine, self.loader, self.files = recipe, config, engine, loader, files
        self.plan = loader.plan
        self.total_steps = config.steps or (config.epochs or 1) * len(loader)
        self.eval_dataset = recipe.eval_dataset() if recipe.eval_dataset is not None else None
        self.eval_loss: float | None = None
        self._equal = equal
        self._equal_from = self.total_steps // 2
        self._clock = _Clock()
        self._last: StepResult | None = None
        shown = sys.stderr if config.progress and engine.comm.rank == 0 else None
        self._progress = Progress(self.total_steps, stream=shown)

    def run(self) -> None:
        scheduler = self.recipe.scheduler(self.engine.optimizer) if self.recipe.scheduler is not None else None
        for step, micro_batches in enumerate(self._steps(), start=1):
            result = self.engine.step(micro_batches)
            if scheduler is not None and not result.skipped:
                scheduler.step()
            self._log(step, result)
            if step == self.total_steps or (self.config.eval_every and step % self.config.eval_every == 0):
                self._evaluate(step)

    def _steps(self) -> Iterator[list[Batch | None]]:
        """Yield the run's steps, epoch after epoch; some in the middle are cut by the equal split."""
        step = 0
        while step < self.total_steps:
            for micro_batches in self.loader:
                yield micro_batches
                step += 1
                if step == self.total_steps:
                    return
                self._choose_split(step)

    def _choose_split(self, step: int) -> None:
        """Cut the step after ``step`` by the plan or by the equal split."""
        if self._equal is None:
            return
        compares = self._equal_from <= step < self._equal_from + self.config.compare_steps
        wanted = self._equal if compares else self.plan
        if self.loader.plan is not wanted:
            self.loader.set_plan(wanted)
            self._clock.restart()

    def _log(self, step: int, result: StepResult) -> None:
        num_samples = self._num_samples(step)
        by_plan = self.loader.plan is self.plan
        whole = num_samples == self.plan.global_batch_size
        seconds = self._clock.lap(self.engine.wait_s, by_plan=by_plan, counts=whole)
        tokens_per_s = result.weight / seconds if self.recipe.weight is not None else None
        self._progress.show(step, result.loss, num_samples / seconds, tokens_per_s)
        self.files.log(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            weight=result.weight,
            skipped=result.skipped,
            learning_rate=self.engine.optimizer.param_groups[0]["lr"],
            num_samples=num_samples,
            step_s=seconds,
            strategy=self.loader.plan.strategy,
        )
        self._last = result

    def _num_samples(self, step: int) -> int:
        """Return the samples of a step; the last one of an epoch may have fewer."""
        tail = len(self.loader.dataset) % self.plan.global_batch_size  # type: ignore[arg-type]  # checked to have one
        return tail if tail and step % len(self.loader) == 0 else self.plan.global_batch_size

    def _evaluate(self, step: int) -> None:
        if self.eval_dataset is None:
            return
        batches = list(eval_batches(self.eval_dataset, self.plan, self.engine.comm.rank, self.recipe.collate))
        self.eval_loss = self.engine.evaluate(batches)
        self._clock.restart()
        self._progress.say(f"step {step}: held-out loss {self.eval_loss:.4f}")
        self.files.log(step=step, eval_loss=self.eval_loss)

    def result(self, profile: ClusterProfile | None) -> FitResult:
        """Return what the run gave. Collective."""
        assert self._last is not None
        idle = self.engine.comm.gather_floats([self._clock.idle_share()])
        return FitResult(
            engine=self.engine,
            plan=self.plan,
            profile=profile,
            steps=self.total_steps,
            loss=self._last.loss,
            eval_loss=self.eval_loss,
            step_s=self._clock.step_s(by_plan=True),
            equal_step_s=self._clock.step_s(by_plan=False),
            idle_shares=tuple(row[0] for row in idle),
            run_dir=self.config.run_dir,
        )


def _closing(result: FitResult) -> str:
    """Return what a run says at its end."""
    parts = []
    if result.step_s is not None:
        parts.append(closing_table(result.plan, result.step_s, result.idle_shares, result.equal_step_s))
    parts.append(f"loss {result.loss:.4f} after {result.steps} steps")
    if result.eval_loss is not None:
        parts[-1] += f", held-out loss {result.eval_loss:.4f}"
    if result.run_dir is not None:
        parts.append(f"run directory: {result.run_dir}")
    return "\n".join(parts)

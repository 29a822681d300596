"""The minimal loop: profile, plan, train, tell what it gave.

join the ranks -> profile -> plan -> engine -> the loop (training_loop.py) -> closing table
"""

from __future__ import annotations

import math
import random
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
import torch.distributed as dist

from poplar.allocator import allocate
from poplar.config import ZERO_STAGES, Recipe
from poplar.device import Device, is_out_of_memory
from poplar.emulation import describe_emulation, start_device
from poplar.engine import Engine
from poplar.errors import ConfigError, InfeasiblePlanError
from poplar.fit_config import FitConfig
from poplar.loader import PlannedLoader
from poplar.plan import ClusterProfile, Plan, profile_of
from poplar.planning.record import StepRecord
from poplar.profiler import plan_together, profile, profile_to_plan, stages_to_try
from poplar.progress import RunFiles
from poplar.self_test import check_vendors
from poplar.startup import initialize
from poplar.tables import closing_table, describe_plan
from poplar.training_loop import Loop
from poplar.zero.comm import (
    Communicator,
    LoopbackComm,
    ProcessGroupComm,
    check_same,
    end_process_group,
    join_process_group,
    launcher_environment,
    raise_together,
)


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a run gave; the same on every rank, but for ``engine`` and ``equal_step_s``."""

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
    """Measured seconds of a step of the equal split, here; None where it was not measured."""
    record: StepRecord | None
    """A step of the plan, predicted and measured, with its parts; None where the run was too short to tell."""
    idle_shares: tuple[float, ...]
    """By rank: share of the plan's steps spent waiting for other ranks."""
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
    try:
        config = config if config is not None else FitConfig(**settings)
    except TypeError as error:
        raise ConfigError(f"fit: {error}") from error
    comm, device = join(config)
    dataset = _build_dataset(recipe, config, comm)
    with RunFiles(config.run_dir if comm.rank == 0 else None) as files:
        files.write("config.json", config.to_json(world_size=comm.world_size, torch=torch.__version__))
        plan, measured = choose_plan(recipe, config, comm, device)
        files.write("plan.json", plan.to_json())
        files.remove("profile.json", "record.json")  # of an earlier run in this folder
        if measured is not None:
            files.write("profile.json", measured.to_json())
        show = config.progress and comm.rank == 0
        if show:
            print(describe_plan(plan, measured), end="\n\n", flush=True)
        engine = _build(recipe, config, plan, comm, device)
        loader = PlannedLoader(
            dataset,
            plan,
            comm.rank,
            recipe.collate,
            seed=config.seed,
            num_workers=config.num_workers,
            pin_memory=device.torch_device.type == "cuda",  # so that a micro-batch's copy overlaps with compute
        )
        loop = Loop(recipe, config, engine, loader, files, _equal_split(plan, measured, config))
        # An emulated card has the memory of a card: going over it is an error here too.
        with device.metered(engine.module, engine.optimizer) if device.is_emulated else nullcontext():
            _run(loop)
        result = _result(loop, measured)
        if result.record is not None:
            files.write("record.json", result.record.to_json())
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
        check_same(comm, given.checksum, "the plan (by checksum)")
        names = comm.gather_objects(device.name)
        rows = [replace(row, device=row.device or name) for row, name in zip(given.ranks, names, strict=True)]
        return replace(given, ranks=tuple(rows)), None
    profiles = profile_stages(recipe, config, comm, device, to_plan=True)
    plan = plan_together(comm, profiles, config.global_batch_size, config.strategy)
    return plan, profile_of(plan, profiles)


def profile_stages(
    recipe: Recipe, config: FitConfig, comm: Communicator, device: Device, to_plan: bool = False
) -> tuple[ClusterProfile, ...]:
    """Profile the stages that the settings leave open. Collective.

    Args:
        to_plan: with uneven shards too, where they promise to be faster.
    """
    if config.zero_stage == "auto":
        stages = stages_to_try(comm) if to_plan else ZERO_STAGES
    else:
        stages = (int(config.zero_stage),)
    if config.progress and comm.rank == 0:
        if config.emulate is not None:
            print(describe_emulation(config.emulate), file=sys.stderr, flush=True)
        where = f"{comm.world_size} rank{'s' if comm.world_size > 1 else ''}"
        reuses = config.profile_cache_dir is not None and not config.refresh
        doing = "profiling, or taking earlier profiles of," if reuses else "profiling"
        print(f"{doing} {where} at ZeRO stage {', '.join(map(str, stages))}", file=sys.stderr, flush=True)
    settings: dict[str, Any] = {
        "comm": comm,
        "device": device,
        "precision": config.precision,
        "max_grad_norm": config.max_grad_norm,
        "cache_dir": config.profile_cache_dir,
        "refresh": config.refresh,
    }
    if to_plan:
        return profile_to_plan(recipe, config.global_batch_size, stages, config.strategy, **settings)
    return profile(recipe, zero_stage=stages, global_batch_size=config.global_batch_size, **settings)


def _build_dataset(recipe: Recipe, config: FitConfig, comm: Communicator) -> Any:
    """Build the data set and refuse one that cannot be trained on; if one rank cannot, none goes on. Collective."""
    problem: Exception | None = None
    dataset: Any = None
    try:
        dataset = recipe.dataset()
        if not hasattr(dataset, "__len__"):
            raise ConfigError(f"the data set must be map-style, with a length; got {type(dataset).__name__}")
        if len(dataset) < config.global_batch_size:
            raise ConfigError(
                f"the data set has {len(dataset)} samples, fewer than one global batch of {config.global_batch_size}; "
                "lower global_batch_size"
            )
    except Exception as error:
        problem = error
    raise_together(comm, problem, "could not build its data set")
    # Else ranks would cut different global batches, taking some samples twice and others not at all.
    check_same(comm, len(dataset), "the length of the data set")
    return dataset


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


def _run(loop: Loop) -> None:
    """Run the loop; say of an out-of-memory what to change."""
    try:
        loop.run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        rank = loop.engine.comm.rank
        largest = max(loop.plan.ranks[rank].micro_batch_sizes, default=0)
        raise InfeasiblePlanError(
            f"rank {rank} cannot train with micro-batches of up to {largest}: {error}; give it smaller ones, or "
            "let them be chosen"
        ) from error


def _result(loop: Loop, measured: ClusterProfile | None) -> FitResult:
    """Return what the run gave. Collective."""
    assert loop.last is not None
    engine, clock = loop.engine, loop.clock
    step_s = clock.step_s(by_plan=True)
    rows = engine.comm.gather_floats([math.nan if step_s is None else step_s, clock.waited_s(), clock.idle_share()])
    record = None
    if step_s is not None:
        # All take the same steps, so that their medians differ by very little.
        step_s = max(row[0] for row in rows)
        # On a card the host does not wait for what the device computes.
        waited_s = [row[1] for row in rows] if engine.device.torch_device.type == "cpu" else None
        record = StepRecord.from_waits(loop.plan.predicted, step_s, waited_s)
    return FitResult(
        engine=engine,
        plan=loop.plan,
        profile=measured,
        steps=loop.total_steps,
        loss=loop.last.loss,
        eval_loss=loop.eval_loss,
        step_s=step_s,
        equal_step_s=clock.step_s(by_plan=False),
        record=record,
        idle_shares=tuple(row[2] for row in rows),
        run_dir=loop.config.run_dir,
    )


def _closing(result: FitResult) -> str:
    """Return what a run says at its end."""
    parts = []
    if result.record is not None:
        parts.append(closing_table(result.plan, result.record, result.equal_step_s))
    parts.append(f"loss {result.loss:.4f} after {result.steps} steps")
    if result.eval_loss is not None:
        parts[-1] += f", held-out loss {result.eval_loss:.4f}"
    if result.run_dir is not None:
        parts.append(f"run directory: {result.run_dir}")
    return "\n".join(parts)

"""What is compared on unlike ranks: plain loops alone, peers with equal batches, Poplar with its own plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.gpt import Workload, gpt_loss
from benchmarks.systems import STAGE_OF, System, build, poplar_system, through_gloo

MICRO_BATCH_SIZES = (4, 8, 16, 32)
"""What is tried for plain loops and peers; the whole equal share too, where it is smaller."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What one table is about."""

    shares: tuple[float, ...]
    """Core's worth by rank, as asked for."""
    model: str
    global_batch_size: int
    precision: str
    optimizer: str

    @property
    def workload(self) -> Workload:
        return Workload(model=self.model, precision=self.precision, optimizer=self.optimizer)

    @property
    def equal_share(self) -> int:
        """Samples of every rank in an equal split: rounded up, so that the peers' steps are never the smaller."""
        return -(-self.global_batch_size // len(self.shares))


@dataclass(kw_only=True)
class Entry:
    """A system ready to be timed."""

    burst: Callable[[], tuple[float, float]]
    """Take a burst of steps; returns the seconds of a step, wall and processor time."""
    samples: int
    """Of all ranks in a step."""
    split: list[list[int]]
    """Micro-batch sizes by rank."""
    processor_s: list[float] = field(default_factory=list)
    """By round, of this rank."""

    def run(self) -> float:
        dist.barrier()
        wall_s, processor_s = self.burst()
        self.processor_s.append(processor_s)
        return wall_s


def timed_burst(system: System, batches: Sequence, burst: int) -> tuple[float, float]:
    """Return wall and processor seconds of a step, by a burst with everything waited for."""
    began, used = time.perf_counter(), time.process_time()
    for _ in range(burst):
        system.step(batches)
    system.finish()
    return (time.perf_counter() - began) / burst, (time.process_time() - used) / burst


def nothing() -> tuple[float, float]:
    return 0.0, 0.0


def cut(workload: Workload, num_samples: int, micro_batch_size: int, seed: int) -> list:
    """Return micro-batches of ``micro_batch_size``, the last one smaller where it does not divide ``num_samples``."""
    x, y = workload.samples(num_samples, seed)
    return list(zip(x.split(micro_batch_size), y.split(micro_batch_size), strict=True))


def candidates(num_samples: int) -> list[int]:
    """Return the micro-batch sizes to try; all micro-batches of a step are of one size, as a mean of means needs."""
    sizes = [size for size in MICRO_BATCH_SIZES if size <= num_samples and num_samples % size == 0]
    return sizes or [num_samples]


def fastest(tries: Mapping[int, Callable[[], tuple[float, float]]]) -> int:
    """Return the size whose burst is the fastest on the slowest rank, the same on every rank. Collective."""
    taken = {}
    for size, burst in tries.items():
        dist.barrier()
        wall_s = torch.tensor(burst()[0], dtype=torch.float64)
        dist.all_reduce(wall_s, dist.ReduceOp.MAX)
        taken[size] = wall_s.item()
    return min(taken, key=lambda size: taken[size])


def alone(turn: int, rank: int, config: Configuration, burst: int) -> Entry:
    """Let rank ``turn`` train by a plain loop on the whole global batch. Collective."""
    system = build("local", config.workload)
    by_size = {
        size: cut(config.workload, config.global_batch_size, size, 1) for size in candidates(config.global_batch_size)
    }
    bursts = {
        size: partial(timed_burst, system, batches, 1) if turn == rank else nothing for size, batches in by_size.items()
    }
    best = fastest(bursts)
    split = [
        [best] * (config.global_batch_size // best) if other == turn else [] for other in range(len(config.shares))
    ]
    run = partial(timed_burst, system, by_size[best], burst) if turn == rank else nothing
    return Entry(burst=run, samples=config.global_batch_size, split=split)


def at_best_equal_batch(name: str, rank: int, world_size: int, config: Configuration, burst: int) -> Entry:
    """Build a peer for equal batches, with the micro-batch size that is fastest in a first try. Collective."""
    workload, share = config.workload, config.equal_share
    systems = (
        {size: build(name, workload, share // size) for size in candidates(share)} if name.startswith("ds") else {}
    )
    one = None if systems else build(name, workload)
    bursts = {}
    for size in candidates(share):
        system = systems.get(size, one)
        assert system is not None
        bursts[size] = partial(timed_burst, system, cut(workload, share, size, seed=1 + rank))
    best = fastest({size: partial(run, 1) for size, run in bursts.items()})
    for size, system in systems.items():
        if size != best:
            system.close()
    split = [[best] * (share // best)] * world_size
    return Entry(burst=partial(bursts[best], burst), samples=share * world_size, split=split)


def planned(name: str, rank: int, config: Configuration, burst: int) -> Entry:
    """Profile, plan and train with Poplar at one stage. Collective."""
    import poplar

    workload = config.workload

    def dataset() -> list:
        x, y = workload.samples(config.global_batch_size, seed=1)
        return list(zip(x, y, strict=True))

    recipe = poplar.Recipe(
        model=workload.build_model,
        optimizer=lambda model: workload.adamw(model.parameters()),
        loss=gpt_loss,
        dataset=dataset,
    )
    stage = STAGE_OF[name]
    model = recipe.model()
    with through_gloo(name.endswith("-gloo")):
        plan = poplar.make_plan(recipe, config.global_batch_size, stage, precision=workload.precision)
        engine = poplar.initialize(model, recipe.optimizer(model), recipe.loss, plan=plan)
    loader = poplar.PlannedLoader(recipe.dataset(), plan)
    batches = next(iter(loader))
    run = partial(timed_burst, poplar_system(name, engine), batches, burst)
    split = [list(row.micro_batch_sizes) for row in plan.ranks]
    return Entry(burst=run, samples=config.global_batch_size, split=split)

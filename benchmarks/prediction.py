"""Predicted step times against measured ones, and the plan against its neighbours, on ranks that are really unlike.

    python -m benchmarks.prediction                                      # emulated clusters of 2 to 4 ranks
    python -m benchmarks.prediction --cluster quota:1+0.3 --neighbours   # ranks under a CPU quota
    python -m benchmarks.prediction --out benchmarks/results/prediction.json --write docs/profiling.md

A cluster is a list of cards as ``--emulate`` takes it, or ``quota:`` and each rank's share of a core (see shares.py).
For every stage, as often as ``--repeats`` says: profile the default recipe, plan, then take the plan's steps for real.
A figure is the median ratio of predicted to measured step time with its interval over the repeats. In the same turns
every rank trains its samples by itself, the others at rest, cut as is best for it alone: "share of the ideal" is the
throughput of all together over the sum of what each reaches alone. With ``--neighbours`` every plan that moves one
sample from a rank to another is run too, in turns with the plan; of ranks that are alike one speaks for all.

[Note: the best neighbour]
The least of several noisy medians is too small, the more so the more there are, and a plan that is the best would seem
beaten. So the best neighbour is chosen by half of the rounds and compared with the plan in the other half, round by
round, both ways; the mean of the two ratios counts. Below 1 the plan is faster than its best neighbour.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import click
import torch

from benchmarks.common import (
    interleave,
    interval_text,
    machine,
    markdown_table,
    median_interval,
    paired_ratio,
    report,
    result_options,
)
from benchmarks.ranks import run_ranks
from benchmarks.shares import cpu_shares, fit_to_cores
from poplar import Plan, PlannedLoader, allocate, initialize, profile
from poplar.catalog import parse_cluster
from poplar.device import Device
from poplar.emulation import start_device
from poplar.engine import Engine
from poplar.plan import ClusterProfile
from poplar.planning.record import StepRecord
from poplar.recipes.bytes_gpt import recipe
from poplar.zero.comm import LoopbackComm, ProcessGroupComm

DEFAULT_CLUSTERS = ("v100-16g:1,t4-16g:1", "v100-16g:1,rtx3090-24g:1,t4-16g:1", "v100-16g:2,t4-16g:2")
QUOTA = "quota:"
WARM_UP_STEPS = 2


# On each rank.


def measure(
    rank: int, world_size: int, cluster: str, stages: Sequence[int], batch: int, steps: int, neighbours: bool
) -> dict[int, dict[str, Any]]:
    """Return, by stage, the predicted and the measured seconds of a step, and what was planned."""
    torch.set_num_threads(1)
    device = start_device(None if cluster.startswith(QUOTA) else cluster, rank)
    comm = ProcessGroupComm()
    results = {}
    began_s = time.perf_counter()
    profiles = profile(recipe, zero_stage=stages, comm=comm, device=device, global_batch_size=batch)
    profile_s = time.perf_counter() - began_s
    for stage, measured in zip(stages, profiles, strict=True):
        plan = allocate(measured, batch)
        assert plan.predicted is not None
        plans = {"plan": plan} | (dict(neighbouring(plan, measured)) if neighbours else {})
        singles = [alone_plan(measured, row, plan) for row in range(world_size)]
        times, waited_s = time_plans(plans, rank, comm, device, steps, singles)
        gc.collect()
        by_rank = [
            [single.global_batch_size / seconds for seconds in times[f"alone-{turn}"]]
            for turn, single in enumerate(singles)
        ]
        ideal = [sum(rates) for rates in zip(*by_rank, strict=True)]
        alone_s = [statistics.median(times.pop(f"alone-{turn}")) for turn in range(world_size)]
        plan_s = times.pop("plan")
        record = StepRecord.from_waits(
            plan.predicted, statistics.median(plan_s), [row[0] for row in comm.gather_floats([waited_s])]
        )
        results[stage] = {
            "predicted_s": plan.predicted.step_s,
            "measured_s": record.step_s,
            "parts": record.lines(),
            "alone_s": alone_s,
            "share_of_ideal": paired_ratio([batch / seconds for seconds in plan_s], ideal).median,
            "over_best_neighbour": over_best(plan_s, times) if times else None,
            "neighbours_s": {name: statistics.median(values) for name, values in times.items()},
            "profile_s": profile_s,
            "rows": [row.micro_batch_sizes for row in plan.ranks],
            "collectives_s": [measured.micro_step_collective_s, measured.step_collective_s],
            "notes": measured.notes,
        }
    return results


def time_plans(
    plans: Mapping[str, Plan],
    rank: int,
    comm: ProcessGroupComm,
    device: Device,
    steps: int,
    singles: Sequence[Plan] = (),
) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of steps by each plan of one stage, taken in turns, and what this rank waited in the first's.

    Args:
        singles: what each rank trains by itself, the others at rest, as "alone-RANK".
    """
    first = next(iter(plans.values()))
    with (
        running(first, comm, device) as engine,
        resting_beside(singles[rank] if singles else None, first.zero_stage, device) as single,
    ):
        waits_s: dict[str, list[float]] = {name: [] for name in plans}
        tasks = {
            name: partial(step_s, engine, steps_of(plan, rank), comm, waits_s[name]) for name, plan in plans.items()
        }
        for turn in range(len(singles)):
            tasks[f"alone-{turn}"] = partial(alone_step_s, single if turn == rank else None, comm)
        taken = {name: values[WARM_UP_STEPS:] for name, values in interleave(tasks, WARM_UP_STEPS + steps).items()}
        return taken, statistics.median(waits_s[next(iter(plans))][WARM_UP_STEPS:])


@contextlib.contextmanager
def running(plan: Plan, comm: ProcessGroupComm, device: Device) -> Iterator[Engine]:
    """Give the engine that trains the default recipe by ``plan``, under an emulated card's memory."""
    model = recipe.model()
    engine = initialize(model, recipe.optimizer(model), recipe.loss, plan=plan, comm=comm, device=device)
    with device.metered(model, engine.optimizer) if device.is_emulated else contextlib.nullcontext():
        yield engine
    engine.close()


def alone_plan(measured: ClusterProfile, rank: int, plan: Plan) -> Plan:
    """Return how a rank trains its samples of ``plan`` fastest by itself; one without samples its largest batch."""
    row = measured.ranks[rank]
    samples = plan.ranks[rank].num_samples or row.max_micro_batch_size
    return allocate(ClusterProfile(zero_stage=0, ranks=(replace(row, device_id=None),)), samples)


@contextlib.contextmanager
def resting_beside(plan: Plan | None, zero_stage: int, device: Device) -> Iterator[Callable[[], None]]:
    """Give steps of this rank by itself; the memory of its engine is not counted, since the other engine's is."""
    if plan is None:
        yield lambda: None
        return
    with device.uncounted():
        model = recipe.model()
        engine = initialize(
            model, recipe.optimizer(model), recipe.loss, zero_stage=zero_stage, comm=LoopbackComm(), device=device
        )
        steps = steps_of(plan, 0)

        def step() -> None:
            with device.uncounted():
                engine.step(next(steps))

        step()  # makes the optimizer's state
    yield step
    engine.close()


def alone_step_s(step: Callable[[], None] | None, comm: ProcessGroupComm) -> float:
    """Return the seconds of a rank's step by itself, the same on every rank."""
    comm.barrier()
    began_s = time.perf_counter()
    if step is not None:
        step()
    taken_s = time.perf_counter() - began_s if step is not None else 0.0
    return max(row[0] for row in comm.gather_floats([taken_s]))


def steps_of(plan: Plan, rank: int) -> Iterator[Any]:
    """Yield this rank's steps, epoch after epoch."""
    while True:
        yield from PlannedLoader(recipe.dataset(), plan, rank, recipe.collate)


def step_s(engine: Engine, steps: Iterator[Any], comm: ProcessGroupComm, waits_s: list[float]) -> float:
    """Return the seconds of a step, and note what of them this rank waited, at the end too."""
    micro_batches = next(steps)
    comm.barrier()
    began_s, waited_s = time.perf_counter(), engine.wait_s
    engine.step(micro_batches)
    stepped_s, waited_s = time.perf_counter(), engine.wait_s - waited_s
    comm.barrier()
    ended_s = time.perf_counter()
    waits_s.append(waited_s + ended_s - stepped_s)
    return ended_s - began_s


def over_best(plan_s: Sequence[float], neighbours_s: Mapping[str, Sequence[float]]) -> float:
    """Return the plan's seconds over those of its best neighbour: see [Note: the best neighbour]."""

    def halves(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
        return values[::2], values[1::2]

    ratios = []
    for choosing, comparing in ((0, 1), (1, 0)):
        best = min(neighbours_s, key=lambda name: statistics.median(halves(neighbours_s[name])[choosing]))
        ratios.append(paired_ratio(halves(plan_s)[comparing], halves(neighbours_s[best])[comparing]).median)
    return statistics.mean(ratios)


def neighbouring(plan: Plan, measured: ClusterProfile) -> Iterator[tuple[str, Plan]]:
    """Yield every plan that moves one sample between two ranks, out of and into the micro-steps that suit best."""
    rows = [row.micro_batch_sizes for row in plan.ranks]
    # Emulated cards of one name are alike; plain CPU ranks all have one name, and may have other shares of a core.
    names = [rank.device if rank.device_id is not None else str(place) for place, rank in enumerate(measured.ranks)]
    seen = set()
    for giver, row in enumerate(rows):
        for taker, other in enumerate(rows):
            limit = measured.ranks[taker].max_micro_batch_size
            if giver == taker or not any(row) or not any(size < limit for size in other):
                continue
            pair = names[giver], row, names[taker], other
            if pair in seen:
                continue
            seen.add(pair)
            smaller, larger = list(row), list(other)
            smaller[row.index(max(row))] -= 1
            larger[other.index(min(other))] += 1
            changed = [*rows]
            changed[giver], changed[taker] = tuple(smaller), tuple(larger)
            yield f"{giver}->{taker}", Plan.manual(changed, zero_stage=plan.zero_stage)


# Here.


def run_cluster(cluster: str, stages: Sequence[int], batch: int, steps: int, repeats: int, neighbours: bool) -> Any:
    """Measure a cluster; return its record."""
    about = machine()
    runs = []
    for _ in range(repeats):
        arguments = (cluster, stages, batch, steps, neighbours)
        if cluster.startswith(QUOTA):
            shares = [float(share) for share in cluster.removeprefix(QUOTA).split("+")]
            with cpu_shares(fit_to_cores(shares, about["cores"] * 0.97)) as limiter:
                runs.append(run_ranks(measure, len(shares), *arguments, admit=limiter.admit)[0])
        else:
            runs.append(run_ranks(measure, len(parse_cluster(cluster)), *arguments)[0])
    results = {}
    for stage in stages:
        found = [run[stage] for run in runs]
        ratios = [one["predicted_s"] / one["measured_s"] for one in found]
        losses = [one["over_best_neighbour"] for one in found if one["over_best_neighbour"] is not None]
        results[str(stage)] = {
            "ratio": asdict(median_interval(ratios)),
            "share_of_ideal": asdict(median_interval([one["share_of_ideal"] for one in found])),
            "over_best_neighbour": asdict(median_interval(losses)) if losses else None,
            "runs": found,
        }
    configuration = {"cluster": cluster, "global_batch_size": batch}
    return {"configuration": configuration, "machine": about, "stages": results}


def table(record: dict[str, Any]) -> str:
    rows = []
    for stage, found in record["stages"].items():
        last = found["runs"][-1]
        rows.append(
            (
                stage,
                f"{statistics.median(run['predicted_s'] for run in found['runs']):.3f} s",
                f"{statistics.median(run['measured_s'] for run in found['runs']):.3f} s",
                interval_text(found["ratio"]),
                interval_text(found["share_of_ideal"]),
                interval_text(found["over_best_neighbour"]) or "-",
                f"{statistics.median(run['profile_s'] for run in found['runs']):.1f} s",
                "; ".join("+".join(map(str, row)) for row in last["rows"]),
            )
        )
    header = (
        "stage",
        "predicted",
        "measured",
        "ratio",
        "share of the ideal",
        "over best neighbour",
        "profiling",
        "micro-batches by rank",
    )
    configuration = record["configuration"]
    title = f"`{configuration['cluster']}`, global batch {configuration['global_batch_size']}:"
    return f"{title}\n\n{markdown_table(header, rows)}"


@click.command()
@click.option("--cluster", "clusters", multiple=True, default=DEFAULT_CLUSTERS, show_default=True)
@click.option("--zero-stage", "stages", multiple=True, type=click.IntRange(0, 3), default=(0, 1, 2, 3))
@click.option("--global-batch-size", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Timed steps of each plan.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--neighbours", is_flag=True, help="Run the neighbouring plans too.")
@result_options
def main(
    clusters: Sequence[str],
    stages: Sequence[int],
    global_batch_size: int,
    steps: int,
    repeats: int,
    neighbours: bool,
    **options: Any,
) -> None:
    """Compare predicted with measured step times."""
    runs = [partial(run_cluster, name, stages, global_batch_size, steps, repeats, neighbours) for name in clusters]
    report("prediction", runs, table, options)


if __name__ == "__main__":
    main()

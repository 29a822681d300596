"""One prepared script for a machine with one or more GPUs; says so and ends well where there is none.

python -m benchmarks.gpu --out gpu.json [--part equal --part profile --part one-card]

equal      every system on the same work, one card a rank, over NCCL: as equal_ranks.py (one card: world size 1)
profile    poplar.profile on every card, held to a part of its memory, so that memory really runs out; then steps at
           the largest micro-batch that it found
one-card   several ranks on ONE card over gloo, with unlike parts of its memory as unlike cards: equal batches
           against the planned ones
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import click
import torch
import torch.distributed as dist

from benchmarks import equal_ranks
from benchmarks.common import (
    interleave,
    interval_text,
    machine,
    markdown_table,
    paired_ratio,
    report,
    result_options,
    slowest,
)
from benchmarks.gpt import SIZES, Workload, gpt_loss
from benchmarks.ranks import run_ranks
from benchmarks.systems import System, checked_systems, installed_systems, poplar_system

PARTS = ("equal", "profile", "one-card")
MEMORY_FRACTION = 0.2
"""Of a card's free memory, for "profile": runs out soon, at micro-batches that take little time."""
ONE_CARD_GIB = (3.0, 1.5, 0.75)
"""Memory of the cards that one card is cut into, by rank."""
ONE_CARD_MODEL, ONE_CARD_BATCH = "gpt-m", 192


def make_device(kind: str, index: int, fraction: float | None = None, gib: float | None = None) -> Any:
    """Return a card, or a CPU rank, held to a part of its free memory: a fraction, or so many GiB."""
    from poplar.device import CudaDevice, Device, free_host_bytes, local_world_size

    if gib is not None:
        free_bytes = torch.cuda.mem_get_info(index)[0] if kind == "cuda" else free_host_bytes() or 2**33
        fraction = gib * 2**30 / (free_bytes if kind == "cuda" else free_bytes / local_world_size())
    return CudaDevice(index, fraction) if kind == "cuda" else Device(fraction)


def make_recipe(workload: Workload, num_samples: int) -> Any:
    import poplar

    def dataset() -> list:
        x, y = workload.samples(num_samples, seed=1)
        return list(zip(x, y, strict=True))

    return poplar.Recipe(
        model=workload.build_model,
        optimizer=lambda model: workload.adamw(model.parameters()),
        loss=gpt_loss,
        dataset=dataset,
    )


# equal


def equal(model: str, names: Sequence[str], rounds: int) -> dict[str, Any]:
    config = equal_ranks.Configuration(
        model=model,
        ranks=torch.cuda.device_count(),
        accumulation=1,
        precision="bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp32",
        optimizer="fused",
        micro_batch_size=8,
        device="cuda",
    )
    return equal_ranks.run(config, names, rounds, burst=4)


# profile


def profile_rank(
    rank: int, world_size: int, kind: str, model: str, stages: Sequence[int], fraction: float, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """Profile every stage, then train at the largest micro-batch that fits this rank."""
    import poplar

    device = make_device(kind, rank, fraction)
    workload = Workload(model=model, optimizer="fused")
    found = []
    for stage in stages:
        recipe = make_recipe(workload, num_samples=256)
        began = time.perf_counter()
        profile = poplar.profile(recipe, zero_stage=stage, device=device, **settings)
        profile_s = time.perf_counter() - began
        own = profile.ranks[rank]
        if own.max_micro_batch_size == 0:
            raise RuntimeError(f"stage {stage} does not fit rank {rank}: {profile.notes}; give a smaller --model")
        module = recipe.model()
        engine = poplar.initialize(module, recipe.optimizer(module), recipe.loss, zero_stage=stage, device=device)
        batch = workload.samples(own.max_micro_batch_size, seed=rank)
        device.reset_peak()
        with device.metered(engine.module, engine.optimizer):
            losses = [engine.step([batch]).loss for _ in range(5)]
        found.append(
            {
                "zero_stage": stage,
                "profile_s": profile_s,
                "device": own.device,
                "points": own.points,
                "max_micro_batch_size": own.max_micro_batch_size,
                "memory_limit_bytes": own.memory_limit_bytes,
                "peak_bytes": device.peak_bytes(),
                "losses": losses,
            }
        )
        engine.close()
        del engine, module, batch
        device.empty_cache()
    return found


def profile(
    model: str,
    kind: str = "cuda",
    ranks: int = 1,
    stages: Sequence[int] = (0, 1, 2, 3),
    fraction: float = MEMORY_FRACTION,
    **settings: Any,
) -> dict[str, Any]:
    """Profile on every card; ``settings`` as ``poplar.profile``'s."""
    about = machine()
    backend = "nccl" if kind == "cuda" else "gloo"
    by_rank = run_ranks(profile_rank, ranks, kind, model, stages, fraction, settings, backend=backend)
    rows = [{"rank": rank, **row} for rank, found in enumerate(by_rank) for row in found]
    return {"configuration": {"part": "profile", "model": model, "ranks": ranks}, "machine": about, "rows": rows}


def profile_table(record: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['rank']} ({row['device']})",
            str(row["zero_stage"]),
            f"{row['profile_s']:.1f}",
            str(row["max_micro_batch_size"]),
            " ".join(f"{size}: {seconds * 1e3:.1f}" for size, seconds in row["points"]),
            f"{row['peak_bytes'] / row['memory_limit_bytes']:.0%}",
        ]
        for row in record["rows"]
    ]
    header = ["rank", "stage", "profiling, s", "largest micro-batch", "ms by size", "memory used by 5 steps at it"]
    return f"**Profiling until memory runs out**, {record['configuration']['model']}\n\n{markdown_table(header, rows)}"


# one-card


def one_card_rank(
    rank: int,
    world_size: int,
    kind: str,
    model: str,
    batch: int,
    gibs: Sequence[float],
    stages: Sequence[int],
    rounds: int,
) -> dict[str, Any]:
    """Plan with equal batches and with the best ones, and time both in turns."""
    import poplar

    device = make_device(kind, 0, gib=gibs[rank])
    workload = Workload(model=model, optimizer="fused")
    recipe = make_recipe(workload, num_samples=batch)
    tasks: dict[str, Callable[[], float]] = {}
    splits = {}
    for stage in stages:
        profile = poplar.profile(recipe, zero_stage=stage, global_batch_size=batch, device=device)
        for strategy in ("equal", "exact"):
            name = f"z{stage}, {strategy}"
            plan = poplar.allocate(profile, batch, strategy)
            splits[name] = [list(row.micro_batch_sizes) for row in plan.ranks]
            module = recipe.model()
            engine = poplar.initialize(module, recipe.optimizer(module), recipe.loss, plan=plan, device=device)
            batches = next(iter(poplar.PlannedLoader(recipe.dataset(), plan)))
            tasks[name] = partial(timed_step, poplar_system(name, engine), batches)
    for task in tasks.values():
        task()
    return {"times": interleave(tasks, rounds), "splits": splits}


def timed_step(system: System, batches: Sequence) -> float:
    dist.barrier()
    began = time.perf_counter()
    system.step(batches)
    system.finish()
    return time.perf_counter() - began


def one_card(
    model: str = ONE_CARD_MODEL,
    kind: str = "cuda",
    batch: int = ONE_CARD_BATCH,
    gibs: Sequence[float] = ONE_CARD_GIB,
    stages: Sequence[int] = (1, 3),
    rounds: int = 5,
) -> dict[str, Any]:
    """Let several ranks share one card."""
    about = machine()
    by_rank = run_ranks(one_card_rank, len(gibs), kind, model, batch, gibs, stages, rounds)
    times = slowest([rank["times"] for rank in by_rank])
    rows = []
    for name, taken in times.items():
        equal_times = times[f"{name.split(',')[0]}, equal"]
        row = {"plan": name, "split": by_rank[0]["splits"][name], "samples_per_s": batch / statistics.median(taken)}
        rows.append({**row, "over_equal": asdict(paired_ratio(equal_times, taken)), "times_s": taken})
    config = {"part": "one-card", "model": model, "gib": list(gibs), "batch": batch}
    return {"configuration": config, "machine": about, "rows": rows}


def one_card_table(record: dict[str, Any]) -> str:
    rows = [
        [
            row["plan"],
            " : ".join(str(sizes) for sizes in row["split"]),
            f"{row['samples_per_s']:.1f}",
            interval_text(row["over_equal"]),
        ]
        for row in record["rows"]
    ]
    config = record["configuration"]
    parts = " : ".join(f"{gib:g}" for gib in config["gib"])
    title = f"**{len(config['gib'])} ranks on one card** with {parts} GiB of it, {config['model']}, over gloo"
    return f"{title}\n\n{markdown_table(['plan', 'micro-batches by rank', 'samples/s', 'throughput over equal'], rows)}"


def table(record: dict[str, Any]) -> str:
    part = record["configuration"].get("part", "equal")
    return {"equal": equal_ranks.table, "profile": profile_table, "one-card": one_card_table}[part](record)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), default=PARTS)
@click.option("--model", type=click.Choice(list(SIZES)), default="gpt-gpu")
@click.option(
    "--systems", default=",".join(installed_systems()), help="For the part equal; commas between, local first."
)
@click.option("--rounds", type=click.IntRange(1), default=15)
@result_options
def main(parts: Sequence[str], model: str, systems: str, rounds: int, **options: Any) -> None:
    """Measure on GPUs."""
    if not torch.cuda.is_available() and not options["only_write"]:
        click.echo("skipped: this machine has no GPU that torch can use")
        return
    ranks = torch.cuda.device_count()
    runs = {
        "equal": partial(equal, model, checked_systems(systems), rounds),
        "profile": partial(profile, model, ranks=ranks),
        "one-card": partial(one_card, rounds=rounds),
    }
    report("gpu", [runs[part] for part in parts], table, options)


if __name__ == "__main__":
    main()

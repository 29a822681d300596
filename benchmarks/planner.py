"""How long planning takes: 1,024 ranks of 8 kinds at every stage, and the growth with ranks and with the batch.

    python benchmarks/planner.py [--out planner.json] [--plot docs/images/planning_growth.svg]

Prints one JSON object. Every repetition plans for cards with new times, so that no fitted curve is left from the one
before; the curves' fitting, the prediction and the plan's notes are part of the time.
"""

from __future__ import annotations

import json
import random
import statistics
import time
import tracemalloc
from pathlib import Path

import click

from poplar.allocator import allocate
from poplar.plan import ClusterProfile, RankProfile

NUM_KINDS = 8
LARGEST = 64
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


def rank_profile(kind: int, generator: random.Random) -> RankProfile:
    """Make a card: fixed time, time per sample and memory differ by kind, each time is off by up to 2%."""
    largest = LARGEST - 6 * kind
    sizes = [size for size in SIZES if size < largest] + [largest]
    fixed_s, sample_s = 0.02 * (1 + kind / 4), 0.01 * (1 + kind)
    points = tuple((size, (fixed_s + sample_s * size) * generator.uniform(0.99, 1.01)) for size in sizes)
    return RankProfile(device=f"kind{kind}", points=points, max_micro_batch_size=largest, optimizer_step_s=0.01)


def cluster(zero_stage: int, num_ranks: int, seed: int, *, alike: bool) -> ClusterProfile:
    """Make a cluster of ``NUM_KINDS`` kinds; ``alike``: ranks of a kind measured the same, to the last digit."""
    generator = random.Random(seed)
    kinds = [rank_profile(kind, generator) for kind in range(NUM_KINDS)]
    ranks = (kinds[i % NUM_KINDS] if alike else rank_profile(i % NUM_KINDS, generator) for i in range(num_ranks))
    return ClusterProfile(
        zero_stage=zero_stage, ranks=tuple(ranks), micro_step_collective_s=0.02, step_collective_s=0.05
    )


def seconds_to_plan(zero_stage: int, num_ranks: int, global_batch_size: int, repeats: int, *, alike: bool) -> float:
    """Return the median over ``repeats``."""
    taken = []
    for seed in range(repeats):
        profile = cluster(zero_stage, num_ranks, seed, alike=alike)
        start = time.perf_counter()
        allocate(profile, global_batch_size)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def peak_mib(zero_stage: int, num_ranks: int, global_batch_size: int) -> float:
    """Return what planning allocates at its peak."""
    profile = cluster(zero_stage, num_ranks, seed=-1, alike=True)
    tracemalloc.start()
    allocate(profile, global_batch_size)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def measure(repeats: int) -> dict[str, object]:
    headline = [
        {
            "zero_stage": stage,
            "seconds": seconds_to_plan(stage, 1024, 8192, repeats, alike=True),
            "seconds_all_ranks_different": seconds_to_plan(stage, 1024, 8192, repeats, alike=False),
            "peak_mib": peak_mib(stage, 1024, 8192),
        }
        for stage in range(4)
    ]
    by_ranks = [
        {"num_ranks": num_ranks, "zero_stage": stage, "seconds": seconds, "peak_mib": peak_mib(stage, num_ranks, 8192)}
        for num_ranks in (8, 32, 128, 512, 2048)
        for stage in (1, 3)
        for seconds in [seconds_to_plan(stage, num_ranks, 8192, repeats, alike=True)]
    ]
    by_batch = [
        {"global_batch_size": batch, "zero_stage": stage, "seconds": seconds, "peak_mib": peak_mib(stage, 64, batch)}
        for batch in (512, 2048, 8192, 32768, 131072)
        for stage in (1, 3)
        for seconds in [seconds_to_plan(stage, 64, batch, repeats, alike=True)]
    ]
    return {"ranks_1024_batch_8192": headline, "growth_with_ranks": by_ranks, "growth_with_batch": by_batch}


def plot(result: dict, path: Path) -> None:
    """Draw the growth as SVG; needs matplotlib (the "plot" extra)."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "planner"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
    pictures = (
        ("growth_with_ranks", "num_ranks", "ranks of 8 kinds (global batch 8,192)"),
        ("growth_with_batch", "global_batch_size", "global batch (64 ranks of 8 kinds)"),
    )
    for axis, (key, across, label) in zip(axes, pictures, strict=True):
        for stage, name in ((1, "stages 0 and 1"), (3, "stages 2 and 3")):
            rows = [row for row in result[key] if row["zero_stage"] == stage]
            axis.plot([row[across] for row in rows], [row["seconds"] for row in rows], marker="o", label=name)
        axis.set(xscale="log", yscale="log", xlabel=label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("seconds to plan")
    axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write the JSON here too.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="Draw the growth as SVG (needs matplotlib).")
def main(repeats: int, out: Path | None, plot_path: Path | None) -> None:
    """Time planning."""
    result = measure(repeats)
    text = json.dumps(result, indent=1)
    click.echo(text)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if plot_path is not None:
        plot(result, plot_path)


if __name__ == "__main__":
    main()

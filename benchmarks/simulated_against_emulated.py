"""Judge simulated plans by emulated runs: step times, and the order of the strategies.

    python -m benchmarks.simulated_against_emulated
    python -m benchmarks.simulated_against_emulated --out benchmarks/results/simulated.json --write docs/simulator.md

One kind of card, the fastest of the cluster, is profiled (emulated, as many ranks as the cluster has); its profile is
carried over to the other cards by the catalogue (``transfer_profile``); each strategy is planned on that, and all plans
are trained in turns on the emulated cluster. Simulated and measured step times stand side by side; nothing of the
unlike cluster was profiled.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import click
import torch

from benchmarks.common import machine, markdown_table, report, result_options, slowest
from benchmarks.prediction import DEFAULT_CLUSTERS, time_plans
from benchmarks.ranks import run_ranks
from poplar import Plan, allocate, profile
from poplar.catalog import find_card, parse_cluster
from poplar.config import STRATEGIES
from poplar.emulation import start_device
from poplar.plan import ClusterProfile
from poplar.recipes.bytes_gpt import recipe
from poplar.simulation.transfer import transfer_profile
from poplar.tables import format_seconds
from poplar.zero.comm import ProcessGroupComm

TIED = 0.05
"""Two strategies whose simulated times differ by less may come out in either order."""


# On each rank.


def profile_stages(rank: int, world_size: int, cluster: str, stages: Sequence[int], batch: int) -> Any:
    torch.set_num_threads(1)
    device = start_device(cluster, rank)
    return profile(recipe, zero_stage=stages, comm=ProcessGroupComm(), device=device, global_batch_size=batch)


def time_stages(
    rank: int, world_size: int, cluster: str, by_stage: Mapping[int, Mapping[str, Plan]], rounds: int
) -> dict[int, dict[str, list[float]]]:
    """Return the seconds of each plan's steps, by stage and strategy."""
    torch.set_num_threads(1)
    device, comm, taken = start_device(cluster, rank), ProcessGroupComm(), {}
    for stage, plans in by_stage.items():
        taken[stage] = time_plans(plans, rank, comm, device, rounds)
        gc.collect()
    return taken


# Here.


def run_cluster(cluster: str, stages: Sequence[int], batch: int, rounds: int) -> dict[str, Any]:
    """Simulate and measure a cluster; return its record."""
    about = machine()
    names = parse_cluster(cluster)
    fastest = max(names, key=lambda name: find_card(name).relative_speed)
    profiles: Sequence[ClusterProfile] = run_ranks(
        profile_stages, len(names), f"{fastest}:{len(names)}", stages, batch
    )[0]
    plans = {
        stage: {name: allocate(transfer_profile(measured, names), batch, name) for name in STRATEGIES}
        for stage, measured in zip(stages, profiles, strict=True)
    }
    bare = {
        stage: {
            name: Plan.manual([row.micro_batch_sizes for row in plan.ranks], zero_stage=stage)
            for name, plan in row.items()
        }
        for stage, row in plans.items()
    }
    by_rank = run_ranks(time_stages, len(names), cluster, bare, rounds)
    results = {}
    for stage, row in plans.items():
        times = slowest([rank[stage] for rank in by_rank])
        results[str(stage)] = {
            name: {
                "simulated_s": plan.predicted.step_s if plan.predicted is not None else None,
                "measured_s": statistics.median(times[name]),
                "rows": [rank.micro_batch_sizes for rank in plan.ranks],
            }
            for name, plan in row.items()
        }
    configuration = {"cluster": cluster, "global_batch_size": batch}
    return {"configuration": configuration, "machine": about, "stages": results}


def order_text(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Say whether the strategies come out in the simulated order."""
    swapped = []
    for one, other in combinations(found, 2):
        simulated = found[one]["simulated_s"] / found[other]["simulated_s"]
        measured = found[one]["measured_s"] / found[other]["measured_s"]
        if abs(simulated - 1) > TIED and (simulated < 1) != (measured < 1):
            swapped.append(f"{one} and {other}")
    return f"not of {', '.join(swapped)}" if swapped else "the same"


def table(record: dict[str, Any]) -> str:
    rows = [
        (
            stage,
            name,
            format_seconds(one["simulated_s"]),
            format_seconds(one["measured_s"]),
            f"{one['simulated_s'] / one['measured_s'] - 1:+.1%}",
            order_text(found),
        )
        for stage, found in record["stages"].items()
        for name, one in found.items()
    ]
    errors = [
        abs(one["simulated_s"] / one["measured_s"] - 1) for found in record["stages"].values() for one in found.values()
    ]
    configuration = record["configuration"]
    title = (
        f"`{configuration['cluster']}`, global batch {configuration['global_batch_size']}: off by "
        f"{statistics.median(errors):.1%} in the median, {max(errors):.1%} at most"
    )
    return f"{title}\n\n{markdown_table(('stage', 'strategy', 'simulated', 'measured', 'error', 'order'), rows)}"


@click.command()
@click.option("--cluster", "clusters", multiple=True, default=DEFAULT_CLUSTERS, show_default=True)
@click.option("--zero-stage", "stages", multiple=True, type=click.IntRange(0, 3), default=(0, 1, 2, 3))
@click.option("--global-batch-size", type=click.IntRange(min=1), default=48, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=12, show_default=True, help="Timed steps of each plan.")
@result_options
def main(clusters: Sequence[str], stages: Sequence[int], global_batch_size: int, rounds: int, **options: Any) -> None:
    """Compare simulated with emulated step times."""
    runs = [partial(run_cluster, name, stages, global_batch_size, rounds) for name in clusters]
    report("simulated_against_emulated", runs, table, options)


if __name__ == "__main__":
    main()

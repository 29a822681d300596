"""How long profiling takes, and what it spends: seconds, micro-steps and samples by stage.

    python -m benchmarks.profiler                                      # the default recipe, 4 emulated ranks
    python -m benchmarks.profiler --cluster cpu:4                      # 4 plain CPU ranks
    python -m benchmarks.profiler --out benchmarks/results/profiler.json --write docs/profiling.md

All stages are profiled in one call, as ``poplar train`` does, so that stages share what they can.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import click
import torch
from torch import Tensor, nn

from benchmarks.common import machine, markdown_table, report, result_options
from benchmarks.ranks import run_ranks
from poplar.catalog import parse_cluster
from poplar.config import ZERO_STAGES
from poplar.emulation import start_device
from poplar.profiler import profile
from poplar.recipes.bytes_gpt import recipe
from poplar.zero.comm import ProcessGroupComm

DEFAULT_CLUSTERS = ("v100-16g:2,t4-16g:2", "cpu:4")
PLAIN = "cpu:"


def measure(rank: int, world_size: int, cluster: str, batch: int) -> dict[str, Any]:
    """Profile every stage on this rank; return what it took."""
    torch.set_num_threads(1)
    device = start_device(None if cluster.startswith(PLAIN) else cluster, rank)
    sizes: list[int] = []

    def counted(model: nn.Module, windows: Tensor) -> Tensor:
        sizes.append(len(windows))
        return recipe.loss(model, windows)

    comm = ProcessGroupComm()
    comm.barrier()
    began_s, processor_s = time.perf_counter(), time.process_time()
    profiles = profile(
        replace(recipe, loss=counted), zero_stage=ZERO_STAGES, comm=comm, device=device, global_batch_size=batch
    )
    return {
        "seconds": time.perf_counter() - began_s,
        "processor_s": time.process_time() - processor_s,
        "micro_steps": len(sizes),
        "samples": sum(sizes),
        "largest": [found.ranks[rank].max_micro_batch_size for found in profiles],
        "points": [len(found.ranks[rank].points) for found in profiles],
        "trials": [len(found.ranks[rank].memory_points) for found in profiles],
    }


def run_cluster(cluster: str, batch: int) -> dict[str, Any]:
    """Measure a cluster; return its record."""
    about = machine()
    number = int(cluster.removeprefix(PLAIN)) if cluster.startswith(PLAIN) else len(parse_cluster(cluster))
    configuration = {"cluster": cluster, "global_batch_size": batch}
    return {"configuration": configuration, "machine": about, "ranks": run_ranks(measure, number, cluster, batch)}


def table(record: dict[str, Any]) -> str:
    header = (
        "rank",
        "seconds",
        "of a processor",
        "micro-steps",
        "samples",
        "largest",
        "sizes timed",
        "sizes that fitted",
    )
    rows = [
        (
            str(rank),
            f"{row['seconds']:.1f}",
            f"{row['processor_s']:.1f}",
            str(row["micro_steps"]),
            str(row["samples"]),
            *(" / ".join(map(str, row[name])) for name in ("largest", "points", "trials")),
        )
        for rank, row in enumerate(record["ranks"])
    ]
    title = f"`{record['configuration']['cluster']}`, by stage 0 / 1 / 2 / 3 where there are four numbers:"
    return f"{title}\n\n{markdown_table(header, rows)}"


@click.command()
@click.option("--cluster", "clusters", multiple=True, default=DEFAULT_CLUSTERS, show_default=True)
@click.option("--global-batch-size", type=click.IntRange(min=1), default=64, show_default=True)
@result_options
def main(clusters: Sequence[str], global_batch_size: int, **options: Any) -> None:
    """Measure how long profiling the default recipe takes."""
    report("profiler", [partial(run_cluster, name, global_batch_size) for name in clusters], table, options)


if __name__ == "__main__":
    main()

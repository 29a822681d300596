"""Collectives between CPU ranks: Poplar's two ways, PyTorch's own over gloo, and other ways to the same, by size.

    python -m benchmarks.collectives --out benchmarks/results/collectives.json

Every way is first checked to give the right numbers. Times are of one collective, waited for.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor

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
from benchmarks.ranks import run_ranks
from benchmarks.systems import through_gloo
from poplar.zero.comm import ProcessGroupComm

SIZES_MIB = (0.1, 1.0, 8.0, 32.0)
BURST_MIB = 16
"""A timing moves about so much, in 1 to 20 collectives."""

Way = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What one table is about."""

    ranks: int


class Buffers:
    """What the collectives work on: a whole buffer of ones on every rank, cut into equal or unequal shards.

    Args:
        comms: by way.
    """

    def __init__(self, comms: dict[str, ProcessGroupComm], size_mib: float, ratios: Sequence[float]):
        self.comms = comms
        rank, self.world_size = dist.get_rank(), dist.get_world_size()
        numel = max(self.world_size, int(size_mib * 2**20 / 4) // self.world_size * self.world_size)
        self.full = torch.ones(numel)
        stops = [round(numel * sum(ratios[: rank + 1]) / sum(ratios)) for rank in range(self.world_size)]
        self.offsets = [0, *stops]
        self.views = [self.full[a:b] for a, b in zip(self.offsets, self.offsets[1:], strict=False)]
        self.own = self.views[rank]
        self.out = torch.empty(numel)
        self.arrived = torch.empty(numel)

    # Each way leaves its result in the tensor that it returns.

    def all_gather(self, comm: ProcessGroupComm) -> Tensor:
        comm.all_gather(self.full, self.offsets).wait()
        return self.full

    def all_gather_torch(self) -> Tensor:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(self.out, self.own)
        return self.out

    def all_gather_by_broadcasts(self) -> Tensor:
        works = [dist.broadcast(view, src=rank, async_op=True) for rank, view in enumerate(self.views)]
        for work in works:
            work.wait()
        return self.full

    def reduce_scatter(self, comm: ProcessGroupComm) -> Tensor:
        comm.reduce_scatter(self.full, self.offsets).wait()
        return self.own

    def reduce_scatter_torch(self) -> Tensor:
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        result = self.out[: self.own.numel()]
        reduce_scatter(result, self.full)
        return result

    def reduce_scatter_by_all_to_all(self) -> Tensor:
        dist.all_to_all_single(self.arrived, self.full)
        return torch.sum(self.arrived.view(self.world_size, -1), 0, out=self.out[: self.own.numel()])

    def reduce_scatter_by_all_reduce(self) -> Tensor:
        dist.all_reduce(self.full)
        return self.own

    def all_reduce(self, comm: ProcessGroupComm) -> Tensor:
        comm.all_reduce(self.full).wait()
        return self.full

    def all_reduce_torch(self) -> Tensor:
        dist.all_reduce(self.full)
        return self.full

    def ways(self, are_equal: bool) -> dict[str, Callable[[], Tensor]]:
        """Return what can be done with these shards, by "operation, way"."""
        ways: dict[str, Callable[[], Tensor]] = {}
        for name, comm in self.comms.items():
            ways[f"all-gather, {name}"] = partial(self.all_gather, comm)
            ways[f"reduce-scatter, {name}"] = partial(self.reduce_scatter, comm)
        if not are_equal:
            return ways
        ways |= {f"all-reduce, {name}": partial(self.all_reduce, comm) for name, comm in self.comms.items()}
        return ways | {
            "all-gather, torch": self.all_gather_torch,
            "all-gather, broadcasts": self.all_gather_by_broadcasts,
            "reduce-scatter, torch": self.reduce_scatter_torch,
            "reduce-scatter, all-to-all and sum": self.reduce_scatter_by_all_to_all,
            "reduce-scatter, all-reduce": self.reduce_scatter_by_all_reduce,
            "all-reduce, torch": self.all_reduce_torch,
        }

    def check(self, name: str, way: Callable[[], Tensor]) -> None:
        """Run ``way`` once on ones, and see that the result is what it must be."""
        self.full.fill_(1.0)
        expected = 1.0 if name.startswith("all-gather") else float(self.world_size)
        result = way()
        assert bool((result == expected).all()), f"{name} gave wrong numbers"
        self.full.fill_(0.0)  # sums of sums would grow without end


def measure(rank: int, world_size: int, sizes_mib: Sequence[float], rounds: int) -> dict[str, list[float]]:
    """Check and time every way at every size."""
    comms = {}
    for name in ("shared memory", "messages"):
        with through_gloo(name == "messages"):
            comms[name] = ProcessGroupComm()
    tasks: dict[str, Callable[[], float]] = {}
    equal, unequal = [1.0] * world_size, [7.0, *[3.0] * (world_size - 1)]
    for size_mib in sizes_mib:
        for kind, ratios in (("equal", equal), ("7:3", unequal)):
            buffers = Buffers(comms, size_mib, ratios)
            for name, way in buffers.ways(kind == "equal").items():
                buffers.check(name, way)
                tasks[f"{size_mib:g}, {kind}, {name}"] = partial(timed, way, size_mib)
    return interleave(tasks, rounds)


def timed(way: Way, size_mib: float) -> float:
    """Return the seconds of one collective, by a burst of them after one that is not timed."""
    repeats = min(20, max(1, math.ceil(BURST_MIB / size_mib)))
    way()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        way()
    return (time.perf_counter() - began) / repeats


def run(config: Configuration, sizes_mib: Sequence[float], rounds: int) -> dict[str, Any]:
    about = machine()
    times = slowest(run_ranks(measure, config.ranks, sizes_mib, rounds))
    rows = []
    for label, taken in times.items():
        size, kind, operation, way = label.split(", ")
        row: dict[str, Any] = {"mib": float(size), "shards": kind, "operation": operation, "way": way}
        row |= {"seconds": statistics.median(taken), "times_s": taken}
        torch_times = times.get(f"{size}, {kind}, {operation}, torch")
        if way != "torch" and torch_times is not None:
            row["over_torch"] = asdict(paired_ratio(taken, torch_times))
        rows.append(row)
    return {"configuration": asdict(config), "rounds": rounds, "machine": about, "rows": rows}


def table(record: dict[str, Any]) -> str:
    title = f"**{record['configuration']['ranks']} ranks**, float32, {record['rounds']} rounds"
    rows = [
        [
            row["operation"],
            row["way"],
            row["shards"],
            f"{row['mib']:g}",
            f"{row['seconds'] * 1e3:.2f}",
            interval_text(row.get("over_torch")),
        ]
        for row in sorted(record["rows"], key=lambda row: (row["operation"], row["mib"], row["shards"]))
    ]
    return f"{title}\n\n{markdown_table(['operation', 'way', 'shards', 'MiB', 'ms', 'over torch'], rows)}"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--ranks", multiple=True, type=click.IntRange(2), default=[2, 4])
@click.option("--size-mib", multiple=True, type=click.FloatRange(0.001), default=SIZES_MIB)
@click.option("--rounds", type=click.IntRange(1), default=15)
@result_options
def main(ranks: Sequence[int], size_mib: Sequence[float], rounds: int, **options: Any) -> None:
    """Time collectives."""
    runs = [partial(run, Configuration(ranks=count), size_mib, rounds) for count in ranks]
    report("collectives", runs, table, options)


if __name__ == "__main__":
    main()

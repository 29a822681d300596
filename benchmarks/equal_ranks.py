"""Equal ranks: step time, bytes on the wire and peak memory of every system on the same work, side by side.

    python -m benchmarks.equal_ranks --out benchmarks/results/equal_ranks.json --write README.md

Every combination of the options is one configuration with a table of its own. See [Note: how a time is taken] in
common.py.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import click
import torch
import torch.distributed as dist

from benchmarks.common import (
    interleave,
    interval_text,
    machine,
    markdown_table,
    mib,
    paired_ratio,
    report,
    result_options,
    slowest,
)
from benchmarks.counters import bytes_sent, metered
from benchmarks.gpt import SIZES, Workload
from benchmarks.ranks import run_ranks
from benchmarks.systems import STAGE_OF, System, build, checked_systems, installed_systems

LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
"""How far losses may lie apart, relatively: systems that compute something else are not compared."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What one table is about."""

    model: str
    ranks: int
    accumulation: int
    precision: str
    optimizer: str
    micro_batch_size: int
    device: str = "cpu"
    """ "cpu", or "cuda": a card for every rank."""

    @property
    def workload(self) -> Workload:
        return Workload(model=self.model, precision=self.precision, optimizer=self.optimizer)


# On each rank.


def measure(rank: int, world_size: int, config: Configuration, names: Sequence[str], rounds: int, burst: int) -> dict:
    """Build every system, count what its steps send and hold, then time it in turns with the others."""
    workload = config.workload
    device = torch.device("cpu") if config.device == "cpu" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    batches = [
        workload.samples(config.micro_batch_size, 1 + rank + world_size * index, device)
        for index in range(config.accumulation)
    ]
    tasks: dict[str, Callable[[], float]] = {}
    processor_s: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    counts = {}
    num_params = sum(param.numel() for param in workload.build_model().parameters())
    for name in names:
        system, counts[name] = count(partial(build, name, workload, config.accumulation, device), batches, device)
        tasks[name] = partial(timed_burst, system, batches, burst, processor_s[name])
    gc.collect()
    gc.freeze()  # what lives until the end need not be looked at again in the middle of a timing
    times = interleave(tasks, rounds)
    return {"num_params": num_params, "counts": counts, "times": times, "processor_s": processor_s}


def count(make: Callable[[], System], batches: Sequence, device: torch.device) -> tuple[System, dict[str, Any]]:
    """Build a system and take a few steps; return it with its loss, and the bytes that a step sends and holds."""
    losses: list[float] = []

    def step(system: System) -> None:
        losses.append(system.step(batches))
        system.finish()

    gc.collect()
    system, memory = metered(make, step, device=device)
    dist.barrier()
    before = sent_so_far(system, device)
    step(system)
    # Nothing has to be said twice: what the others have received, they have received by the end of their steps.
    after = sent_so_far(system, device)
    mean_losses = torch.tensor([losses[0], losses[-1]], dtype=torch.float64, device=device)
    dist.all_reduce(mean_losses)
    first, last = (mean_losses / dist.get_world_size()).tolist()
    sent = None if before is None or after is None else after - before
    return system, {"first_loss": first, "last_loss": last, "sent_bytes": sent, **asdict(memory)}


def sent_so_far(system: System, device: torch.device) -> int | None:
    """Return the bytes that this process has sent, by sockets and through shared memory; None: unknown."""
    by_sockets = bytes_sent() if device.type == "cpu" else None
    return None if by_sockets is None else by_sockets + system.shared_memory_bytes


def timed_burst(system: System, batches: Sequence, burst: int, processor_s: list[tuple[float, float]]) -> float:
    """Return the seconds of a step, by a burst of them with everything waited for.

    A step that is not timed goes first, and brings caches and allocator back to this system.

    Args:
        processor_s: gets the step's processor time of all threads of this process, in user and in kernel mode.
    """
    system.step(batches)
    system.finish()
    dist.barrier()
    before = os.times()
    began = time.perf_counter()
    for _ in range(burst):
        system.step(batches)
    system.finish()
    taken = time.perf_counter() - began
    after = os.times()
    processor_s.append(((after.user - before.user) / burst, (after.system - before.system) / burst))
    return taken / burst


# Together.


def formula_bytes(stage: int, num_params: int, config: Configuration) -> float:
    """Return the bytes that a rank sends in a step by ZeRO's formulas (arXiv:1910.02054, section 7)."""
    param_bytes = num_params * (2 if config.precision == "bf16" else 4)
    grad_bytes = num_params * 4  # reduced in float32
    micro_steps = config.accumulation
    full = {
        0: 2 * grad_bytes,
        1: grad_bytes + param_bytes,
        2: micro_steps * grad_bytes + param_bytes,
        3: micro_steps * (grad_bytes + 2 * param_bytes),
    }[stage]
    return full * (config.ranks - 1) / config.ranks


def run(config: Configuration, names: Sequence[str], rounds: int, burst: int) -> dict[str, Any]:
    """Measure one configuration; return its record.

    Raises:
        RuntimeError: the systems' losses differ, so that they did not do the same work.
    """
    about = machine()
    backend = "gloo" if config.device == "cpu" else "nccl"
    by_rank = run_ranks(measure, config.ranks, config, names, rounds, burst, backend=backend)
    times = slowest([rank["times"] for rank in by_rank])
    counts = [rank["counts"] for rank in by_rank]
    check_losses(counts[0], LOSS_TOLERANCE[config.precision])
    num_params = by_rank[0]["num_params"]
    rows: list[dict[str, Any]] = []
    for name in names:
        stage = STAGE_OF.get(name)
        sent = [rank[name]["sent_bytes"] for rank in counts]
        row: dict[str, Any] = {
            "system": name,
            "stage": stage,
            "step_s": statistics.median(times[name]),
            "sent_bytes": None if None in sent else max(sent),
            "formula_bytes": None if stage is None else formula_bytes(stage, num_params, config),
            "peak_bytes": max(rank[name]["peak_bytes"] for rank in counts),
            "state_bytes": max(rank[name]["state_bytes"] for rank in counts),
            "last_loss": counts[0][name]["last_loss"],
            **processor_row([rank["processor_s"][name] for rank in by_rank]),
            "times_s": times[name],
        }
        if "local" in names and name != "local":
            row["over_local"] = asdict(paired_ratio(times[name], times["local"]))
        rows.append(row)
    compare_with_peers(rows)
    return {
        "configuration": asdict(config),
        "rounds": rounds,
        "burst": burst,
        "num_params": num_params,
        "machine": about,
        "rows": rows,
    }


def processor_row(by_rank: Sequence[Sequence[tuple[float, float]]]) -> dict[str, float]:
    """Return a rank's processor time in a step, and its part in the kernel: means over ranks and rounds.

    The kernel counts in hundredths of a second, so that only means over many steps say something.
    """
    pairs = [pair for rounds in by_rank for pair in rounds]
    system_s = statistics.fmean(system_s for _, system_s in pairs)
    return {"processor_s": system_s + statistics.fmean(user_s for user_s, _ in pairs), "kernel_s": system_s}


def check_losses(counts: dict[str, dict[str, Any]], tolerance: float) -> None:
    """Compare first losses of all, and last losses of those whose ranks train together."""
    for key in ("first_loss", "last_loss"):
        losses = {name: row[key] for name, row in counts.items() if key == "first_loss" or name != "local"}
        middle = statistics.median(losses.values())
        wrong = {name: loss for name, loss in losses.items() if not abs(loss - middle) <= tolerance * abs(middle)}
        if wrong:
            raise RuntimeError(f"these systems did other work than the rest, whose {key} is {middle:.6f}: {wrong}")


def compare_with_peers(rows: Sequence[dict[str, Any]]) -> None:
    """Add to Poplar's rows their ratio over the fastest peer of the same stage."""
    for row in rows:
        if not row["system"].startswith("poplar"):
            continue
        peers = [other for other in rows if other["stage"] == row["stage"] and not other["system"].startswith("poplar")]
        if peers:
            best = min(peers, key=lambda peer: peer["step_s"])
            row["best_peer"] = best["system"]
            row["over_best_peer"] = asdict(paired_ratio(row["times_s"], best["times_s"]))


# Tables.


def table(record: dict[str, Any]) -> str:
    config = Configuration(**record["configuration"])
    about = record["machine"]
    place = about["gpu"] or f"{about['cores']} cores"
    batches = f"{config.accumulation} micro-batch{'es' if config.accumulation > 1 else ''} of {config.micro_batch_size}"
    title = (
        f"**{config.model}** ({record['num_params'] / 1e6:.1f} M parameters), {config.ranks} ranks on {place}, "
        f"{config.precision}, {config.optimizer} AdamW, {batches}; "
        f"{record['rounds']} rounds of bursts of {record['burst']} steps"
    )
    header = ["system", "stage", "step, ms", "over local", "over best peer", "processor, ms", "in the kernel"]
    header += ["sent, MiB", "formula", "peak, MiB", "state, MiB"]
    return f"{title}\n\n{markdown_table(header, [cells(row) for row in record['rows']])}"


def cells(row: dict[str, Any]) -> list[str]:
    best = row.get("over_best_peer")
    return [
        row["system"],
        "" if row["stage"] is None else str(row["stage"]),
        f"{row['step_s'] * 1e3:.1f}",
        interval_text(row.get("over_local")),
        f"{interval_text(best)} {row['best_peer']}" if best else "",
        f"{row['processor_s'] * 1e3:.0f}",
        f"{row['kernel_s'] * 1e3:.0f}",
        mib(row["sent_bytes"]),
        "" if row["formula_bytes"] is None else mib(row["formula_bytes"]),
        mib(row["peak_bytes"]),
        mib(row["state_bytes"]),
    ]


def configurations(options: dict[str, Any]) -> list[Configuration]:
    keys = ("model", "ranks", "accumulation", "precision", "optimizer")
    combinations = itertools.product(*(options[key] for key in keys))
    batch = options["micro_batch_size"]
    return [Configuration(**dict(zip(keys, values, strict=True)), micro_batch_size=batch) for values in combinations]


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", multiple=True, type=click.Choice(list(SIZES)), default=["gpt-s"])
@click.option("--ranks", multiple=True, type=click.IntRange(2), default=[2])
@click.option("--accumulation", multiple=True, type=click.IntRange(1), default=[1])
@click.option("--precision", multiple=True, type=click.Choice(["fp32", "bf16"]), default=["fp32"])
@click.option("--optimizer", multiple=True, type=click.Choice(["foreach", "fused"]), default=["foreach"])
@click.option("--micro-batch-size", type=click.IntRange(1), default=4)
@click.option("--systems", default=",".join(installed_systems()), help="Names with commas between; local first.")
@click.option("--rounds", type=click.IntRange(1), default=15)
@click.option("--burst", type=click.IntRange(1), default=4, help="Steps of one timing.")
@click.option("--quick", is_flag=True, help="gpt-xs, 3 rounds, bursts of 2: to see that all runs.")
@result_options
def main(systems: str, rounds: int, burst: int, quick: bool, **options: Any) -> None:
    """Measure every system at the same work on equal ranks."""
    if quick:
        rounds, burst, options["model"] = 3, 2, ["gpt-xs"]
    names = checked_systems(systems)
    runs = [partial(run, config, names, rounds, burst) for config in configurations(options)]
    report("equal_ranks", runs, table, options)


if __name__ == "__main__":
    main()

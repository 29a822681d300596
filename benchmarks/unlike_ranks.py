"""Unlike ranks: throughput of every system where the kernel gives each rank another share of a core.

    python -m benchmarks.unlike_ranks --out benchmarks/results/unlike_ranks.json --write README.md

How a share is given: see shares.py. What is compared, all in the same rounds:

    alone            each rank by itself, a plain loop on the whole global batch, the others at rest: their sum is the
                     ideal, the first rank's is "the fast rank alone"
    peers            equal batches on every rank, cut into the micro-batches that were fastest in a first try
    poplar-z0...z3   its own profile and plan (``poplar.make_plan``), nothing given by hand

Idle share of a rank: the part of its share of a core that it did not use while it took its steps.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import click
import torch.distributed as dist

from benchmarks.common import (
    interleave,
    interval_text,
    machine,
    markdown_table,
    median_interval,
    paired_ratio,
    report,
    result_options,
    slowest,
)
from benchmarks.contestants import Configuration, Entry, alone, at_best_equal_batch, planned
from benchmarks.gpt import SIZES
from benchmarks.ranks import run_ranks
from benchmarks.shares import cpu_shares, fit_to_cores, received_share
from benchmarks.systems import STAGE_OF, checked_systems, installed_systems

DEFAULT_SHARES = ("1+0.3", "1+0.5", "1+1+0.25")
DEFAULT_SYSTEMS = [name for name in installed_systems() if name != "local" and not name.endswith("-gloo")]
USABLE_PART = 0.97
"""Of all cores together; the rest is the system's."""


# On each rank.


def measure(
    rank: int,
    world_size: int,
    config: Configuration,
    shares: Sequence[float],
    names: Sequence[str],
    rounds: int,
    burst: int,
) -> dict[str, Any]:
    """Prepare everything that is compared, and time it in turns."""
    received = in_turn(rank, world_size, received_share)
    entries: dict[str, Entry] = {}
    for turn in range(world_size):
        entries[f"alone-{turn}"] = alone(turn, rank, config, burst)
    for name in names:
        if name.startswith("poplar"):
            entries[name] = planned(name, rank, config, burst)
        else:
            entries[name] = at_best_equal_batch(name, rank, world_size, config, burst)
    gc.collect()
    gc.freeze()
    times = interleave({name: entry.run for name, entry in entries.items()}, rounds)
    return {
        "received_share": received,
        "times": times,
        "processor_s": {name: entry.processor_s for name, entry in entries.items()},
        "samples": {name: entry.samples for name, entry in entries.items()},
        "split": {name: entry.split for name, entry in entries.items()},
    }


def in_turn(rank: int, world_size: int, work: Callable[[], float]) -> float:
    """Do ``work`` while the other ranks rest; return its result."""
    result = 0.0
    for turn in range(world_size):
        dist.barrier()
        if turn == rank:
            result = work()
    dist.barrier()
    return result


# Together.


def run(config: Configuration, names: Sequence[str], rounds: int, burst: int, use_quota: bool) -> dict[str, Any]:
    """Measure one configuration; return its record."""
    about = machine()
    shares = fit_to_cores(config.shares, about["cores"] * USABLE_PART)
    with cpu_shares(shares, use_quota) as limiter:
        args = (config, shares, names, rounds, burst)
        by_rank = run_ranks(measure, len(shares), *args, admit=limiter.admit)
        how, are_exact = limiter.how, limiter.is_exact
    times = slowest([rank["times"] for rank in by_rank])
    samples, split = by_rank[0]["samples"], by_rank[0]["split"]
    rates = {name: [samples[name] / seconds for seconds in taken] for name, taken in times.items()}
    ideal = [sum(rows) for rows in zip(*(rates[f"alone-{turn}"] for turn in range(len(shares))), strict=True)]
    rows: list[dict[str, Any]] = []
    for name, by_round in rates.items():
        idle = [
            idle_share(rank["processor_s"][name], times[name], share if are_exact else rank["received_share"])
            for rank, share in zip(by_rank, shares, strict=True)
        ]
        rows.append(
            {
                "system": name,
                "stage": STAGE_OF.get(name),
                "samples_per_s": statistics.median(by_round),
                "share_of_ideal": asdict(paired_ratio(by_round, ideal)),
                "split": split[name],
                "idle_share": [round(share, 4) for share in idle],
                "rates": by_round,
            }
        )
    compare_with_peers(rows)
    return {
        "configuration": asdict(config),
        "shares": shares,
        "received_shares": [rank["received_share"] for rank in by_rank],
        "how": how,
        "rounds": rounds,
        "burst": burst,
        "machine": about,
        "ideal_samples_per_s": asdict(median_interval(ideal)),
        "rows": rows,
    }


def idle_share(processor_s: Sequence[float], wall_s: Sequence[float], share: float) -> float:
    """Return the part of its ``share`` of a core that a rank did not use, in the median round."""
    used = [used_s / (share * seconds) for used_s, seconds in zip(processor_s, wall_s, strict=True)]
    return max(0.0, 1 - statistics.median(used))


def compare_with_peers(rows: Sequence[dict[str, Any]]) -> None:
    """Add to Poplar's rows their ratio over the fastest peer with equal batches at the same stage."""
    for row in rows:
        peers = [other for other in rows if other["stage"] == row["stage"] and not other["system"].startswith("poplar")]
        if row["system"].startswith("poplar") and peers:
            best = max(peers, key=lambda peer: peer["samples_per_s"])
            row["best_peer"] = best["system"]
            row["over_best_peer"] = asdict(paired_ratio(row["rates"], best["rates"]))


# Tables.


def table(record: dict[str, Any]) -> str:
    config = record["configuration"]
    received = " + ".join(f"{share:.2f}" for share in record["received_shares"])
    title = (
        f"**{'+'.join(f'{share:g}' for share in config['shares'])} cores**, {config['model']}, global batch "
        f"{config['global_batch_size']}, {config['precision']}; {record['how']}; received {received}; "
        f"ideal {record['ideal_samples_per_s']['median']:.1f} samples/s; {record['rounds']} rounds"
    )
    header = ["system", "stage", "samples/s", "share of the ideal", "over best peer", "samples by rank", "idle by rank"]
    return f"{title}\n\n{markdown_table(header, [cells(row) for row in record['rows']])}"


def cells(row: dict[str, Any]) -> list[str]:
    best = row.get("over_best_peer")
    return [
        row["system"],
        "" if row["stage"] is None else str(row["stage"]),
        f"{row['samples_per_s']:.1f}",
        interval_text(row["share_of_ideal"]),
        f"{interval_text(best)} {row['best_peer']}" if best else "",
        " : ".join(describe(sizes) for sizes in row["split"]),
        " : ".join(f"{share:.0%}" for share in row["idle_share"]),
    ]


def describe(sizes: Sequence[int]) -> str:
    """Say how a rank's samples are cut, as 32 (8 x 4)."""
    kinds = set(sizes)
    if len(sizes) < 2:
        return str(sum(sizes))
    return f"{sum(sizes)} ({len(sizes)} x {sizes[0]})" if len(kinds) == 1 else f"{sum(sizes)} ({len(sizes)} pieces)"


def parse_shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(part) for part in text.split("+"))
    except ValueError:
        shares = ()
    if len(shares) < 2 or not all(0.01 <= share <= 1 for share in shares):
        raise click.BadParameter(f"expected shares of a core with + between, each at most 1, as 1+0.3; got {text!r}")
    return shares


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--shares", multiple=True, default=DEFAULT_SHARES, help="A core's worth by rank, the fast rank first.")
@click.option("--model", type=click.Choice(list(SIZES)), default="gpt-s")
@click.option("--global-batch-size", type=click.IntRange(1), default=64)
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="fp32")
@click.option("--optimizer", type=click.Choice(["foreach", "fused"]), default="foreach")
@click.option("--systems", default=",".join(DEFAULT_SYSTEMS), help="Names with commas between.")
@click.option("--rounds", type=click.IntRange(1), default=15)
@click.option("--burst", type=click.IntRange(1), default=1, help="Steps of one timing.")
@click.option("--quick", is_flag=True, help="gpt-xs, global batch 16, 2 rounds: to see that all runs.")
@click.option("--quota/--no-quota", default=True, help="Try a CPU quota before pinning beside a busy process.")
@result_options
def main(**options: Any) -> None:
    """Measure every system on ranks that the kernel makes unlike."""
    if options["quick"]:
        options.update(model="gpt-xs", global_batch_size=16, rounds=2)
    names = checked_systems(options["systems"])
    keys = ("model", "global_batch_size", "precision", "optimizer")
    configs = [
        Configuration(shares=parse_shares(text), **{key: options[key] for key in keys}) for text in options["shares"]
    ]
    runs = [partial(run, config, names, options["rounds"], options["burst"], options["quota"]) for config in configs]
    report("unlike_ranks", runs, table, options)


if __name__ == "__main__":
    main()

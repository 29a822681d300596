"""What the benchmarks share: interleaved rounds, statistics of paired ratios, results and tables.

[Note: how a time is taken]
All tasks that are compared live in the same processes and run in turns: a round runs every task once, each round in
another order. Two tasks are compared by the ratios of their times in the same round, so that what slows the machine
for a while slows both sides of a ratio. A figure is the median ratio; its spread is the 95% interval of that median
over resampled rounds (bootstrap). Ranks meet at a barrier before a timing and never inside it; a timing ends when
everything that it has started is complete, and the slowest rank's time counts.
"""

from __future__ import annotations

import json
import os
import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

ROOT = Path(__file__).resolve().parents[1]
BUSY_CORES = 0.1
"""Cores in use before the ranks start, above which somebody else is at work on the machine."""

# Rounds.


def round_order(names: Sequence[str], number: int) -> list[str]:
    """Return the order of a round: rotated by its number, and backwards every other time, so that neighbours change."""
    shift = number % len(names)
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if number % 2 else order


def interleave(tasks: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every task once a round; return what each returned (its seconds), by round."""
    names = list(tasks)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in round_order(names, number):
            taken[name].append(tasks[name]())
    return taken


def slowest(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Return, by task and round, the slowest rank's time."""
    return {name: [max(times) for times in zip(*(rank[name] for rank in by_rank), strict=True)] for name in by_rank[0]}


# Statistics.


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median and how sure it is."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_interval(values: Sequence[float], confidence: float = 0.95, resamples: int = 4000) -> Interval:
    """Return the median with its bootstrap percentile interval; the same values give the same interval."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(resamples))
    tail = (1 - confidence) / 2
    low, high = medians[int(tail * (resamples - 1))], medians[round((1 - tail) * (resamples - 1))]
    return Interval(median=statistics.median(values), low=low, high=high)


def paired_ratio(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Return the median of ``values`` over ``others``, round by round."""
    return median_interval([value / other for value, other in zip(values, others, strict=True)])


# Results.


def machine() -> dict[str, Any]:
    """Describe where the figures come from."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"model name\s*: (.*)", cpuinfo.read_text())
        model = found.group(1) if found else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "busy_cores_before": None if (busy := busy_cores()) is None else round(busy, 2),
    }


def busy_cores(seconds: float = 1.0) -> float | None:
    """Watch the machine for a while; return how many cores were in use. None where the system does not tell."""
    if not Path("/proc/stat").exists():
        return None

    def idle_and_all() -> tuple[int, int]:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return fields[3] + fields[4], sum(fields)

    idle, everything = idle_and_all()
    time.sleep(seconds)
    idle_later, everything_later = idle_and_all()
    busy = 1 - (idle_later - idle) / max(1, everything_later - everything)
    return busy * (os.cpu_count() or 1)


def merge_runs(path: Path, runs: Sequence[dict[str, Any]], key: str = "configuration") -> list[dict[str, Any]]:
    """Put ``runs`` into the JSON file, each in place of one with the same ``key``; return all of the file's runs."""
    kept = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
    # What comes out of JSON has lists for tuples, so compare what would be written.
    new = json.loads(json.dumps(list(runs)))
    for run in new:
        places = [index for index, old in enumerate(kept) if old[key] == run[key]]
        if places:
            kept[places[0]] = run
        else:
            kept.append(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"runs": kept}, indent=1) + "\n", encoding="utf-8")
    return kept


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_between_markers(path: Path, name: str, text: str) -> None:
    """Replace what stands between ``<!-- benchmark:name -->`` and ``<!-- end of benchmark:name -->`` in a document.

    Raises:
        ValueError: the document does not have both markers, in this order.
    """
    begin, end = f"<!-- benchmark:{name} -->", f"<!-- end of benchmark:{name} -->"
    document = path.read_text(encoding="utf-8")
    head, found, rest = document.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"{path} needs the lines {begin!r} and {end!r} around the table; it lacks one of them")
    path.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")


def mib(num_bytes: float | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 2**20:.2f}"


def interval_text(interval: Mapping[str, float] | None) -> str:
    """Format an ``Interval`` as it comes out of JSON."""
    return "" if interval is None else f"{interval['median']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


# Command lines.


def result_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say where results go."""
    for option in (
        click.option("--only-write", is_flag=True, help="Measure nothing: write what --out holds."),
        click.option("--write", multiple=True, type=click.Path(path_type=Path), help="Documents that get the tables."),
        click.option("--out", type=click.Path(path_type=Path), help="JSON file; keeps its other configurations."),
    ):
        command = option(command)
    return command


def report(
    name: str,
    runs: Iterable[Callable[[], dict[str, Any]]],
    table: Callable[[dict[str, Any]], str],
    options: Mapping[str, Any],
) -> None:
    """Make every run, print its table, and put results where ``result_options`` say.

    Args:
        name: of the benchmark, as in the markers of documents.
        runs: each returns a record with its "configuration" and its "machine".
    """
    out: Path | None = options["out"]
    records: list[dict[str, Any]] = []
    for run in () if options["only_write"] else runs:
        record = run()
        records = merge_runs(out, [record]) if out else [*records, record]
        click.echo(f"{table(record)}\n")
        if (record["machine"]["busy_cores_before"] or 0) > BUSY_CORES:
            click.echo("warning: other processes were at work on this machine; do not trust these times", err=True)
    if options["only_write"] and out:
        records = merge_runs(out, [])
    if not records:
        raise click.ClickException("there is nothing to write; --only-write needs --out")
    about = records[-1]["machine"]
    where = f"{about['gpu'] or about['cpu']}, {about['cores']} cores; {about['system']}, torch {about['torch']}."
    for path in options["write"]:
        write_between_markers(path, name, "\n\n".join([*(table(record) for record in records), where]))

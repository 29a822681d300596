"""What Poplar costs where it has nothing to do: a step at world size 1, an import, the command line's help.

python -m benchmarks.overhead --out benchmarks/results/overhead.json --write README.md
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
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
from benchmarks.gpt import SIZES, Workload
from benchmarks.systems import System, build

STEP_TARGET, IMPORT_TARGET_S, HELP_TARGET_S = 1.02, 0.3, 0.5

IMPORT_CODE = """
import time, torch
began = time.perf_counter()
import poplar
{use}
print(time.perf_counter() - began)
"""
HELP_CODE = "import sys\nfrom poplar.cli import main\nsys.argv = ['poplar', '--help']\nmain()"
STARTS = {
    "import poplar": IMPORT_CODE.format(use=""),
    "import poplar, and every public name": IMPORT_CODE.format(
        use="[getattr(poplar, name) for name in poplar.__all__]"
    ),
}
"""Code that prints how many seconds it took after torch was there."""


def timed_burst(system: System, batches: Sequence, burst: int) -> float:
    """Return the seconds of a step; a step that is not timed goes first."""
    system.step(batches)
    system.finish()
    began = time.perf_counter()
    for _ in range(burst):
        system.step(batches)
    system.finish()
    return (time.perf_counter() - began) / burst


def steps(model: str, rounds: int, burst: int) -> dict[str, Any]:
    """Time a step of every stage at world size 1 beside the plain loop."""
    about = machine()
    workload = Workload(model=model)
    batches = [workload.samples(4, seed=1)]
    systems = {name: build(name, workload) for name in ("local", *(f"poplar-z{stage}" for stage in range(4)))}
    for system in systems.values():
        system.step(batches)
    gc.collect()
    gc.freeze()
    tasks = {name: partial(timed_burst, system, batches, burst) for name, system in systems.items()}
    times = interleave(tasks, rounds)
    rows = [
        {
            "what": "plain PyTorch loop" if name == "local" else f"Engine.step, stage {name[-1]}",
            "seconds": asdict(median_interval(taken)),
            "over_plain": None if name == "local" else asdict(paired_ratio(taken, times["local"])),
            "target": None if name == "local" else f"<= {STEP_TARGET}",
        }
        for name, taken in times.items()
    ]
    configuration = {"part": "steps", "model": model}
    return {"configuration": configuration, "rounds": rounds, "burst": burst, "machine": about, "rows": rows}


def starts(rounds: int) -> dict[str, Any]:
    """Time imports and the command line's help in fresh processes."""
    about = machine()
    tasks: dict[str, Callable[[], float]] = {
        name: partial(printed_seconds, [sys.executable, "-c", code]) for name, code in STARTS.items()
    }
    tasks["poplar --help"] = partial(process_seconds, [sys.executable, "-c", HELP_CODE])
    for task in tasks.values():
        task()  # the first start reads files from disk and writes byte code
    targets = {**dict.fromkeys(STARTS, IMPORT_TARGET_S), "poplar --help": HELP_TARGET_S}
    rows = [
        {"what": name, "seconds": asdict(median_interval(taken)), "over_plain": None, "target": f"<= {targets[name]} s"}
        for name, taken in interleave(tasks, rounds).items()
    ]
    return {"configuration": {"part": "starts"}, "rounds": rounds, "machine": about, "rows": rows}


def printed_seconds(command: Sequence[str]) -> float:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def process_seconds(command: Sequence[str]) -> float:
    """Return how long the process took from its start to its end."""
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def table(record: dict[str, Any]) -> str:
    config = record["configuration"]
    if config["part"] == "steps":
        title = (
            f"**One step at world size 1**, {config['model']}, {record['rounds']} rounds, bursts of {record['burst']}"
        )
    else:
        title = f"**Starting**, beyond torch's own import (help: the whole process), {record['rounds']} rounds"
    rows = [
        [row["what"], milliseconds(row["seconds"]), interval_text(row["over_plain"]), row["target"] or ""]
        for row in record["rows"]
    ]
    return f"{title}\n\n{markdown_table(['what', 'ms', 'over plain', 'target'], rows)}"


def milliseconds(interval: dict[str, float]) -> str:
    median, low, high = (interval[key] * 1e3 for key in ("median", "low", "high"))
    return f"{median:.1f} [{low:.1f}, {high:.1f}]"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", multiple=True, type=click.Choice(list(SIZES)), default=["gpt-xs"])
@click.option("--rounds", type=click.IntRange(1), default=15)
@click.option("--burst", type=click.IntRange(1), default=10, help="Steps of one timing.")
@result_options
def main(model: Sequence[str], rounds: int, burst: int, **options: Any) -> None:
    """Time a step at world size 1, imports and the help."""
    torch.set_num_threads(1)
    runs: list[Callable[[], dict[str, Any]]] = [partial(steps, name, rounds, burst) for name in model]
    report("overhead", [*runs, partial(starts, rounds)], table, options)


if __name__ == "__main__":
    main()

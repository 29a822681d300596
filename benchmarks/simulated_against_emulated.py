"""Judge simulated plans by emulated runs: step times, and the order of the strategies.

    python benchmarks/simulated_against_emulated.py --cluster v100-16g:1,t4-16g:1 --zero-stage 1

One kind of card, the fastest of the cluster, is profiled (emulated, as many ranks as the cluster has); its profile is
carried over to the other cards by the catalogue; each strategy is planned on that and trained for some steps on the
emulated cluster. Simulated and measured step times stand side by side; nothing of the unlike cluster was profiled.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from poplar.allocator import allocate
from poplar.catalog import find_card, parse_cluster
from poplar.config import STRATEGIES
from poplar.plan import ClusterProfile, Plan
from poplar.simulation.transfer import transfer_profile
from poplar.simulator import describe_cluster
from poplar.tables import format_seconds, format_table

WARM_UP_STEPS = 4


def poplar(*arguments: str) -> None:
    """Run a command of the package."""
    done = subprocess.run([sys.executable, "-m", "poplar", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"poplar {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")


def profile_fastest(names: Sequence[str], zero_stage: int, batch: int, folder: Path) -> ClusterProfile:
    """Profile an emulated cluster of the fastest card alone, of as many ranks."""
    fastest = max(names, key=lambda name: find_card(name).relative_speed)
    path = folder / "profile.json"
    arguments = ("--emulate", f"{fastest}:{len(names)}", "--zero-stage", str(zero_stage))
    poplar("profile", *arguments, "--global-batch-size", str(batch), "--out", str(path))
    return ClusterProfile.from_json(path.read_text())


def measure_step_s(plan: Plan, names: Sequence[str], steps: int, folder: Path) -> float:
    """Train with ``plan`` on the emulated cluster and return the median seconds of a step."""
    run_dir = folder / f"run-{plan.strategy}"
    plan.save(folder / "plan.json")
    arguments = ("--plan", str(folder / "plan.json"), "--emulate", describe_cluster(names), "--no-progress")
    poplar("train", *arguments, "--steps", str(steps), "--compare-steps", "0", "--run-dir", str(run_dir))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["step_s"] for line in lines if line.get("step_s") is not None]
    return statistics.median(seconds[WARM_UP_STEPS:])


@click.command()
@click.option("--cluster", default="v100-16g:1,t4-16g:1", show_default=True)
@click.option("--zero-stage", type=click.IntRange(0, 3), default=1, show_default=True)
@click.option("--global-batch-size", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--steps", type=click.IntRange(min=WARM_UP_STEPS + 3), default=16, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write the result as JSON.")
def main(cluster: str, zero_stage: int, global_batch_size: int, steps: int, out: Path | None) -> None:
    """Compare simulated with emulated step times."""
    names = parse_cluster(cluster)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        simulated = transfer_profile(profile_fastest(names, zero_stage, global_batch_size, folder), names)
        rows = []
        for strategy in STRATEGIES:
            plan = replace(allocate(simulated, global_batch_size, strategy), notes=())
            assert plan.predicted is not None
            rows.append((strategy, plan.predicted.step_s, measure_step_s(plan, names, steps, folder)))
    table = [
        (strategy, format_seconds(predicted_s), format_seconds(measured_s), f"{predicted_s / measured_s - 1:+.1%}")
        for strategy, predicted_s, measured_s in rows
    ]
    click.echo(f"{describe_cluster(names)}, stage {zero_stage}, global batch {global_batch_size}")
    click.echo(format_table(("strategy", "simulated", "measured", "error"), table))
    if out is not None:
        result = [dict(zip(("strategy", "simulated_s", "measured_s"), row, strict=True)) for row in rows]
        out.write_text(json.dumps({"cluster": cluster, "zero_stage": zero_stage, "runs": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()

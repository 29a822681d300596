"""Judge curves and plans by public measurements: the error at sizes that a curve did not see, and what plans gain.

    python benchmarks/public_curves.py [--data FOLDER] [--out public_curves.json]

The measurements are ``layer_times.csv``: forward and backward of ONE transformer layer by card, model, sequence length,
type and micro-batch size, by the authors of Cephalo (github.com/benson-guo/cephalo, MIT licence). They are not part of
this package; without them the script says so and ends well. No collectives and no optimizer are in these times, so that
the gains are those of compute alone.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from poplar.allocator import STRATEGIES, allocate
from poplar.curve import fit_curve
from poplar.plan import ClusterProfile, RankProfile
from poplar.planning.cost import predict

DEFAULT_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
KNOTS = (1, 2, 4, 8, 16)
CARDS = {
    "a100x40": "a100-40g",
    "a100x80": "a100-80g",
    "t4": "t4-16g",
    "v100-pciex16": "v100-pcie-16g",
    "v100x16": "v100-16g",
}
PAIRS = (("v100x16", "t4"), ("v100-pciex16", "t4"), ("a100x40", "t4"), ("a100x80", "t4"))
GLOBAL_BATCH_SIZE = 96

Setting = tuple[str, str, str]
"""Model, sequence length, type."""
Times = dict[int, float]
"""Seconds of one layer, forward and backward, by micro-batch size."""


def read_times(path: Path) -> dict[Setting, dict[str, Times]]:
    """Return the measured times by setting and card."""
    times: dict[Setting, dict[str, Times]] = defaultdict(lambda: defaultdict(dict))
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            milliseconds = float(row["forward_ms_per_layer"]) + float(row["backward_ms_per_layer"])
            setting = (row["model"], row["seq_len"], row["dtype"])
            times[setting][row["gpu"]][int(row["micro_batch_size"])] = milliseconds / 1e3
    return times


def knots_of(times: Times) -> tuple[tuple[int, float], ...]:
    return tuple((size, times[size]) for size in KNOTS if size in times)


def curve_errors(times: dict[Setting, dict[str, Times]], dtype: str) -> dict[str, object]:
    """Fit every card's curve to its knots; return the relative errors at the other sizes below the largest knot."""
    errors: list[float] = []
    methods: dict[str, int] = defaultdict(int)
    unsafe = 0
    for setting, by_card in times.items():
        if setting[2] != dtype:
            continue
        for measured in by_card.values():
            curve = fit_curve(knots_of(measured))
            seconds = curve.seconds_array()
            unsafe += bool((seconds[1:] <= 0).any() or (np.diff(seconds) < 0).any())
            methods[curve.method] += 1
            errors += [
                abs(curve.seconds(size) / actual_s - 1)
                for size, actual_s in measured.items()
                if size not in KNOTS and size < curve.max_micro_batch_size
            ]
    return {
        "dtype": dtype,
        "curves": sum(methods.values()),
        "methods": dict(methods),
        "negative_or_decreasing": unsafe,
        "sizes_left_out": len(errors),
        "mean_error": float(np.mean(errors)),
        "p95_error": float(np.quantile(errors, 0.95)),
        "largest_error": float(np.max(errors)),
    }


def pair_gains(setting: Setting, names: Sequence[str], both: Sequence[Times], zero_stage: int) -> dict[str, object]:
    """Plan from the knots alone, time the plans by what was measured at every size; return samples/s of one layer."""

    def profile(points: Sequence[tuple[tuple[int, float], ...]]) -> ClusterProfile:
        ranks = tuple(
            RankProfile(device=CARDS[name], points=p, max_micro_batch_size=p[-1][0])
            for name, p in zip(names, points, strict=True)
        )
        return ClusterProfile(zero_stage=zero_stage, ranks=ranks, precision="fp16")

    known = profile([knots_of(times) for times in both])
    actual = profile([tuple(sorted(times.items())) for times in both])
    rates, shares, errors = {}, {}, {}
    for strategy in STRATEGIES:
        plan = allocate(known, GLOBAL_BATCH_SIZE, strategy)
        step_s = predict(actual, plan).step_s
        rates[strategy] = GLOBAL_BATCH_SIZE / step_s
        shares[strategy] = [row.num_samples for row in plan.ranks]
        assert plan.predicted is not None
        errors[strategy] = plan.predicted.step_s / step_s - 1
    return {
        "cards": ":".join(names),
        "model": setting[0],
        "seq_len": int(setting[1]),
        "zero_stage": zero_stage,
        "samples_per_s": rates,
        "shares": shares,
        "predicted_over_actual": errors,
    }


def all_pairs(times: dict[Setting, dict[str, Times]]) -> list[dict[str, object]]:
    return [
        pair_gains(setting, names, [by_card[name] for name in names], zero_stage)
        for names in PAIRS
        for setting, by_card in sorted(times.items(), key=lambda item: (item[0][0], int(item[0][1])))
        if setting[2] == "float16" and all(name in by_card for name in names)
        for zero_stage in (1, 3)
    ]


def curve_table(rows: Sequence[dict]) -> str:
    lines = ["| type | curves | sizes left out | mean error | 95% below | largest |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {row['dtype']} | {row['curves']} | {row['sizes_left_out']} | {row['mean_error']:.2%} "
        f"| {row['p95_error']:.1%} | {row['largest_error']:.1%} |"
        for row in rows
    ]
    return "\n".join(lines)


def pair_table(rows: Sequence[dict]) -> str:
    lines = [
        "| cards | model | tokens | stage | exact splits | over equal | over flops | over poplar | predicted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rate = row["samples_per_s"]
        gains = " | ".join(f"{rate['exact'] / rate[rival]:.2f}x" for rival in ("equal", "flops", "poplar"))
        split = ":".join(map(str, row["shares"]["exact"]))
        lines.append(
            f"| {row['cards']} | {row['model']} | {row['seq_len']} | {row['zero_stage']} | {split} | {gains} "
            f"| {row['predicted_over_actual']['exact']:+.1%} |"
        )
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--data", type=click.Path(path_type=Path), default=DEFAULT_DATA, help="Folder of layer_times.csv.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the figures as JSON here.")
def main(data: Path, out: Path | None) -> None:
    """Judge curves and plans by public measurements."""
    path = data / "layer_times.csv"
    if not path.is_file():
        click.echo(f"skipped: no measurements at {path}; --data names their folder")
        return
    times = read_times(path)
    curves = [curve_errors(times, dtype) for dtype in ("float16", "float32")]
    pairs = all_pairs(times)
    click.echo(f"{curve_table(curves)}\n\n{pair_table(pairs)}")
    if out is not None:
        out.write_text(json.dumps({"curves": curves, "pairs": pairs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

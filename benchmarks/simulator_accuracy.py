"""Judge the simulator by public layer times, and fit the catalogue's rates to them.

    python benchmarks/simulator_accuracy.py            # table: shipped rates against the measurements
    python benchmarks/simulator_accuracy.py --fit      # the rates that a new fit gives
    python benchmarks/simulator_accuracy.py --docs     # write the table into docs/simulator.md

The measurements are ``layer_times.csv``: forward and backward of ONE transformer layer by card, model, sequence length,
type and micro-batch size, by the authors of Cephalo (github.com/benson-guo/cephalo, MIT licence). They are not part of
this package. Rates are fitted to one model, the 7B Llama, the only one that every card ran; the other models judge.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import click
import numpy as np
from scipy.optimize import nnls

from poplar.catalog import Card, KernelRates, find_card
from poplar.simulation.model_spec import ModelSpec
from poplar.simulation.step_model import compute_s

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_DATA = ROOT.parent / "shared" / "data"
CALIBRATION_MODEL = "llama-7b"
LAYERS = {
    "llama-tiny-1.1b": dict(width=2048, ffn_width=5632, heads=32),
    "llama-3b": dict(width=3200, ffn_width=8640, heads=32),
    "llama-7b": dict(width=4096, ffn_width=11008, heads=32),
}
CARDS = {
    "a100x40": "a100-40g",
    "a100x80": "a100-80g",
    "a10g": "a10g-24g",
    "a6000": "a6000-48g",
    "h100-nvl": "h100-nvl-94g",
    "l4": "l4-24g",
    "l40s": "l40s-48g",
    "p100": "p100-16g",
    "p40": "p40-24g",
    "t4": "t4-16g",
    "v100-pciex16": "v100-pcie-16g",
    "v100x16": "v100-16g",
}
MARK = "<!-- accuracy: written by benchmarks/simulator_accuracy.py -->\n"
PRECISIONS = {"float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement."""

    card: str
    model: str
    precision: str
    seq_len: int
    micro_batch_size: int
    seconds: float
    """Forward and backward of one layer."""

    @property
    def case(self) -> tuple[str, str, int, int]:
        """All but the card."""
        return self.model, self.precision, self.seq_len, self.micro_batch_size


def read_rows(data: Path) -> list[Row]:
    """Read the measurements of the cards and models that are known here."""
    with open(data / "layer_times.csv", newline="") as file:
        return [
            Row(
                card=CARDS[row["gpu"]],
                model=row["model"],
                precision=PRECISIONS[row["dtype"]],
                seq_len=int(row["seq_len"]),
                micro_batch_size=int(row["micro_batch_size"]),
                seconds=(float(row["forward_ms_per_layer"]) + float(row["backward_ms_per_layer"])) / 1e3,
            )
            for row in csv.DictReader(file)
        ]


def layer(model: str, seq_len: int) -> ModelSpec:
    """Describe one layer of ``model``; a vocabulary of one leaves next to nothing around it."""
    return ModelSpec.transformer(layers=1, vocab=1, seq_len=seq_len, name=model, **LAYERS[model])


def predict_s(row: Row) -> float:
    """Predict a measurement with the catalogue's rates."""
    return compute_s(find_card(row.card), layer(row.model, row.seq_len), row.micro_batch_size, row.precision)


def fit_rates(card: Card, rows: list[Row]) -> KernelRates:
    """Fit the three rates of ``card`` to ``rows`` (least relative squares, none below zero)."""
    bandwidth = card.memory_bandwidth_bytes_per_s
    terms, rest = [], []
    for row in rows:
        spec, size = layer(row.model, row.seq_len), row.micro_batch_size
        flops = (3 * size * spec.matmul_flop / 1e12, 3 * size * spec.attention_flop / 1e12)
        terms.append((*flops, spec.num_parameters / bandwidth))
        rest.append(row.seconds - size * spec.traffic_bytes(row.precision) / bandwidth)
    seconds = np.array([row.seconds for row in rows])
    one_length = len({row.seq_len for row in rows}) == 1  # then attention cannot be told from the rest
    if one_length:
        terms = [(matmul + attention, 0.0, parameters) for matmul, attention, parameters in terms]
    scale = np.max(np.array(terms) / seconds[:, None], axis=0) + 1e-30
    weights, _ = nnls(np.array(terms) / seconds[:, None] / scale, np.array(rest) / seconds)
    inverse_matmul, inverse_attention, bytes_per_parameter = weights / scale
    if one_length:
        inverse_attention = inverse_matmul
    return KernelRates(
        matmul_tflops=1 / inverse_matmul,
        attention_tflops=1 / inverse_attention if inverse_attention > 0 else None,
        bytes_per_parameter=bytes_per_parameter,
    )


def fitted_s(card: Card, rates: KernelRates, row: Row) -> float:
    """Predict a measurement with other rates than the catalogue's."""
    spec, bandwidth = layer(row.model, row.seq_len), card.memory_bandwidth_bytes_per_s
    flop_s = spec.matmul_flop / rates.matmul_tflops / 1e12
    flop_s += spec.attention_flop / rates.attention_tflops / 1e12 if rates.attention_tflops else 0.0
    per_sample_s = 3 * flop_s + spec.traffic_bytes(row.precision) / bandwidth
    return row.micro_batch_size * per_sample_s + spec.num_parameters * rates.bytes_per_parameter / bandwidth


def by(rows: Iterable[Row], key: Callable[[Row], object]) -> dict:
    """Group rows."""
    groups = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return dict(groups)


def errors(rows: list[Row]) -> np.ndarray:
    """Return the relative errors of the predictions, signed."""
    return np.array([predict_s(row) / row.seconds - 1 for row in rows])


def ratio_errors(rows: list[Row]) -> np.ndarray:
    """Return the errors of predicted speed ratios over all pairs of cards that ran the same case."""
    found = []
    for group in by(rows, lambda row: row.case).values():
        for a, b in combinations(group, 2):
            found.append(abs((predict_s(a) / predict_s(b)) / (a.seconds / b.seconds) - 1))
    return np.array(found)


def held_out_length_errors(rows: list[Row]) -> dict[str, np.ndarray]:
    """For cards that ran the calibration model alone: fit without one sequence length, predict that one."""
    found = {}
    for name, own in by(rows, lambda row: row.card).items():
        lengths = by(own, lambda row: row.seq_len)
        if {row.model for row in own} == {CALIBRATION_MODEL} and len(lengths) > 1:
            card = find_card(name)
            found[name] = np.array(
                [
                    fitted_s(card, fit_rates(card, [row for row in own if row.seq_len != length]), row) / row.seconds
                    - 1
                    for length, left_out in lengths.items()
                    for row in left_out
                ]
            )
    return found


def report(rows: list[Row]) -> tuple[str, dict]:
    """Return the table by card and model as Markdown, and the medians."""
    half = [row for row in rows if row.precision == "fp16"]
    lines = ["| card | model | rows | median error | median, signed | largest |", "|---|---|---|---|---|---|"]
    for (card, model), group in sorted(by(half, lambda row: (row.card, row.model)).items()):
        found = errors(group)
        role = " (calibration)" if model == CALIBRATION_MODEL else ""
        lines.append(
            f"| {card} | {model}{role} | {len(group)} | {np.median(abs(found)):.1%} | {np.median(found):+.1%} "
            f"| {abs(found).max():.0%} |"
        )
    judged = [row for row in half if row.model != CALIBRATION_MODEL]
    single = [row for row in rows if row.precision == "fp32" and row.model != CALIBRATION_MODEL]
    held_out = np.concatenate(list(held_out_length_errors(half).values()))
    medians = {
        "rows judged": len(judged),
        "median error, fp16": float(np.median(abs(errors(judged)))),
        "90th percentile, fp16": float(np.quantile(abs(errors(judged)), 0.9)),
        "pairs of cards": len(ratio_errors(judged)),
        "median error of speed ratios, fp16": float(np.median(ratio_errors(judged))),
        "90th percentile of speed ratios, fp16": float(np.quantile(ratio_errors(judged), 0.9)),
        "median error, fp32": float(np.median(abs(errors(single)))),
        "median error of a V100's sequence length left out of the fit, fp16": float(np.median(abs(held_out))),
    }
    summary = [f"- {key}: {value if isinstance(value, int) else f'{value:.1%}'}" for key, value in medians.items()]
    return "\n".join([*summary, "", *lines]), medians


def fit_all(rows: list[Row]) -> list[str]:
    """Return one line a card and precision: the rates fitted to the calibration model."""
    lines = []
    calibration = [row for row in rows if row.model == CALIBRATION_MODEL]
    for (name, precision), group in sorted(by(calibration, lambda row: (row.card, row.precision)).items()):
        rates = fit_rates(find_card(name), group)
        numbers = {key: value and float(f"{value:.3g}") for key, value in vars(rates).items()}
        lines.append(json.dumps({"card": name, "precision": precision, **numbers}))
    return lines


@click.command()
@click.option("--data", type=click.Path(path_type=Path), default=DEFAULT_DATA, help="Folder with layer_times.csv.")
@click.option("--fit", is_flag=True, help="Print newly fitted rates instead.")
@click.option("--docs", is_flag=True, help="Write the table into docs/simulator.md.")
def main(data: Path, fit: bool, docs: bool) -> None:
    """Judge the simulator by public layer times."""
    if not (data / "layer_times.csv").exists():
        raise click.ClickException(f"no layer_times.csv in {data}; give its folder by --data")
    rows = read_rows(data)
    if fit:
        click.echo("\n".join(fit_all(rows)))
        return
    text, _ = report(rows)
    click.echo(text)
    if docs:
        page = ROOT / "docs" / "simulator.md"
        head, _, rest = page.read_text().partition(MARK)
        _, _, tail = rest.partition("<!-- end of accuracy -->")
        page.write_text(f"{head}{MARK}{text}\n<!-- end of accuracy -->{tail}")


if __name__ == "__main__":
    main()

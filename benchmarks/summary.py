"""The results in one table for the README, out of what equal_ranks.py and unlike_ranks.py have measured.

python -m benchmarks.summary --write README.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.common import ROOT, interval_text, markdown_table, write_between_markers

RESULTS = ROOT / "benchmarks" / "results"
EQUAL = {"model": "gpt-s", "ranks": 2, "precision": "fp32", "optimizer": "foreach", "micro_batch_size": 4}
UNLIKE = {"model": "gpt-xs", "shares": [1.0, 0.3], "global_batch_size": 64, "precision": "fp32"}
STAGES = range(4)


def find(records: Sequence[Mapping[str, Any]], wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the record of the configuration that has the ``wanted`` entries.

    Raises:
        ClickException: it has not been measured.
    """
    for record in records:
        if all(record["configuration"].get(key) == value for key, value in wanted.items()):
            return record
    raise click.ClickException(f"no results of {dict(wanted)}; run the benchmark with --out first")


def cell(record: Mapping[str, Any], system: str, key: str) -> str:
    """Return a system's figure with its interval and, where it is a comparison with a peer, the peer."""
    row = next((row for row in record["rows"] if row["system"] == system), None)
    if row is None:
        return "-"
    peer = f" {row['best_peer']}" if key == "over_best_peer" else ""
    return interval_text(row[key]) + peer


def summary(equal: Sequence[Mapping[str, Any]], unlike: Sequence[Mapping[str, Any]]) -> str:
    """Return the table."""
    one, four = (find(equal, {**EQUAL, "accumulation": number}) for number in (1, 4))
    shares = find(unlike, UNLIKE)
    header = (
        "stage",
        "equal ranks: step over no communication",
        "over the best peer",
        "the same through sockets",
        "4 micro-batches: over the best peer",
        "unlike ranks: share of the ideal",
        "throughput over the best peer",
    )
    rows = [
        (
            str(stage),
            cell(one, f"poplar-z{stage}", "over_local"),
            cell(one, f"poplar-z{stage}", "over_best_peer"),
            cell(one, f"poplar-z{stage}-gloo", "over_best_peer"),
            cell(four, f"poplar-z{stage}", "over_best_peer"),
            cell(shares, f"poplar-z{stage}", "share_of_ideal"),
            cell(shares, f"poplar-z{stage}", "over_best_peer"),
        )
        for stage in STAGES
    ]
    about = one["machine"]
    where = f"{about['gpu'] or about['cpu']}, {about['cores']} cores; {about['system']}, torch {about['torch']}."
    return f"{markdown_table(header, rows)}\n\n{where}"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--write", multiple=True, type=click.Path(path_type=Path), help="Documents that get the table.")
def main(write: Sequence[Path]) -> None:
    """Put the results that there are into one table."""
    read = {
        name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["runs"]
        for name in ("equal_ranks", "unlike_ranks")
    }
    text = summary(read["equal_ranks"], read["unlike_ranks"])
    click.echo(text)
    for path in write:
        write_between_markers(path, "summary", text)


if __name__ == "__main__":
    main()

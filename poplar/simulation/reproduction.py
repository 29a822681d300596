"""The paper's three clusters, simulated: ``poplar simulate --preset paper``.

The paper (arXiv:2408.12596) says in its abstract: three clusters of six kinds of GPU, 1.02 to 3.92 times the throughput
of other systems for unlike cards. Which cards share a cluster is known from public summaries; how many there are, how
they are wired and how long samples are is ASSUMED here, and the page says so. Its text is written by
``simulation/reproduction_page.py``, its pictures are drawn by ``simulation/pictures.py``, both from the records below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from poplar.config import STRATEGIES, ZERO_STAGES
from poplar.simulation.interconnect import Interconnect
from poplar.simulation.model_spec import ModelSpec
from poplar.simulation.step_model import Cluster
from poplar.simulator import SimulatedRun, batch_of_tokens, best_run, simulate, split_by_speed

PAPER_LOW, PAPER_HIGH = 1.02, 3.92
"""From the abstract of arXiv:2408.12596."""
CARDS_OF_A_KIND = 4
"""Assumed."""
CLUSTERS = {
    "A": ("a100-80g", "a100-40g"),
    "B": ("v100-16g", "t4-16g"),
    "C": ("a800-80g", "v100s-32g"),
}
MODELS = ("llama-0.5b", "llama-1.1b", "bert-1.1b")
"""The presets' sequence lengths: 2048 for Llama, 512 for BERT; assumed."""
SWEEP_MODEL = "llama-1.1b"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cluster, model and stage."""

    cluster: str
    model: str
    zero_stage: int
    runs: tuple[SimulatedRun, ...]
    """One a strategy."""
    weak_tokens_per_s: float
    """The weaker kind of card alone, at this stage; 0 where the model does not fit it."""
    strong_tokens_per_s: float

    def run(self, strategy: str) -> SimulatedRun:
        return next(run for run in self.runs if run.strategy == strategy)

    def speed(self, strategy: str) -> float:
        """Return tokens per second; 0 where it does not fit."""
        return self.run(strategy).tokens_per_s

    def gain(self, over: str, strategy: str = "poplar") -> float | None:
        """Return how many times as fast ``strategy`` is; None where one of both does not fit."""
        return self.speed(strategy) / self.speed(over) if self.speed(over) and self.speed(strategy) else None


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One cluster of the sweep over numbers of cards: each strategy at its own best stage."""

    fixed: str
    added: str
    num_added: int
    tokens_per_s: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """Everything that the page tells."""

    link: Interconnect
    global_tokens: int
    cells: tuple[Cell, ...]
    sweep: tuple[SweepPoint, ...]

    def gains(self, over: str, strategy: str = "poplar") -> list[tuple[float, Cell]]:
        """Return the gains of all cells in which both fit, largest first."""
        found = [(cell.gain(over, strategy), cell) for cell in self.cells]
        return sorted(((gain, cell) for gain, cell in found if gain is not None), key=lambda pair: -pair[0])

    def to_text(self) -> str:
        """Return the page."""
        from poplar.simulation.reproduction_page import page

        return page(self)

    def to_dict(self) -> dict[str, Any]:
        cells = [
            {
                "cluster": cell.cluster,
                "model": cell.model,
                "zero_stage": cell.zero_stage,
                "weak_tokens_per_s": cell.weak_tokens_per_s,
                "strong_tokens_per_s": cell.strong_tokens_per_s,
                "runs": [run.to_dict() for run in cell.runs],
            }
            for cell in self.cells
        ]
        return {"global_tokens": self.global_tokens, "cells": cells, "sweep": [vars(point) for point in self.sweep]}


def reproduce(*, link: Interconnect | None = None, global_tokens: int = 2_000_000) -> Reproduction:
    """Simulate the three clusters with every model, stage and strategy, and the sweep over numbers of cards."""
    link = link or Interconnect()
    cells = [
        cell
        for name, kinds in CLUSTERS.items()
        for model in MODELS
        for cell in _cells(name, _cluster([(kind, CARDS_OF_A_KIND) for kind in kinds], link), model, global_tokens)
    ]
    strong, weak = CLUSTERS["C"]
    sweep = [
        _sweep_point(fixed, added, count, link, global_tokens)
        for fixed, added in ((weak, strong), (strong, weak))
        for count in range(CARDS_OF_A_KIND + 1)
    ]
    return Reproduction(link=link, global_tokens=global_tokens, cells=tuple(cells), sweep=tuple(sweep))


def _cluster(counts: Sequence[tuple[str, int]], link: Interconnect) -> Cluster:
    return Cluster(names=tuple(name for name, count in counts for _ in range(count)), link=link)


def _cells(name: str, cluster: Cluster, model: str, global_tokens: int) -> list[Cell]:
    spec = ModelSpec.preset(model)
    batch = batch_of_tokens(global_tokens, spec)
    runs = simulate(cluster, spec, batch)
    parts = split_by_speed(cluster)
    assert parts is not None
    # The precision of the whole cluster, so that the strong cards alone do not change it.
    precision = next((run.plan.precision for run in runs if run.plan is not None), "auto")
    alone = [simulate(part, spec, batch, strategies=("exact",), precision=precision) for part in parts]
    return [
        Cell(
            cluster=name,
            model=model,
            zero_stage=stage,
            runs=tuple(run for run in runs if run.zero_stage == stage),
            weak_tokens_per_s=alone[0][index].tokens_per_s,
            strong_tokens_per_s=alone[1][index].tokens_per_s,
        )
        for index, stage in enumerate(ZERO_STAGES)
    ]


def _sweep_point(fixed: str, added: str, count: int, link: Interconnect, global_tokens: int) -> SweepPoint:
    spec = ModelSpec.preset(SWEEP_MODEL)
    cluster = _cluster([(fixed, CARDS_OF_A_KIND), (added, count)], link)
    runs = simulate(cluster, spec, batch_of_tokens(global_tokens, spec), precision="fp16")
    best = {strategy: best_run(runs, strategy) for strategy in STRATEGIES}
    speeds = {strategy: run.tokens_per_s if run is not None else 0.0 for strategy, run in best.items()}
    return SweepPoint(fixed=fixed, added=added, num_added=count, tokens_per_s=speeds)

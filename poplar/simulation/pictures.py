"""Pictures of simulated runs. Needs matplotlib (extra ``plot``), imported when something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from poplar.config import STRATEGIES, ZERO_STAGES
from poplar.pictures import new_figure, save_figure
from poplar.simulator import SimulatedRun, describe_cluster

if TYPE_CHECKING:
    from poplar.simulation.reproduction import Reproduction

_COLORS = {"exact": "#1b6ca8", "poplar": "#4aa3df", "flops": "#e0a030", "equal": "#9a9a9a"}


def draw_runs(runs: Sequence[SimulatedRun], path: Path) -> None:
    """Draw tokens per second by stage and strategy; what does not fit has no bar.

    Raises:
        ConfigError: matplotlib is missing, or it does not know the file's ending.
    """
    figure, axes = new_figure(1, 1, (7.0, 4.0))
    strategies = list(dict.fromkeys(run.strategy for run in runs))
    stages = sorted({run.zero_stage for run in runs})
    for position, strategy in enumerate(strategies):
        speeds = {run.zero_stage: run.tokens_per_s / 1e3 for run in runs if run.strategy == strategy}
        places = [
            index + (position - (len(strategies) - 1) / 2) * 0.8 / len(strategies) for index in range(len(stages))
        ]
        axes.bar(
            places, [speeds[s] for s in stages], 0.8 / len(strategies), label=strategy, color=_COLORS.get(strategy)
        )
    axes.set_xticks(range(len(stages)), [f"stage {stage}" for stage in stages])
    axes.set_ylabel("thousand tokens/s, simulated")
    axes.set_title(f"{runs[0].spec.name} on {describe_cluster(runs[0].cluster.names)}", fontsize=10)
    axes.legend(frameon=False)
    save_figure(figure, path)


def draw_gains(paper: Reproduction, path: Path) -> None:
    """Draw the gain of "poplar" over "equal" and "flops" by cluster, model and stage."""
    clusters = list(dict.fromkeys(cell.cluster for cell in paper.cells))
    models = list(dict.fromkeys(cell.model for cell in paper.cells))
    figure, all_axes = new_figure(1, len(clusters), (10.0, 3.6), sharey=True)
    for axes, cluster in zip(all_axes, clusters, strict=True):
        for column, over in enumerate(("equal", "flops")):
            cells = [cell for model in models for cell in paper.cells if (cell.cluster, cell.model) == (cluster, model)]
            places = [index + index // len(ZERO_STAGES) * 0.6 + column * 0.4 for index in range(len(cells))]
            gains = [cell.gain(over) or 0.0 for cell in cells]
            axes.bar(places, gains, 0.4, label=f"over {over}", color=_COLORS[over])
        centers = [(1.5 + index * 4.6, model) for index, model in enumerate(models)]
        axes.set_xticks([center for center, _ in centers], [model for _, model in centers], fontsize=8)
        axes.axhline(1.0, color="black", linewidth=0.6)
        axes.set_title(f"cluster {cluster}: bars are stages 0 to 3", fontsize=9)
    all_axes[0].set_ylabel("times as fast, simulated")
    all_axes[0].legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def draw_sweep(paper: Reproduction, path: Path) -> None:
    """Draw the speed of every strategy over the number of added cards."""
    kinds = list(dict.fromkeys((point.fixed, point.added) for point in paper.sweep))
    figure, all_axes = new_figure(1, len(kinds), (9.0, 3.6), sharey=True)
    for axes, (fixed, added) in zip(all_axes, kinds, strict=True):
        points = [point for point in paper.sweep if (point.fixed, point.added) == (fixed, added)]
        for strategy in reversed(STRATEGIES):
            speeds = [point.tokens_per_s[strategy] / 1e3 for point in points]
            axes.plot(
                [point.num_added for point in points], speeds, marker="o", label=strategy, color=_COLORS[strategy]
            )
        axes.set_xticks([point.num_added for point in points])
        axes.set_xlabel(f"{added} cards added to 4 x {fixed}")
    all_axes[0].set_ylabel("thousand tokens/s, simulated")
    all_axes[0].legend(frameon=False, fontsize=8)
    save_figure(figure, path)

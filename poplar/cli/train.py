"""``poplar train``: profile, plan and train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from poplar.cli.options import (
    DEFAULT_RECIPE,
    MicroBatchSizes,
    PlanFile,
    cluster_options,
    recipe_argument,
    settle,
    stage_options,
    strategy_option,
)
from poplar.fit_config import new_run_dir

if TYPE_CHECKING:
    from poplar.fit_config import FitConfig


@click.command()
@recipe_argument
@click.option("--steps", type=click.IntRange(min=1), help="Optimizer steps.  [default: one epoch]")
@click.option("--epochs", type=click.IntRange(min=1), help="Passes over the data set.")
@stage_options
@strategy_option
@click.option("--micro-batch-sizes", type=MicroBatchSizes(), help="Own batches by rank, as 3,5 or 3+3,5.")
@click.option("--plan", type=PlanFile(), help="Plan made before by `poplar plan --out`.")
@cluster_options
@click.option("--max-grad-norm", type=click.FloatRange(min=0, min_open=True), help="Clip the global gradient norm.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of weights, order and dropout.")
@click.option("--eval-every", type=click.IntRange(min=1), help="Steps between held-out losses.  [default: at the end]")
@click.option(
    "--compare-steps",
    type=click.IntRange(min=0),
    default=6,
    show_default=True,
    help="Steps cut as the equal split would, to measure the plan's gain.",
)
@click.option("--num-workers", type=click.IntRange(min=0), default=0, show_default=True, help="Loaders of each rank.")
@click.option("--run-dir", type=click.Path(file_okay=False), help="Where the run is recorded.  [default: runs/TIME]")
@click.option("--progress/--no-progress", default=True, help="Show plan, progress and closing table.")
def train(recipe: str | None, nproc: int | None, **values: Any) -> None:
    """Train RECIPE, a `module:name` or `file.py:name`.

    Every card is profiled, the fastest ZeRO stage and the batches of every rank are chosen, and the model is trained.
    Without RECIPE a small GPT learns bytes of the Python standard library; without a GPU, on emulated cards.

    Under torchrun or Slurm the ranks are there already, and --nproc is not looked at.
    """
    if recipe is None and values["steps"] is None and values["epochs"] is None:
        from poplar.recipes.bytes_gpt import BytesGptConfig

        values["steps"] = BytesGptConfig().total_steps
    values["run_dir"] = values["run_dir"] or new_run_dir()
    config, num_ranks = settle(values, recipe, nproc)

    from poplar.launch import run_ranks
    from poplar.recipe_loading import load_recipe

    reference = recipe or DEFAULT_RECIPE
    load_recipe(reference)  # one that cannot be loaded is refused before any rank starts
    run_ranks(train_rank, num_ranks, reference, config)


def train_rank(reference: str, config: FitConfig) -> None:
    """Train on one rank. Collective."""
    from poplar.recipe_loading import load_recipe
    from poplar.training import fit, leave

    result = fit(load_recipe(reference), config)
    if reference == DEFAULT_RECIPE and config.progress and result.engine.comm.rank == 0:
        from poplar.recipes.bytes_gpt import BytesGptConfig, read_text, unigram_entropy

        entropy = unigram_entropy(read_text(BytesGptConfig().max_text_bytes)[1])
        click.echo(
            f"byte-unigram entropy of the held-out text: {entropy:.4f}, what a model without context could reach"
        )
    leave(result.engine.comm)

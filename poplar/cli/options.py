"""Options that several commands share; each mirrors a field of ``FitConfig``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from poplar.config import PRECISIONS, STRATEGIES, ZERO_STAGES
from poplar.errors import ConfigError
from poplar.fit_config import FitConfig, parse_micro_batch_sizes
from poplar.plan import Plan

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_RECIPE = "poplar.recipes.bytes_gpt:recipe"
DEFAULT_CLUSTER = "v100-16g:2,t4-16g:2"
"""Emulated where there is no GPU and nothing else is said."""
DEFAULT_GLOBAL_BATCH_SIZE = 64
"""Of the default recipe; for another one the batch is the user's choice."""


class ZeroStage(click.ParamType):
    """ "auto", or a stage as an integer."""

    name = "auto|0|1|2|3"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "auto" or value in ZERO_STAGES:
            return value
        if value in map(str, ZERO_STAGES):
            return int(value)
        self.fail(f"{value!r} is not one of auto, 0, 1, 2, 3", param, ctx)


class MicroBatchSizes(click.ParamType):
    """A list by rank, "3,5" or "[24,12]"."""

    name = "list"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return parse_micro_batch_sizes(value) if isinstance(value, str) else value
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class PlanFile(click.ParamType):
    """A plan in JSON."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Plan:
        return Plan.load(value) if isinstance(value, str) else value


class Fractions(click.ParamType):
    """A list of numbers by rank, "0.15,1.0"; one number stands for all ranks."""

    name = "list"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            return tuple(float(part) for part in value.split(",")) if isinstance(value, str) else value
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers, as 0.15,1.0", param, ctx)


def recipe_argument(command: Command) -> Command:
    """Add RECIPE: ``module:name`` or ``file.py:name``."""
    return click.argument("recipe", default=None, required=False)(command)


def cluster_options(command: Command) -> Command:
    """Add what says which ranks there are."""
    options = (
        click.option(
            "--nproc",
            type=click.IntRange(min=1),
            help="Ranks to start here.  [default: one a GPU or emulated card]",
        ),
        click.option("--emulate", metavar="CARDS", help=f"Let CPU ranks stand for cards, as {DEFAULT_CLUSTER!r}."),
        click.option(
            "--memory-fraction",
            "memory_fractions",
            type=Fractions(),
            help="Share of its memory that each rank may use.",
        ),
        click.option(
            "--backend", type=click.Choice(["nccl", "gloo"]), help="Library of the collectives.  [default: by device]"
        ),
    )
    return _apply(options, command)


def stage_options(command: Command) -> Command:
    """Add what a profile depends on."""
    options = (
        click.option("--global-batch-size", type=click.IntRange(min=1), help="Samples of a step, over all ranks."),
        click.option("--zero-stage", type=ZeroStage(), default="auto", show_default=True, help="ZeRO stage."),
        click.option(
            "--precision",
            type=click.Choice(PRECISIONS),
            default="fp32",
            show_default=True,
            help="Of the computation.",
        ),
        click.option(
            "--reuse",
            is_flag=True,
            help="Take earlier profiles where nothing that matters has changed, and keep new ones.",
        ),
        click.option("--refresh", is_flag=True, help="Measure anew, and keep the profiles for --reuse."),
    )
    return _apply(options, command)


def strategy_option(command: Command) -> Command:
    """Add how the batch is split."""
    choice = click.Choice(STRATEGIES)
    return click.option("--strategy", type=choice, default="exact", show_default=True, help="How the batch is split.")(
        command
    )


def _apply(options: tuple[Callable[[Command], Command], ...], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def settle_batch(values: dict[str, Any], recipe: str | None) -> None:
    """Settle the global batch size from the plan, from batches given by hand, or from the default recipe."""
    if values.get("global_batch_size") is not None:
        return
    if values.get("plan") is not None:
        values["global_batch_size"] = values["plan"].global_batch_size
    elif values.get("micro_batch_sizes") is not None:
        values["global_batch_size"] = sum(map(sum, values["micro_batch_sizes"]))
    elif recipe is None:
        values["global_batch_size"] = DEFAULT_GLOBAL_BATCH_SIZE
    else:
        raise click.UsageError("a recipe of your own needs --global-batch-size", click.get_current_context())


def settle_ranks(values: dict[str, Any], recipe: str | None, nproc: int | None) -> int:
    """Return how many ranks to start; set ``emulate`` where the default cluster stands in for GPUs.

    Raises:
        ConfigError, PlanMismatchError: lists by rank that are not as long as there are ranks.
    """
    import torch

    from poplar.catalog import parse_cluster
    from poplar.zero.comm import launcher_environment

    launcher = launcher_environment()
    num_cards = torch.cuda.device_count()
    if launcher is not None:
        return int(launcher["WORLD_SIZE"])
    if values.get("emulate") is not None:
        return nproc or len(parse_cluster(values["emulate"]))
    if nproc is not None:
        return nproc
    if num_cards:
        return num_cards
    plan: Plan | None = values.get("plan")
    if plan is not None:
        return plan.world_size
    if values.get("micro_batch_sizes") is not None:
        return len(values["micro_batch_sizes"])
    if recipe is None:
        values["emulate"] = DEFAULT_CLUSTER
        return len(parse_cluster(DEFAULT_CLUSTER))
    return 1


def settle(values: dict[str, Any], recipe: str | None, nproc: int | None) -> tuple[FitConfig, int]:
    """Return the settings and how many ranks to start; refused here if they cannot be, before any rank starts."""
    settle_batch(values, recipe)
    num_ranks = settle_ranks(values, recipe, nproc)
    config = FitConfig(**values, recipe=recipe or DEFAULT_RECIPE)
    config.check_world_size(num_ranks)
    return config, num_ranks


def show(text: str) -> None:
    """Print once: under a launcher every rank comes here, and rank 0 speaks."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        click.echo(text)

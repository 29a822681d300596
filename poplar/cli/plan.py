"""``poplar plan``: choose each rank's batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from poplar.cli.options import (
    DEFAULT_RECIPE,
    cluster_options,
    recipe_argument,
    settle,
    settle_batch,
    show,
    stage_options,
    strategy_option,
)
from poplar.errors import ConfigError
from poplar.plan import ClusterProfile, profile_of
from poplar.tables import describe_plan


@click.command()
@recipe_argument
@stage_options
@strategy_option
@cluster_options
@click.option(
    "--profile",
    "profile_files",
    type=click.Path(dir_okay=False),
    multiple=True,
    help="Plan from files of `poplar profile`, one a stage, instead of measuring; needs no torch.",
)
@click.option("--out", type=click.Path(dir_okay=False), help="Write the plan here, for `poplar train --plan`.")
@click.option("--explain", is_flag=True, help="Tell for every stage whether it fits, its step time and its parts.")
def plan(
    recipe: str | None,
    nproc: int | None,
    profile_files: tuple[str, ...],
    out: str | None,
    explain: bool,
    **values: Any,
) -> None:
    """Choose the ZeRO stage and the batches of every rank for RECIPE, and show what they are predicted to give."""
    if profile_files:
        settle_batch(values, recipe)
        profiles = [_read_profile(name) for name in profile_files]
    else:
        from poplar.cli.profile import measure

        config, num_ranks = settle(values, recipe, nproc)
        profiles = measure(recipe or DEFAULT_RECIPE, config, num_ranks)
    from poplar.allocator import choose_outcome
    from poplar.allocator import explain as explain_stages

    outcomes = explain_stages(
        profiles, values["global_batch_size"], values["strategy"], zero_stage=values["zero_stage"]
    )
    chosen = choose_outcome(outcomes)
    if out is not None:
        chosen.save(out)
    show(describe_plan(chosen, profile_of(chosen, profiles)))
    if explain:
        show("\n" + "\n".join(outcome.describe() for outcome in outcomes))


def _read_profile(name: str) -> ClusterProfile:
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the profile {name!r}: {error}") from error
    return ClusterProfile.from_json(text)

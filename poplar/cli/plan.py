"""``poplar plan``: choose each rank's batches, and on request train by them to see whether the prediction holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from poplar.planning.record import StepRecord
from poplar.tables import describe_plan

if TYPE_CHECKING:
    from poplar.fit_config import FitConfig


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
@click.option(
    "--measure",
    "num_steps",
    type=click.IntRange(min=0),
    default=0,
    metavar="STEPS",
    help="Train so many steps by the plan, and compare them with its prediction.",
)
@click.option("--explain", is_flag=True, help="Tell for every stage whether it fits, its step time and its parts.")
def plan(
    recipe: str | None,
    nproc: int | None,
    profile_files: tuple[str, ...],
    out: str | None,
    num_steps: int,
    explain: bool,
    **values: Any,
) -> None:
    """Choose the ZeRO stage and the batches of every rank for RECIPE, and show what they are predicted to give."""
    record: StepRecord | None = None
    if profile_files:
        if num_steps:
            raise click.UsageError(
                "--measure trains on the cards at hand, and does not go with --profile", click.get_current_context()
            )
        settle_batch(values, recipe)
        profiles = [_read_profile(name) for name in profile_files]
    else:
        from poplar.cli.profile import measure

        config, num_ranks = settle(values, recipe, nproc)
        if num_steps:
            profiles, record = measure_plan(recipe or DEFAULT_RECIPE, config, num_ranks, num_steps)
        else:
            profiles = measure(recipe or DEFAULT_RECIPE, config, num_ranks, to_plan=True)
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
        taken = (chosen.zero_stage, chosen.shard_ratios)
        show(
            "\n"
            + "\n".join(
                ("taken: " if one.plan and (one.zero_stage, one.plan.shard_ratios) == taken else "") + one.describe()
                for one in outcomes
            )
        )
    if record is not None:
        show("\n" + "\n".join(record.lines()))


def measure_plan(
    reference: str, config: FitConfig, num_ranks: int, num_steps: int
) -> tuple[list[ClusterProfile], StepRecord]:
    """Start the ranks, profile, and train by the plan; return the profiles and what ``num_steps`` steps were like.

    All in one start of the ranks, as ``fit`` does it: a launcher's ranks can join only once.
    """
    from poplar.launch import run_ranks
    from poplar.recipe_loading import load_recipe

    load_recipe(reference)  # one that cannot be loaded is refused before any rank starts
    profiles, record = run_ranks(plan_rank, num_ranks, reference, config, num_steps)
    return [ClusterProfile.from_json(text) for text in profiles], StepRecord.from_json(record)


def plan_rank(reference: str, config: FitConfig, num_steps: int) -> tuple[list[str], str]:
    """Profile, plan and train on one rank; return the profiles and the record as JSON. Collective."""
    from poplar.profiler import plan_together
    from poplar.recipe_loading import load_recipe
    from poplar.training import fit, join, leave, profile_stages

    recipe = load_recipe(reference)
    comm, device = join(config)
    profiles = profile_stages(recipe, config, comm, device, to_plan=True)
    chosen = plan_together(comm, profiles, config.global_batch_size, config.strategy)
    # A step is measured from the end of the one before, so that the first is not.
    result = fit(recipe, replace(config, plan=chosen, steps=num_steps + 1, progress=False))
    leave(result.engine.comm)
    if result.record is None:
        raise ConfigError(f"no whole global batch was among {num_steps} steps; give --measure more")
    return [measured.to_json() for measured in profiles], result.record.to_json()


def _read_profile(name: str) -> ClusterProfile:
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the profile {name!r}: {error}") from error
    return ClusterProfile.from_json(text)

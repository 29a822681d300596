"""``poplar profile``: measure each card."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from poplar.cli.options import (
    DEFAULT_RECIPE,
    cluster_options,
    recipe_argument,
    settle,
    show,
    stage_options,
)
from poplar.plan import ClusterProfile, write_text_atomically
from poplar.tables import profile_table

if TYPE_CHECKING:
    from poplar.fit_config import FitConfig


@click.command()
@recipe_argument
@stage_options
@cluster_options
@click.option(
    "--out",
    type=click.Path(dir_okay=False),
    default="profile.json",
    show_default=True,
    help="File to write; of several stages one file each, as profile.z2.json.",
)
def profile(recipe: str | None, nproc: int | None, out: str, **values: Any) -> None:
    """Measure RECIPE on every card: time and memory by batch size, and the collectives.

    The files are what `poplar plan --profile` reads, on any machine, without torch.
    """
    config, num_ranks = settle(values, recipe, nproc)
    profiles = measure(recipe or DEFAULT_RECIPE, config, num_ranks)
    for measured in profiles:
        stem, suffix = os.path.splitext(out)
        path = out if len(profiles) == 1 else f"{stem}.z{measured.zero_stage}{suffix}"
        write_text_atomically(path, measured.to_json())
        show(f"ZeRO stage {measured.zero_stage}, {measured.precision}: {path}\n{profile_table(measured)}\n")
        if measured.notes:
            show("".join(f"- {note}\n" for note in measured.notes))


def measure(reference: str, config: FitConfig, num_ranks: int, to_plan: bool = False) -> list[ClusterProfile]:
    """Start the ranks and profile the stages that ``config`` leaves open; the same on every rank under a launcher.

    Args:
        to_plan: with uneven shards too, where they promise to be faster.
    """
    from poplar.launch import run_ranks
    from poplar.recipe_loading import load_recipe

    load_recipe(reference)  # one that cannot be loaded is refused before any rank starts
    return [ClusterProfile.from_json(text) for text in run_ranks(profile_rank, num_ranks, reference, config, to_plan)]


def profile_rank(reference: str, config: FitConfig, to_plan: bool) -> list[str]:
    """Profile on one rank; return the profiles as JSON. Collective."""
    from poplar.recipe_loading import load_recipe
    from poplar.training import join, leave, profile_stages

    comm, device = join(config)
    profiles = profile_stages(load_recipe(reference), config, comm, device, to_plan)
    leave(comm)
    return [measured.to_json() for measured in profiles]

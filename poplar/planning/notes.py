"""What a plan wants said: smoothed curves, wishes without effect, cards without samples, cards better left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from poplar.curve import curve_of
from poplar.plan import ClusterProfile
from poplar.planning.cost import Kind, Row, group_ranks, predict
from poplar.planning.exact import exact_rows

MIN_LEAVING_OUT_GAIN = 0.01
"""Share of a step below which leaving a card out is not worth a word."""


def curve_notes(profile: ClusterProfile, kinds: Sequence[Kind]) -> list[str]:
    with_samples = sorted(rank for kind in kinds for rank in kind.ranks)
    grouped = group_alike(profile, with_samples, lambda rank: curve_of(profile.ranks[rank]).note)
    return [f"{rank_names(profile, ranks)}: {note}" for note, ranks in grouped if note]


def bound_notes(profile: ClusterProfile, bounds: Sequence[int | None]) -> list[str]:
    idle = [
        index
        for index, (rank, bound) in enumerate(zip(profile.ranks, bounds, strict=True))
        if bound is not None and bound > rank.max_micro_batch_size
    ]
    if not idle:
        return []
    return [f"max_micro_batch_size has no effect on {rank_names(profile, idle)}: less than that fits there"]


def idle_notes(profile: ClusterProfile, rows: Sequence[Row], limits: Sequence[int], step_s: float) -> list[str]:
    """Say who gets no samples, and why.

    Args:
        limits: the largest micro-batch by rank, wishes included.
    """
    idle = [rank for rank, row in enumerate(rows) if not any(row)]
    notes = []
    for (points, limit), ranks in group_alike(profile, idle, lambda rank: (profile.ranks[rank].points, limits[rank])):
        if not points:
            why = "no batch fits there, only its part of the model state"
        elif limit == 0:
            why = "max_micro_batch_size says so"
        else:
            seconds = curve_of(profile.ranks[ranks[0]]).seconds(1)
            why = f"one sample takes {seconds:.4g} s there, the whole step {step_s:.4g} s"
        notes.append(
            f"no samples for {rank_names(profile, ranks)}: {why}; a group without would be spared its collectives, "
            "if the others have room for its model state"
        )
    return notes


def leaving_out_notes(
    profile: ClusterProfile, limits: Sequence[int], step_s: float, global_batch_size: int
) -> list[str]:
    """Say whether the group would be faster without the ranks whose optimizer step all others wait for.

    Nobody else is worth leaving out: a slow rank may be given nothing, and then costs no compute. Shards of the ranks
    left out go to the others, whose optimizer steps grow by that. The collectives are priced as before, since what a
    smaller group saves there was not measured.
    """
    times_s = sorted({rank.optimizer_step_s for rank in profile.ranks})
    slowest_s = times_s[-1]
    # Those above the widest gap are apart from the rest; cutting elsewhere would be cutting noise.
    below_gap_s = max(pairwise(times_s), key=lambda pair: pair[1] - pair[0], default=(math.nan,))[0]
    left = [rank for rank, measured in enumerate(profile.ranks) if measured.optimizer_step_s <= below_gap_s]
    if not any(limits[rank] for rank in left):
        return []
    held = profile.shard_ratios or (1 / profile.world_size,) * profile.world_size
    share_left = sum(held[rank] for rank in left) if profile.zero_stage >= 1 else 1.0
    if share_left <= 0:
        return []
    ranks = tuple(
        replace(profile.ranks[rank], optimizer_step_s=profile.ranks[rank].optimizer_step_s / share_left)
        for rank in left
    )
    if slowest_s - max(rank.optimizer_step_s for rank in ranks) < MIN_LEAVING_OUT_GAIN * step_s:
        return []
    smaller = replace(profile, ranks=ranks, shard_ratios=None)
    kinds = group_ranks(smaller, [limits[rank] for rank in left])
    without_s = predict(smaller, exact_rows(smaller, kinds, global_batch_size)).step_s
    if without_s > (1 - MIN_LEAVING_OUT_GAIN) * step_s:
        return []
    out = sorted(set(range(profile.world_size)) - set(left))
    return [
        f"leaving {rank_names(profile, out)} out of the group would be faster: {without_s:.4g} s a step instead of "
        f"{step_s:.4g} s, since all wait up to {slowest_s:.4g} s for the optimizer there (if the others have room for "
        "what it holds)"
    ]


def group_alike(
    profile: ClusterProfile, ranks: Iterable[int], key: Callable[[int], Hashable]
) -> list[tuple[Any, list[int]]]:
    """Return (key, ranks) for ranks of the same card and key, in the order of their first."""
    groups: dict[tuple[str, Hashable], list[int]] = {}
    for rank in ranks:
        groups.setdefault((profile.ranks[rank].device, key(rank)), []).append(rank)
    return [(value, members) for (_, value), members in groups.items()]


def rank_names(profile: ClusterProfile, ranks: Sequence[int]) -> str:
    devices = dict.fromkeys(profile.ranks[rank].device for rank in ranks)
    return f"{listed('rank', ranks)} ({', '.join(devices)})"


def listed(noun: str, numbers: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    return f"{noun}{'s' if len(numbers) > 1 else ''} {text}"

"""Carry a measured profile over to other cards: one card at hand tells what its like and others would do together.

Times go by the cards' relative speed, memory by what each card has. It is rougher than measuring, and better than a
simulation from data sheets where model or code are unlike the simulator's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from poplar.catalog import find_card
from poplar.errors import ConfigError
from poplar.plan import ClusterProfile, RankProfile

_MEMORY_MARGIN = 0.05
"""Share of the memory left free, as measured profiles leave it (``ProfileSettings.memory_margin``)."""


def transfer_profile(measured: ClusterProfile, names: Sequence[str]) -> ClusterProfile:
    """Return the profile of the cards ``names``, as many as were measured, from rank 0's of ``measured``.

    Collectives are kept: they depend on the links, which this does not know. Device identities are dropped.

    Args:
        measured: of cards of one kind.
        names: one card a rank.

    Raises:
        ConfigError: another number of ranks, several kinds or an unknown card in ``measured``, or uneven shards.
    """
    kinds = {rank.device for rank in measured.ranks}
    if len(kinds) != 1 or measured.shard_ratios is not None:
        raise ConfigError(f"a profile of one kind of card with even shards can be carried over; got {sorted(kinds)}")
    if len(names) != measured.world_size:
        raise ConfigError(f"the profile is of {measured.world_size} ranks, {len(names)} cards are named")
    by_name = {name: _transfer_rank(measured.ranks[0], name) for name in dict.fromkeys(names)}
    return replace(measured, ranks=tuple(by_name[name] for name in names))


def _transfer_rank(measured: RankProfile, name: str) -> RankProfile:
    source, target = find_card(measured.device), find_card(name)
    slower = source.relative_speed / target.relative_speed
    limit = measured.memory_limit_bytes
    largest = measured.max_micro_batch_size
    if limit is not None:
        limit = int(limit * target.usable_memory_bytes / source.usable_memory_bytes)
        if limit != measured.memory_limit_bytes:
            largest = _largest_within(measured, limit)
    return replace(
        measured,
        device=target.name,
        device_id=None,
        points=tuple((size, seconds * slower) for size, seconds in measured.points) if largest else (),
        max_micro_batch_size=largest,
        optimizer_step_s=measured.optimizer_step_s * slower,
        memory_limit_bytes=limit,
    )


def _largest_within(measured: RankProfile, limit: int) -> int:
    """Return the largest batch within ``limit`` bytes and a margin, by a line through the least and largest peak."""
    points = measured.memory_points
    if len(points) < 2:
        return measured.max_micro_batch_size
    (first, first_peak), (last, last_peak) = points[0], points[-1]
    per_sample = max(1.0, (last_peak - first_peak) / (last - first))
    return max(0, int(first + (limit * (1 - _MEMORY_MARGIN) - first_peak) / per_sample))

"""Uneven shards: where memory limits a small card, let cards with room hold its part of the model state.

[Note: how ratios are searched] At stages 1 to 3 a rank's peak is its batch's memory plus the state it holds, so bytes
of state given away are samples gained: one for every ``slope`` bytes. Wished batches fix how much state each rank could
still hold (its room); if the rooms hold all of the state, it is dealt out as evenly as they allow, since the largest
shard sets the pace of the collectives and of the optimizer. Each wish is then priced by the strategy "exact" on the
profile as it would look with those shards. Wishes tried: what each card could do within a time t, for a range of t;
and one kind of card grown while the others keep the batches that they have now. This is a search over a family, not
over all ratios.

A suggestion rests on straight lines beyond what ran, so it is to be confirmed by profiling with ``shard_ratios``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from poplar.allocator import MIN_SHARD_GAIN, allocate, explain
from poplar.curve import fit_curve
from poplar.errors import InfeasiblePlanError
from poplar.plan import ClusterProfile, Plan, RankProfile

_NUM_TIMES = 24
_NUM_GROWTHS = 8
_MARGIN = 0.1
"""Share of the memory that a profile may have left free on purpose."""


@dataclass(frozen=True, kw_only=True)
class ShardSuggestion:
    """Shards that are predicted to make a step faster, to be confirmed by profiling with them."""

    shard_ratios: tuple[float, ...]
    step_s: float
    """Predicted with these shards."""
    even_step_s: float
    """Predicted with the shards that were profiled."""
    profile: ClusterProfile
    """The profile as it is expected with these shards."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Memory:
    """What one rank can hold."""

    held_bytes: float
    """Its shard, as profiled."""
    room_bytes: np.ndarray
    """1D, (most + 1,): bytes of shard it can hold while it runs micro-batches of up to n samples, non-increasing."""

    def largest_with(self, shard_bytes: float) -> int:
        """Return the largest micro-batch that fits beside a shard; the shard alone must fit."""
        return int(np.searchsorted(-self.room_bytes, -shard_bytes, side="right")) - 1


def suggest_shard_ratios(
    profile: ClusterProfile, global_batch_size: int, *, sharded_state_bytes: int | None = None
) -> ShardSuggestion | None:
    """Suggest shard ratios that save at least ``MIN_SHARD_GAIN`` of a step; None if there are none.

    Args:
        profile: of stage 1, 2 or 3, with memory points, state and limit of every rank.
        sharded_state_bytes: model state that is cut into shards, summed over ranks. None: as the profile says; where
            it does not, at stage 3 all that is held, and at stages 1 and 2 nothing is suggested, since the profile does
            not tell it from what every rank holds.
    """
    if sharded_state_bytes is None:
        sharded_state_bytes = profile.sharded_state_bytes
    if sharded_state_bytes is None and profile.zero_stage == 3:
        sharded_state_bytes = sum(rank.state_bytes or 0 for rank in profile.ranks)
    if profile.zero_stage == 0 or profile.world_size == 1 or not sharded_state_bytes:
        return None
    held = profile.shard_ratios or (1 / profile.world_size,) * profile.world_size
    memories = [
        _memory_of(rank, ratio * sharded_state_bytes, global_batch_size)
        for rank, ratio in zip(profile.ranks, held, strict=True)
    ]
    known = [memory for memory in memories if memory is not None]
    if len(known) < profile.world_size:
        return None
    try:
        now = allocate(profile, global_batch_size)
    except InfeasiblePlanError:
        return None  # where nothing ran there are no curves to plan with
    assert now.predicted is not None
    best: ShardSuggestion | None = None
    tried = set()
    for wishes in _wishes(profile, known, now):
        rooms = np.array([memory.room_bytes[n] for memory, n in zip(known, wishes, strict=True)])
        if rooms.sum() < sharded_state_bytes:
            continue
        shares = level_out(rooms, sharded_state_bytes)
        ratios = tuple((shares / sharded_state_bytes).tolist())
        if ratios in tried:
            continue
        tried.add(ratios)
        expected = _with_shards(profile, known, shares, held)
        try:
            predicted = allocate(expected, global_batch_size).predicted
        except InfeasiblePlanError:
            continue
        assert predicted is not None
        least_s = best.step_s if best is not None else (1 - MIN_SHARD_GAIN) * now.predicted.step_s
        if predicted.step_s < least_s:
            best = ShardSuggestion(
                shard_ratios=ratios, step_s=predicted.step_s, even_step_s=now.predicted.step_s, profile=expected
            )
    return best


def best_suggestion(profiles: Sequence[ClusterProfile], global_batch_size: int) -> ShardSuggestion | None:
    """Return the suggestion for the stage that it makes fastest, if it beats every profile by ``MIN_SHARD_GAIN``.

    Raises:
        ConfigError: as ``allocate``.
    """
    planned = [outcome.step_s for outcome in explain(profiles, global_batch_size)]
    suggestions = (suggest_shard_ratios(profile, global_batch_size) for profile in profiles)
    best = min((one for one in suggestions if one is not None), key=lambda suggestion: suggestion.step_s, default=None)
    return best if best is not None and best.step_s <= (1 - MIN_SHARD_GAIN) * min(planned) else None


def _memory_of(rank: RankProfile, held_bytes: float, global_batch_size: int) -> _Memory | None:
    """Return None where the profile does not know enough."""
    if rank.state_bytes is None or rank.memory_limit_bytes is None:
        return None
    maximum = rank.max_micro_batch_size
    if maximum == 0:
        # Not even one sample ran, so nobody knows of room for more than it holds.
        return _Memory(held_bytes=held_bytes, room_bytes=np.array([held_bytes]))
    if not rank.memory_points:
        return None
    slope = _bytes_per_sample(rank.memory_points, rank.state_bytes)
    sizes, peaks = np.array(rank.memory_points, dtype=float).T
    ran = np.arange(maximum + 1)
    # Below the smallest measured size its peak counts: buffers that are there with any batch are not known apart.
    peak_bytes = np.interp(ran, sizes, peaks) + slope * np.maximum(ran - sizes[-1], 0)
    # What ran beside its shard has room for it, though it may have used a margin that the limit leaves.
    room_bytes = held_bytes + np.maximum(rank.memory_limit_bytes - np.maximum.accumulate(peak_bytes), 0.0)
    # One sample more than the maximum did not fit. Where the limit says it should have, what is left is not to be had.
    left_bytes = room_bytes[-1] - held_bytes
    if left_bytes > 2 * slope + _MARGIN * rank.memory_limit_bytes:
        return _Memory(held_bytes=held_bytes, room_bytes=room_bytes)  # something else than memory ended the search
    gap_bytes = slope - left_bytes if left_bytes < slope else slope
    most_more = min(int(1 + (held_bytes - gap_bytes) / slope), max(0, global_batch_size - maximum))
    grown_bytes = held_bytes - gap_bytes - slope * np.arange(most_more)
    return _Memory(held_bytes=held_bytes, room_bytes=np.concatenate([room_bytes, grown_bytes]))


def _bytes_per_sample(memory_points: Sequence[tuple[int, int]], state_bytes: int) -> float:
    """Return the steepest of the last piece and of the whole: peaks are the larger of phases, so they bend upwards."""
    if len(memory_points) == 1:
        memory_points = ((0, state_bytes), *memory_points)
    sizes, peaks = np.array(memory_points, dtype=float).T
    slopes = np.diff(peaks) / np.diff(sizes)
    return max(float(slopes[-1]), float(peaks[-1] - peaks[0]) / float(sizes[-1] - sizes[0]), 1.0)


def _wishes(profile: ClusterProfile, memories: Sequence[_Memory], now: Plan) -> Iterator[list[int]]:
    """Yield the largest micro-batch wished for every rank."""
    most = [len(memory.room_bytes) - 1 for memory in memories]
    curves = [fit_curve(rank.points, n) for rank, n in zip(profile.ranks, most, strict=True)]
    times_s = np.unique(np.concatenate([curve.seconds_array()[1:] for curve in curves]))
    for time_s in times_s[np.unique(np.linspace(0, len(times_s) - 1, _NUM_TIMES).astype(int))]:
        yield [curve.largest_within(time_s) for curve in curves]
    used = [max(row.micro_batch_sizes, default=0) for row in now.ranks]
    maxima = [rank.max_micro_batch_size for rank in profile.ranks]
    kinds: dict[str, list[int]] = {}
    for rank, measured in enumerate(profile.ranks):
        kinds.setdefault(measured.device, []).append(rank)
    for ranks in kinds.values():
        room = max(most[rank] - maxima[rank] for rank in ranks)
        if room < 1:
            continue
        for more in np.unique(np.geomspace(1, room, _NUM_GROWTHS).astype(int)):
            grown = {rank: min(most[rank], maxima[rank] + int(more)) for rank in ranks}
            yield [grown.get(rank, used[rank]) for rank in range(profile.world_size)]


def level_out(rooms: np.ndarray, total: float) -> np.ndarray:
    """Deal ``total`` out so that nobody gets more than its room and the largest share is as small as can be."""
    order = np.argsort(rooms)
    shares = np.zeros(len(rooms))
    left = float(total)
    for position, index in enumerate(order):
        shares[index] = min(rooms[index], left / (len(rooms) - position))
        left -= shares[index]
    return shares


def _with_shards(
    profile: ClusterProfile, memories: Sequence[_Memory], shares: np.ndarray, held: Sequence[float]
) -> ClusterProfile:
    """Return the profile expected with these shards: batches, memory, optimizer's steps, collectives.

    Collectives are priced by the largest shard, as an all-gather of unequal parts lasts as long as its largest.
    """
    total = float(shares.sum())
    slowest_rate = max(
        rank.optimizer_step_s / ratio for rank, ratio in zip(profile.ranks, held, strict=True) if ratio > 0
    )
    ranks = []
    for rank, memory, share, ratio in zip(profile.ranks, memories, shares.tolist(), held, strict=True):
        maximum = memory.largest_with(share)
        shift = round(share - memory.held_bytes)
        rate = rank.optimizer_step_s / ratio if ratio > 0 else slowest_rate
        ranks.append(
            replace(
                rank,
                points=rank.points if maximum else (),
                max_micro_batch_size=maximum,
                optimizer_step_s=rate * share / total,
                memory_points=tuple((size, peak + shift) for size, peak in rank.memory_points),
                state_bytes=None if rank.state_bytes is None else rank.state_bytes + shift,
            )
        )
    dearer = float(max(shares)) / total / max(held)
    return replace(
        profile,
        ranks=tuple(ranks),
        micro_step_collective_s=profile.micro_step_collective_s * dearer,
        step_collective_s=profile.step_collective_s * dearer,
        shard_ratios=tuple((shares / total).tolist()),
    )

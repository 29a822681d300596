"""Uneven shards, against a cluster whose true memory and times at any ratios are known."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poplar.allocator import MIN_SHARD_GAIN, allocate
from poplar.plan import ClusterProfile, RankProfile
from poplar.planning.shards import level_out, suggest_shard_ratios


@dataclasses.dataclass(frozen=True)
class Card:
    memory_bytes: int
    sample_bytes: int
    fixed_s: float
    sample_s: float


@dataclasses.dataclass(frozen=True)
class Truth:
    """A cluster that can be "profiled" at any shard ratios, or None where a shard does not fit."""

    zero_stage: int
    cards: tuple[Card, ...]
    sharded_bytes: int
    replicated_bytes: int
    collective_s: float

    def profile(self, ratios, global_batch_size):
        ranks = []
        for card, ratio in zip(self.cards, ratios, strict=True):
            state_bytes = self.replicated_bytes + ratio * self.sharded_bytes
            maximum = min(global_batch_size, math.floor((card.memory_bytes - state_bytes) / card.sample_bytes + 1e-9))
            if maximum < 0:
                return None
            sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size < maximum] + [maximum] * (maximum > 0)
            ranks.append(
                RankProfile(
                    device="card",
                    points=tuple((size, card.fixed_s + card.sample_s * size) for size in sizes),
                    max_micro_batch_size=maximum,
                    optimizer_step_s=0.05 * ratio,
                    memory_points=tuple((size, round(state_bytes + card.sample_bytes * size)) for size in sizes),
                    state_bytes=round(state_bytes),
                    memory_limit_bytes=card.memory_bytes,
                )
            )
        dearer = max(ratios) * len(ratios)
        return ClusterProfile(
            zero_stage=self.zero_stage,
            ranks=tuple(ranks),
            micro_step_collective_s=self.collective_s * dearer,
            step_collective_s=self.collective_s * dearer,
            shard_ratios=tuple(ratios),
        )

    def step_s(self, ratios, global_batch_size):
        profile = self.profile(ratios, global_batch_size)
        if profile is None or not any(rank.max_micro_batch_size for rank in profile.ranks):
            return math.inf
        return allocate(profile, global_batch_size).predicted.step_s


SMALL_AND_LARGE = Truth(
    zero_stage=3,
    cards=(Card(8000, 500, 0.3, 0.05), Card(32000, 500, 0.3, 0.05)),
    sharded_bytes=12000,
    replicated_bytes=500,
    collective_s=0.05,
)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_a_small_card_gives_its_state_away_and_takes_larger_batches(zero_stage):
    truth = dataclasses.replace(SMALL_AND_LARGE, zero_stage=zero_stage)
    even = truth.profile((0.5, 0.5), 64)
    assert [rank.max_micro_batch_size for rank in even.ranks] == [3, 51]
    suggestion = suggest_shard_ratios(even, 64, sharded_state_bytes=12000)
    assert suggestion.shard_ratios[0] < 0.3
    assert suggestion.even_step_s == allocate(even, 64).predicted.step_s
    assert suggestion.step_s <= (1 - MIN_SHARD_GAIN) * suggestion.even_step_s
    confirmed = truth.profile(suggestion.shard_ratios, 64)
    assert allocate(confirmed, 64).predicted.step_s == pytest.approx(suggestion.step_s)
    assert allocate([even, confirmed], 64).shard_ratios == suggestion.shard_ratios
    best_s = min(truth.step_s((part / 200, 1 - part / 200), 64) for part in range(201))
    assert suggestion.step_s <= 1.01 * best_s


@st.composite
def truths(draw):
    card = st.builds(
        Card,
        st.sampled_from((8000, 16000, 32000)),
        st.sampled_from((200, 500, 900)),
        st.sampled_from((0.05, 0.3)),
        st.sampled_from((0.02, 0.05, 0.2)),
    )
    return Truth(
        zero_stage=draw(st.sampled_from((1, 2, 3))),
        cards=tuple(draw(st.lists(card, min_size=2, max_size=3))),
        sharded_bytes=draw(st.sampled_from((2000, 6000, 12000))),
        replicated_bytes=draw(st.sampled_from((0, 500, 2000))),
        collective_s=draw(st.sampled_from((0.0, 0.05, 0.5))),
    )


@settings(max_examples=40, deadline=None)
@given(truths(), st.sampled_from((16, 64)))
def test_what_is_suggested_holds_when_it_is_measured(truth, global_batch_size):
    even = truth.profile([1 / len(truth.cards)] * len(truth.cards), global_batch_size)
    if even is None or not any(rank.max_micro_batch_size for rank in even.ranks):
        return
    suggestion = suggest_shard_ratios(even, global_batch_size, sharded_state_bytes=truth.sharded_bytes)
    if suggestion is None:
        return
    assert sum(suggestion.shard_ratios) == pytest.approx(1.0) and min(suggestion.shard_ratios) >= 0
    measured = truth.profile(suggestion.shard_ratios, global_batch_size)
    for expected, found in zip(suggestion.profile.ranks, measured.ranks, strict=True):
        assert expected.max_micro_batch_size <= found.max_micro_batch_size
        assert expected.optimizer_step_s == pytest.approx(found.optimizer_step_s)
        assert expected.state_bytes == pytest.approx(found.state_bytes, abs=2)
    assert measured.step_collective_s == pytest.approx(suggestion.profile.step_collective_s)
    step_s = allocate(measured, global_batch_size).predicted.step_s
    # One measured point says nothing of fixed times, so that larger batches may turn out better than predicted.
    assert step_s <= suggestion.step_s * (1 + 1e-9)
    assert step_s <= (1 - MIN_SHARD_GAIN) * allocate(even, global_batch_size).predicted.step_s * (1 + 1e-9)


def test_nothing_is_suggested_where_nothing_is_gained_or_known():
    even = SMALL_AND_LARGE.profile((0.5, 0.5), 64)
    assert suggest_shard_ratios(dataclasses.replace(even, zero_stage=0), 64, sharded_state_bytes=12000) is None
    assert suggest_shard_ratios(dataclasses.replace(even, zero_stage=2), 64) is None
    for unknown in ({"memory_points": ()}, {"state_bytes": None}, {"memory_limit_bytes": None}):
        blind = dataclasses.replace(even, ranks=(even.ranks[0], dataclasses.replace(even.ranks[1], **unknown)))
        assert suggest_shard_ratios(blind, 64, sharded_state_bytes=12000) is None
    alike = dataclasses.replace(SMALL_AND_LARGE, cards=SMALL_AND_LARGE.cards[1:] * 2).profile((0.5, 0.5), 64)
    assert suggest_shard_ratios(alike, 64, sharded_state_bytes=12000) is None
    dear = dataclasses.replace(even, micro_step_collective_s=30.0)
    assert suggest_shard_ratios(dear, 64, sharded_state_bytes=12000) is None
    alone = dataclasses.replace(even, ranks=even.ranks[:1], shard_ratios=None)
    assert suggest_shard_ratios(alone, 64, sharded_state_bytes=12000) is None


def test_at_stage_3_all_that_is_held_is_shards():
    pure = dataclasses.replace(SMALL_AND_LARGE, replicated_bytes=0).profile((0.5, 0.5), 64)
    assert suggest_shard_ratios(pure, 64) == suggest_shard_ratios(pure, 64, sharded_state_bytes=12000)
    assert suggest_shard_ratios(pure, 64) is not None


def test_a_card_on_which_nothing_ran_takes_no_more_state():
    ranks = (RankProfile(device="card", points=(), max_micro_batch_size=0, state_bytes=6000, memory_limit_bytes=99000),)
    even = SMALL_AND_LARGE.profile((0.5, 0.5), 64)
    profile = dataclasses.replace(even, ranks=(*ranks, *even.ranks), shard_ratios=(1 / 3,) * 3)
    suggestion = suggest_shard_ratios(profile, 64, sharded_state_bytes=18000)
    assert suggestion.shard_ratios[0] <= 1 / 3 + 1e-9


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=6), st.floats(0.0, 1.0))
def test_shares_are_levelled_within_their_rooms(rooms, part):
    rooms = np.array(rooms)
    total = part * rooms.sum()
    shares = level_out(rooms, total)
    assert shares.sum() == pytest.approx(total, abs=1e-9)
    assert (shares >= 0).all() and (shares <= rooms + 1e-9).all()
    open_shares = shares[shares < rooms - 1e-6]
    assert len(open_shares) == 0 or open_shares == pytest.approx(max(shares))

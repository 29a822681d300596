"""Plans: exact against brute force, sane whatever the strategy, said in words where something is to be said."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poplar.allocator import STRATEGIES, StageOutcome, allocate, choose_outcome, explain
from poplar.errors import ConfigError, InfeasiblePlanError, PlanMismatchError
from poplar.plan import ClusterProfile, Plan, RankProfile
from poplar.planning.cost import peak_memory_bytes, predict
from poplar.planning.strategies import proportional, proportional_within

CARDS = ("t4-16g", "v100-16g", "a100-40g")
_STEP = st.sampled_from((0.0, 0.1, 0.25, 1.0)) | st.floats(0.0, 2.0)
"""What one sample more takes; 0 makes plateaus, round numbers make ties."""


def rank_of(seconds, device="t4-16g", **fields):
    """Make a profile that was timed at every size: seconds[n - 1] for n samples."""
    points = tuple(enumerate(seconds, start=1))
    return RankProfile(device=device, points=points, max_micro_batch_size=len(points), **fields)


def line(fixed_s, sample_s, maximum, device="t4-16g", **fields):
    return rank_of([fixed_s + sample_s * n for n in range(1, maximum + 1)], device, **fields)


@st.composite
def rank_profiles(draw, largest):
    maximum = draw(st.integers(0, largest))
    steps = draw(st.lists(_STEP, min_size=maximum, max_size=maximum))
    seconds = [draw(st.floats(0.05, 2.0)) + total for total in itertools.accumulate(steps)] if maximum else []
    optimizer_step_s = draw(st.sampled_from((0.0, 0.3, 5.0)))
    return rank_of(sorted(seconds), draw(st.sampled_from(CARDS)), optimizer_step_s=optimizer_step_s)


@st.composite
def clusters(draw, zero_stage, max_ranks=3, largest=4):
    ranks = draw(st.lists(rank_profiles(largest), min_size=1, max_size=max_ranks))
    ranks += draw(st.lists(st.sampled_from(ranks), max_size=max_ranks - len(ranks)))
    if all(rank.max_micro_batch_size == 0 for rank in ranks):
        ranks[0] = line(0.1, 0.2, largest)
    return ClusterProfile(
        zero_stage=zero_stage,
        ranks=tuple(ranks),
        micro_step_collective_s=draw(st.sampled_from((0.0, 0.05, 3.0))),
        step_collective_s=draw(st.sampled_from((0.0, 0.4))),
    )


def partitions(total, largest):
    """Yield every multiset of whole numbers from 1 to ``largest`` that adds up to ``total``."""
    if total == 0:
        yield ()
        return
    for first in range(min(total, largest), 0, -1):
        for rest in partitions(total - first, first):
            yield (first, *rest)


def brute_force(profile, global_batch_size):
    """Return the least step time by looking at all allocations; knows nothing of curves, kinds or coverings."""
    times = [dict(rank.points) | {0: 0.0} for rank in profile.ranks]
    if profile.zero_stage <= 1:
        best = min(
            max(rank_s)
            for shares in itertools.product(range(global_batch_size + 1), repeat=len(times))
            if sum(shares) == global_batch_size
            for rank_s in [[alone(n, tuple(t.items())) for n, t in zip(shares, times, strict=True)]]
        )
    else:
        by_total = {}
        for batches in itertools.product(*times):
            slowest = max(t[size] for size, t in zip(batches, times, strict=True))
            by_total[sum(batches)] = min(by_total.get(sum(batches), math.inf), slowest)
        best = min(
            sum(by_total[part] + profile.micro_step_collective_s for part in parts)
            for parts in partitions(global_batch_size, max(by_total))
        )
    return best + profile.step_collective_s + max(rank.optimizer_step_s for rank in profile.ranks)


def alone(num_samples, times):
    seconds = dict(times)
    return min((sum(map(seconds.get, parts)) for parts in partitions(num_samples, len(seconds) - 1)), default=math.inf)


def check_sane(profile, plan, global_batch_size, strategy):
    assert plan.global_batch_size == global_batch_size == sum(rank.num_samples for rank in plan.ranks)
    assert (plan.strategy, plan.zero_stage) == (strategy, profile.zero_stage)
    for row, measured in zip(plan.ranks, profile.ranks, strict=True):
        assert max(row.micro_batch_sizes, default=0) <= measured.max_micro_batch_size
    if profile.zero_stage >= 2:
        assert len({len(row.micro_batch_sizes) for row in plan.ranks}) == 1
        assert all(any(sizes) for sizes in zip(*(row.micro_batch_sizes for row in plan.ranks), strict=True))
    else:
        assert all(min(row.micro_batch_sizes, default=1) >= 1 for row in plan.ranks)
    predicted = plan.predicted
    assert predicted == predict(profile, plan) == predict(profile, [row.micro_batch_sizes for row in plan.ranks])
    assert min(predicted.idle_s) >= 0 and min(predicted.compute_s) >= 0
    for compute_s, idle_s in zip(predicted.compute_s, predicted.idle_s, strict=True):
        assert compute_s + idle_s + predicted.collective_s == pytest.approx(predicted.step_s)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_exact_is_never_beaten_by_brute_force(zero_stage):
    @settings(max_examples=120, deadline=None)
    @given(clusters(zero_stage), st.integers(1, 7))
    def check(profile, global_batch_size):
        plan = allocate(profile, global_batch_size)
        check_sane(profile, plan, global_batch_size, "exact")
        assert plan.predicted.step_s == pytest.approx(brute_force(profile, global_batch_size), rel=1e-9)

    check()


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_exact_is_never_worse_than_the_others(zero_stage):
    @settings(max_examples=80, deadline=None)
    @given(clusters(zero_stage, max_ranks=6, largest=12), st.integers(1, 150))
    def check(profile, global_batch_size):
        step_s = allocate(profile, global_batch_size).predicted.step_s
        for strategy in STRATEGIES[1:]:
            try:
                plan = allocate(profile, global_batch_size, strategy)
            except InfeasiblePlanError:
                assert strategy == "equal" and any(rank.max_micro_batch_size == 0 for rank in profile.ranks)
                continue
            check_sane(profile, plan, global_batch_size, strategy)
            assert step_s <= plan.predicted.step_s * (1 + 1e-9)

    check()


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_slower_card_never_gets_more_than_a_faster_one_of_equal_memory(zero_stage):
    @settings(max_examples=80, deadline=None)
    @given(
        st.lists(_STEP, min_size=1, max_size=10),
        st.lists(st.integers(100, 2000).map(lambda percent: percent / 100), min_size=1, max_size=4),
        st.integers(1, 120),
        st.randoms(use_true_random=False),
    )
    def check(steps, factors, global_batch_size, random):
        seconds = [0.1 + total for total in itertools.accumulate(steps)]
        factors = [1.0, *factors]
        random.shuffle(factors)
        ranks = tuple(rank_of([factor * s for s in seconds]) for factor in factors)
        profile = ClusterProfile(zero_stage=zero_stage, ranks=ranks, micro_step_collective_s=0.1)
        for strategy in ("exact", "poplar", "equal"):
            plan = allocate(profile, global_batch_size, strategy)
            pairs = itertools.permutations(zip(factors, plan.ranks, strict=True), 2)
            for (fast, faster_row), (slow, slower_row) in pairs:
                assert fast >= slow or faster_row.num_samples >= slower_row.num_samples

    check()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(2, 300), st.floats(1.5, 400.0), st.floats(0.0, 0.5))
def test_one_fast_card_among_many_slow_ones_gets_what_it_can_do(num_slow, global_batch_size, factor, fixed_s):
    """The search looks first at about the average share, and must go on where the best share is far above it."""
    fast, slow = line(fixed_s, 0.01, 7), line(factor * fixed_s, factor * 0.01, 7)
    profile = ClusterProfile(zero_stage=1, ranks=(*[slow] * num_slow, fast))
    plan = allocate(profile, global_batch_size)
    least_s = [0.0]
    for n in range(1, global_batch_size + 1):
        least_s.append(min(least_s[n - size] + fixed_s + 0.01 * size for size in range(1, min(7, n) + 1)))

    def within(budget_s):
        return sum(s <= budget_s * (1 + 1e-12) for s in least_s) - 1

    step_s = min(
        s
        for s in itertools.chain(least_s, (factor * s for s in least_s))
        if within(s) + num_slow * within(s / factor) >= global_batch_size
    )
    assert plan.predicted.step_s == pytest.approx(step_s, rel=1e-9)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_memory_of_two_to_one_at_equal_speed_is_shared_two_to_one(zero_stage):
    """H04, H08: equal speed, memory of 2:1; batches of the small card cost it relatively more overhead."""
    ranks = (line(0.5, 0.1, 16), line(0.5, 0.1, 8))
    plan = allocate(ClusterProfile(zero_stage=zero_stage, ranks=ranks, micro_step_collective_s=1.0), 240)
    shares = [row.num_samples for row in plan.ranks]
    if zero_stage >= 2:
        assert shares == [160, 80] and plan.gradient_accumulation_steps == 10
    else:
        # Alone, the small card pays its fixed time twice as often: 1.3/8 against 2.1/16 seconds a sample.
        assert sum(shares) == 240 and 1.05 < shares[0] / shares[1] < 1.5


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_hopeless_card_gets_little_or_nothing(zero_stage):
    """H12: rank 1 is 20 times slower."""
    ranks = (line(0.0, 0.1, 16), line(0.0, 2.0, 16, device="k80"))
    profile = ClusterProfile(zero_stage=zero_stage, ranks=ranks, micro_step_collective_s=0.01)
    assert allocate(profile, 40).ranks[1].num_samples <= 2
    plan = allocate(profile, 4)
    assert plan.ranks[1].num_samples == 0
    assert any(note.startswith("no samples for rank 1 (k80): one sample takes 2 s there") for note in plan.notes)


def test_the_largest_batch_is_not_used_where_a_smaller_one_is_faster():
    """T4 and L4 lose speed at the largest batches that fit."""
    seconds = [0.1, 0.2, 0.3, 0.4, 0.7, 1.0, 1.4, 1.8]
    for zero_stage in (0, 2):
        plan = allocate(ClusterProfile(zero_stage=zero_stage, ranks=(rank_of(seconds),)), 32)
        assert max(plan.ranks[0].micro_batch_sizes) <= 4
        assert plan.predicted.step_s == pytest.approx(3.2)


def test_ties_go_to_few_and_even_micro_steps():
    for zero_stage in (0, 3):
        free = ClusterProfile(zero_stage=zero_stage, ranks=(line(0.0, 0.1, 8),))
        assert allocate(free, 20).ranks[0].micro_batch_sizes == (7, 7, 6)
        costly = dataclasses.replace(free, ranks=(line(0.3, 0.1, 8),), micro_step_collective_s=0.2)
        assert allocate(costly, 17).ranks[0].micro_batch_sizes == (6, 6, 5)


def test_micro_steps_may_differ_where_that_is_faster():
    """Two big cards make few large micro-steps; what is left goes where it is cheapest."""
    ranks = (rank_of([1.0, 1.0, 1.0, 1.0]), rank_of([1.0, 9.0]))
    plan = allocate(ClusterProfile(zero_stage=2, ranks=ranks, micro_step_collective_s=0.5), 11)
    assert plan.predicted.step_s == pytest.approx(4.5)
    assert plan.gradient_accumulation_steps == 3


def test_equal_splits_as_deepspeed_and_keeps_the_remainder():
    """P11, P21: the global batch stays what the user fixed."""
    ranks = (line(0.2, 0.1, 9), line(0.2, 0.3, 4), line(0.2, 0.2, 6))
    plan = allocate(ClusterProfile(zero_stage=3, ranks=ranks), 29, "equal")
    assert [row.micro_batch_sizes for row in plan.ranks] == [(4, 4, 2), (4, 4, 1), (4, 4, 2)]
    few = allocate(ClusterProfile(zero_stage=3, ranks=ranks), 2, "equal")
    assert [row.micro_batch_sizes for row in few.ranks] == [(1,), (0,), (1,)]
    nothing = (*ranks, RankProfile(device="p4-8g", points=(), max_micro_batch_size=0))
    with pytest.raises(InfeasiblePlanError, match=r"rank 3 \(p4-8g\) can take no samples at stage 3"):
        allocate(ClusterProfile(zero_stage=3, ranks=nothing), 29, "equal")


def test_flops_splits_by_rating_within_memory():
    """The V100 has 125/65 of a T4's 16-bit peak, 15.7/8.1 of its float32 peak."""
    ranks = (line(1.0, 0.1, 100, "v100-16g"), line(1.0, 0.35, 100, "t4-16g"))
    profile = ClusterProfile(zero_stage=2, ranks=ranks, precision="fp16")
    assert [row.num_samples for row in allocate(profile, 38, "flops").ranks] == [25, 13]
    small = dataclasses.replace(profile, ranks=(line(1.0, 0.1, 4, "v100-16g"), ranks[1]), micro_step_collective_s=99.0)
    assert [row.num_samples for row in allocate(small, 90, "flops").ranks] == [4, 86]
    unknown = ClusterProfile(zero_stage=2, ranks=(*ranks, line(0.0, 0.1, 4, "my-card")))
    with pytest.raises(ConfigError, match="strategy flops needs every card's rating: unknown card 'my-card'"):
        allocate(unknown, 8, "flops")
    for strategy in ("exact", "poplar", "equal"):
        assert allocate(unknown, 8, strategy).strategy == strategy


def test_poplar_shares_by_peak_speed_alone_and_scans_the_micro_step_together():
    ranks = (line(0.1, 0.1, 10), line(0.3, 0.3, 10))
    apart = allocate(ClusterProfile(zero_stage=1, ranks=ranks), 84, "poplar")
    assert [row.micro_batch_sizes for row in apart.ranks] == [(10,) * 6 + (3,), (10, 10, 1)]
    together = allocate(ClusterProfile(zero_stage=3, ranks=ranks, micro_step_collective_s=0.5), 23, "poplar")
    # Within 1.1 s: 10 and 2 samples, so twice 1.6 s; within 0.9 s 10 in all, so three times 1.4 s. The last holds 11.
    assert [row.micro_batch_sizes for row in together.ranks] == [(10, 9), (2, 2)]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 500), st.lists(st.tuples(st.floats(0.1, 50.0), st.integers(0, 99)), min_size=1, max_size=8))
def test_proportional_shares_add_up_and_stay_within_limits(total, ranks):
    weights, limits = np.array([w for w, _ in ranks]), np.array([limit for _, limit in ranks])
    shares = proportional(total, weights)
    assert shares.sum() == total and (abs(shares - total * weights / weights.sum()) < 1).all()
    total = min(total, int(limits.sum()))
    within = proportional_within(total, weights, limits)
    assert within.sum() == total and (within >= 0).all() and (within <= limits).all()


def test_prediction_adds_the_parts_up():
    ranks = (line(0.0, 0.1, 9, optimizer_step_s=0.05), line(0.0, 0.2, 9, optimizer_step_s=0.02))
    together = ClusterProfile(zero_stage=2, ranks=ranks, micro_step_collective_s=0.03, step_collective_s=0.5)
    predicted = predict(together, [(4, 1), (1, 3)])
    assert predicted.step_s == pytest.approx((0.4 + 0.6) + 2 * 0.03 + 0.5 + 0.05)
    assert predicted.compute_s == pytest.approx((0.55, 0.82))
    assert predicted.collective_s == pytest.approx(0.56)
    assert predicted.idle_s == pytest.approx((0.5, 0.2 + 0.03))
    apart = dataclasses.replace(together, zero_stage=1)
    predicted = predict(apart, [(4, 1), (1, 3)])
    assert predicted.step_s == pytest.approx(0.8 + 0.5 + 0.05)
    assert predicted.idle_s == pytest.approx((0.3, 0.03))
    assert predict(apart, [(4,), ()]).compute_s == pytest.approx((0.45, 0.02))


def test_prediction_refuses_what_the_profile_cannot_answer():
    profile = ClusterProfile(zero_stage=2, ranks=(line(0.0, 0.1, 6),) * 3)
    with pytest.raises(InfeasiblePlanError, match=r"rank 2 \(t4-16g\) fits at most 6 samples at stage 2.*asks for 8"):
        predict(profile, [(6,), (6,), (8,)])
    with pytest.raises(PlanMismatchError, match="of 3 ranks, the plan has 2"):
        predict(profile, [(6,), (6,)])
    with pytest.raises(ConfigError, match="same number of micro-steps"):
        predict(profile, [(6,), (6, 1), (6,)])
    with pytest.raises(ConfigError, match="rank 0 has -1"):
        predict(profile, [(-1,), (6,), (6,)])


def test_predicted_memory_follows_the_measured_points():
    measured = line(0.0, 0.1, 9, memory_points=((2, 2000), (4, 3000)), state_bytes=900)
    assert [peak_memory_bytes(measured, size) for size in (0, 1, 2, 3, 4, 6)] == [900, 1450, 2000, 2500, 3000, 4000]
    bare = dataclasses.replace(measured, state_bytes=None)
    assert [peak_memory_bytes(bare, size) for size in (0, 1, 3)] == [None, 2000, 2500]
    assert peak_memory_bytes(line(0.0, 0.1, 9), 3) is None
    plan = allocate(ClusterProfile(zero_stage=0, ranks=(measured, bare, line(0.0, 9.0, 1))), 6)
    assert plan.predicted.peak_memory_bytes == (2500, 2500, None)


def test_the_stage_is_chosen_by_time_among_those_that_fit():
    def stage(zero_stage, sample_s, **fields):
        rank = line(0.0, sample_s, 4, memory_limit_bytes=1000, **fields)
        return ClusterProfile(zero_stage=zero_stage, ranks=(line(0.0, sample_s, 4), rank))

    profiles = [stage(0, 0.1, state_bytes=4000), stage(1, 0.3), stage(2, 0.2), stage(3, 0.2)]
    plan = allocate(profiles, 16)
    assert plan.zero_stage == 2
    assert len(plan.notes) == 4 and plan.notes[2].startswith("taken: stage 2: 1.6 s a step")
    assert "stage 0: does not fit: 3000 bytes are missing on rank 1 (t4-16g)" in plan.notes[0]
    outcomes = explain(profiles, 16)
    assert [outcome.fits for outcome in outcomes] == [False, True, True, True]
    assert [outcome.step_s for outcome in outcomes] == pytest.approx([math.inf, 2.4, 1.6, 1.6])
    assert "collectives 0 s, idle 0% on average" in outcomes[1].describe()
    assert allocate(profiles, 16, zero_stage=3).zero_stage == 3
    with pytest.raises(InfeasiblePlanError, match="3000 bytes are missing"):
        allocate(profiles, 16, zero_stage=0)
    with pytest.raises(InfeasiblePlanError, match=r"zero_stage=3 cannot be planned: the profiles are of stages 0-2"):
        allocate(profiles[:3], 16, zero_stage=3)


def test_a_stage_that_may_not_fit_is_the_last_resort():
    """At stage 0 there are no shards, so a card that ran nothing there may not even hold the model."""
    nothing = RankProfile(device="p4-8g", points=(), max_micro_batch_size=0)
    whole = ClusterProfile(zero_stage=0, ranks=(line(0.0, 0.1, 8), nothing))
    cut = ClusterProfile(zero_stage=3, ranks=(line(0.0, 0.5, 8), nothing))
    assert allocate(whole, 8).zero_stage == 0
    plan = allocate([whole, cut], 8)
    assert plan.zero_stage == 3 and plan.notes[0].endswith("may not fit: no batch ran on rank 1 (p4-8g)")
    room = dataclasses.replace(nothing, state_bytes=900, memory_limit_bytes=1000)
    assert allocate([dataclasses.replace(whole, ranks=(whole.ranks[0], room)), cut], 8).zero_stage == 0


def test_uneven_shards_are_taken_only_for_a_gain():
    even = ClusterProfile(zero_stage=3, ranks=(line(0.0, 1.0, 4), line(0.0, 1.0, 4)))

    def uneven(sample_s):
        return dataclasses.replace(even, ranks=(line(0.0, sample_s, 4),) * 2, shard_ratios=(0.7, 0.3))

    assert allocate([even, uneven(0.99)], 8).shard_ratios is None
    assert allocate([even, uneven(0.97)], 8).shard_ratios == pytest.approx((0.7, 0.3))
    assert allocate([uneven(0.99)], 8).shard_ratios == pytest.approx((0.7, 0.3))


def test_wishes_are_kept():
    profile = ClusterProfile(zero_stage=1, ranks=(line(0.1, 0.1, 8), line(0.1, 0.1, 8), line(0.1, 0.1, 8)))
    for wish in ({1: 2}, [None, 2, None]):
        plan = allocate(profile, 40, max_micro_batch_size=wish)
        assert max(plan.ranks[1].micro_batch_sizes) == 2 and max(plan.ranks[0].micro_batch_sizes) > 2
    assert allocate(profile, 40, "equal", max_micro_batch_size=3).ranks[0].micro_batch_sizes == (3, 3, 3, 3, 2)
    plan = allocate(profile, 40, max_micro_batch_size={0: 0})
    assert plan.ranks[0].num_samples == 0
    assert any("no samples for rank 0 (t4-16g): max_micro_batch_size says so" in note for note in plan.notes)
    plan = allocate(profile, 40, max_micro_batch_size={2: 1}, equal_micro_steps=True)
    assert len({len(row.micro_batch_sizes) for row in plan.ranks}) == 1 and 0 in plan.ranks[0].micro_batch_sizes
    plan = allocate(profile, 40, max_micro_batch_size=[8, 9, 99])
    assert plan.notes == ("max_micro_batch_size has no effect on ranks 1-2 (t4-16g): less than that fits there",)


def test_wishes_that_cannot_be_met_are_named():
    able, unable = line(0.1, 0.1, 8), RankProfile(device="p4-8g", points=(), max_micro_batch_size=0)
    with pytest.raises(InfeasiblePlanError, match="max_micro_batch_size leaves nobody to compute: rank 0 could"):
        allocate(ClusterProfile(zero_stage=2, ranks=(able, unable)), 8, max_micro_batch_size={0: 0})
    with pytest.raises(InfeasiblePlanError, match=r"rank 1 \(t4-16g\) can take no samples"):
        allocate(ClusterProfile(zero_stage=2, ranks=(able, able)), 8, "equal", max_micro_batch_size={1: 0})


def test_a_cluster_on_which_nothing_fits_is_told_what_is_missing():
    """P07."""
    full = RankProfile(
        device="t4-16g", points=(), max_micro_batch_size=0, state_bytes=2**30, memory_limit_bytes=5 * 2**28
    )
    small = ClusterProfile(zero_stage=3, ranks=(full, full, dataclasses.replace(full, state_bytes=None)))
    with pytest.raises(InfeasiblePlanError) as caught:
        allocate(small, 8)
    assert str(caught.value) == (
        "not one sample fits on any card at stage 3: ranks 0-1 (t4-16g) may use 1.25 GiB, of which model state leaves "
        "0.25 GiB; rank 2 (t4-16g) took no batch"
    )
    with pytest.raises(
        InfeasiblePlanError, match="no stage fits:\n  stage 3: does not fit: not one sample.*\n  stage 2"
    ):
        allocate([small, dataclasses.replace(small, zero_stage=2)], 8)


def test_a_card_that_only_holds_shards_is_said():
    ranks = (line(0.1, 0.1, 8), RankProfile(device="p4-8g", points=(), max_micro_batch_size=0))
    plan = allocate(ClusterProfile(zero_stage=3, ranks=ranks), 20)
    assert plan.ranks[1].micro_batch_sizes == (0,) * plan.gradient_accumulation_steps
    assert any(note.startswith("no samples for rank 1 (p4-8g): no batch fits there") for note in plan.notes)


def test_it_is_said_when_leaving_a_card_out_would_be_faster():
    """Its optimizer step is waited for; shards of the ones left out make the others' optimizer steps longer."""
    fast = line(0.0, 0.1, 8, "a100-40g", optimizer_step_s=0.1)
    slow = line(0.0, 5.0, 8, "k80", optimizer_step_s=3.0)
    profile = ClusterProfile(zero_stage=1, ranks=(fast, slow, fast, dataclasses.replace(slow, optimizer_step_s=2.9)))
    plan = allocate(profile, 8)
    assert plan.predicted.step_s == pytest.approx(3.4)
    (note,) = [note for note in plan.notes if note.startswith("leaving")]
    assert note.startswith(
        "leaving ranks 1, 3 (k80) out of the group would be faster: 0.6 s a step instead of 3.4 s, since all wait up "
        "to 3 s for the optimizer there"
    )
    quick = dataclasses.replace(slow, optimizer_step_s=0.1)
    harmless = allocate(dataclasses.replace(profile, ranks=(fast, quick)), 8)
    assert not any(note.startswith("leaving") for note in harmless.notes)
    needed = dataclasses.replace(profile, ranks=(line(0.0, 10.0, 8, optimizer_step_s=0.1), slow))
    assert not any(note.startswith("leaving") for note in allocate(needed, 8).notes)


def test_a_smoothed_curve_is_said_once_for_equal_ranks():
    noisy = rank_of([0.2, 0.1, 0.3])
    plan = allocate(ClusterProfile(zero_stage=0, ranks=(noisy,) * 5), 10)
    assert len(plan.notes) == 1 and plan.notes[0].startswith("ranks 0-4 (t4-16g): measured times fell")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size must be an integer from 1 to 100000000; got 0"),
        ({"global_batch_size": 2.5}, "got 2.5"),
        ({"global_batch_size": True}, "got True"),
        ({"strategy": "best"}, "strategy must be one of exact, poplar, flops, equal; got 'best'"),
        ({"strategy": "manual"}, "Plan.manual"),
        ({"zero_stage": 4}, "zero_stage must be"),
        ({"max_micro_batch_size": [1]}, "one entry a rank: 2; got 1"),
        ({"max_micro_batch_size": {2: 1}}, "names rank 2; the ranks are 0 to 1"),
        ({"max_micro_batch_size": -1}, "rank 0 has -1"),
        ({"profile": []}, "needs a ClusterProfile"),
        ({"profile": "profile.json"}, "needs a ClusterProfile, or several; got str"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    profile = ClusterProfile(zero_stage=0, ranks=(line(0.1, 0.1, 8),) * 2)
    with pytest.raises(ConfigError, match=message):
        allocate(**{"profile": profile, "global_batch_size": 8, **arguments})


def test_profiles_of_different_clusters_are_refused():
    one, two = (ClusterProfile(zero_stage=0, ranks=(line(0.1, 0.1, 8),) * n) for n in (1, 2))
    with pytest.raises(ConfigError, match=r"different clusters: they have \[1, 2\] ranks"):
        allocate([one, two], 8)


def test_outcomes_are_chosen_without_a_profile():
    misfit = StageOutcome(zero_stage=0, plan=None, problem="too large")
    with pytest.raises(InfeasiblePlanError, match="^too large$"):
        choose_outcome([misfit])


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_thousand_ranks_are_planned_at_once(zero_stage):
    """Far above what it takes (see benchmarks/planner.py), so that a busy machine does not fail it."""
    kinds = [line(0.02 * k, 0.01 * k, 72 - 8 * k, optimizer_step_s=0.01 * k) for k in range(1, 9)]
    profile = ClusterProfile(zero_stage=zero_stage, ranks=tuple(kinds * 128), micro_step_collective_s=0.01)
    start = time.perf_counter()
    plan = allocate(profile, 8192)
    assert time.perf_counter() - start < 5.0
    assert len({id(row.micro_batch_sizes) for row in plan.ranks}) <= 24


def test_profiles_that_contradict_each_other_are_refused():
    ranks = (line(0.1, 0.1, 8), dataclasses.replace(line(0.1, 0.2, 8), device="a100-40g"))
    profile = ClusterProfile(zero_stage=1, ranks=ranks)
    swapped = ClusterProfile(zero_stage=2, ranks=ranks[::-1])
    with pytest.raises(ConfigError, match="different clusters"):
        allocate([profile, swapped], 8)
    with pytest.raises(ConfigError, match="different clusters"):
        allocate([profile, dataclasses.replace(profile, zero_stage=2, precision="bf16")], 8)
    with pytest.raises(ConfigError, match="two profiles are of stage 1"):
        allocate([profile, profile], 8)

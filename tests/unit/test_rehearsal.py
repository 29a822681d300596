"""Curves corrected by steps of all ranks together, and which steps those are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poplar.allocator import allocate
from poplar.config import ZERO_STAGES
from poplar.errors import InfeasiblePlanError
from poplar.plan import ClusterProfile, RankProfile
from poplar.planning.cost import Row, predict
from poplar.profiling import rehearsal, together
from poplar.profiling.rehearsal import RehearsedStep, corrected, rehearse, rows_to_rehearse
from poplar.profiling.together import Choice, StepTaker, TimedSteps
from poplar.zero.comm import LoopbackComm
from tests.helpers.profiling import FakeDevice, ScriptedClock

_LARGEST = 16


def _rank(fixed_s: float, sample_s: float, optimizer_step_s: float = 0.0, largest: int = _LARGEST) -> RankProfile:
    points = tuple((size, fixed_s + sample_s * size) for size in (1, 2, 4, 8, 16) if size <= largest)
    return RankProfile(
        device="card",
        points=points,
        point_spreads=tuple((size, 0.05) for size, _ in points),
        max_micro_batch_size=largest,
        optimizer_step_s=optimizer_step_s,
    )


def _step(truth: ClusterProfile, rows: Sequence[Row], speed: float = 1.0) -> RehearsedStep:
    """Return a step as it is on the cluster of ``truth``, so many times slower."""
    real = predict(truth, rows)
    return RehearsedStep(
        rows=tuple(rows),
        seconds=speed * real.step_s,
        waited_s=tuple(speed * (real.step_s - compute_s) for compute_s in real.compute_s),
    )


_SECONDS = st.floats(0.01, 1.0)


@st.composite
def _clusters(draw: st.DrawFn) -> tuple[ClusterProfile, ClusterProfile, list[list[Row]]]:
    """Draw a profile of ranks alone, what they really are together, and the rows of some steps."""
    zero_stage = draw(st.sampled_from(ZERO_STAGES))
    ranks = [_rank(draw(_SECONDS), draw(_SECONDS), draw(st.floats(0.0, 0.1))) for _ in range(draw(st.integers(1, 4)))]
    real = tuple(rank.scaled(draw(st.floats(0.5, 2.0))) for rank in ranks)
    alone = ClusterProfile(zero_stage=zero_stage, ranks=tuple(ranks))
    share_s = draw(st.floats(0.0, 0.3))
    truth = ClusterProfile(zero_stage=zero_stage, ranks=real).with_collectives(
        share_s if zero_stage >= 2 else 0.0, share_s if zero_stage <= 2 else 0.0
    )
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    sizes = st.integers(1, _LARGEST)
    rows = [[tuple(draw(sizes) for _ in range(count)) for _ in ranks] for count in counts]
    return alone, truth, rows


@settings(max_examples=150, deadline=None)
@given(cluster=_clusters())
def test_steps_tell_what_ranks_and_collectives_really_take(
    cluster: tuple[ClusterProfile, ClusterProfile, list[list[Row]]],
) -> None:
    alone, truth, steps = cluster
    found = corrected(alone, [_step(truth, rows) for rows in steps])
    for own, real in zip(found.ranks, truth.ranks, strict=True):
        assert [seconds for _, seconds in own.points] == pytest.approx([seconds for _, seconds in real.points])
        assert own.optimizer_step_s == pytest.approx(real.optimizer_step_s)
    assert found.micro_step_collective_s == pytest.approx(truth.micro_step_collective_s, abs=1e-9)
    assert found.step_collective_s == pytest.approx(truth.step_collective_s, abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(cluster=_clusters(), data=st.data())
def test_the_step_predicted_is_the_median_of_those_that_were_taken(
    cluster: tuple[ClusterProfile, ClusterProfile, list[list[Row]]], data: st.DataObject
) -> None:
    """Whatever the ranks say they waited, which need not fit together."""
    alone, _, (rows, *_) = cluster
    steps = []
    for seconds in data.draw(st.lists(_SECONDS, min_size=1, max_size=6)):
        shares = data.draw(st.tuples(*(st.floats(0.0, 1.0) for _ in rows)))
        steps.append(
            RehearsedStep(rows=tuple(rows), seconds=seconds, waited_s=tuple(share * seconds for share in shares))
        )
    found = corrected(alone, steps)
    assert predict(found, rows).step_s == pytest.approx(median(step.seconds for step in steps))
    assert found.micro_step_collective_s >= 0 and found.step_collective_s >= 0
    assert found.ranks[0].max_micro_batch_size == _LARGEST


def test_a_rank_with_nothing_to_do_is_taken_to_be_off_as_the_others_are() -> None:
    alone = ClusterProfile(zero_stage=0, ranks=(_rank(0.1, 0.1), _rank(0.1, 0.1), _rank(1.0, 1.0)))
    truth = alone.scaled(1.5)
    found = corrected(alone, [_step(truth, [(4,), (4,), ()])])
    assert found.ranks[2].points[0][1] == pytest.approx(3.0)
    assert corrected(alone, []) is alone


def test_one_slow_step_changes_nothing() -> None:
    truth = ClusterProfile(zero_stage=2, ranks=(_rank(0.1, 0.1), _rank(0.2, 0.2))).with_collectives(0.05, 0.05)
    steps = [_step(truth, [(8, 8), (4, 4)], speed) for speed in (1.0, 1.0, 7.0, 1.0)]
    found = corrected(truth, steps)
    assert predict(found, [(8, 8), (4, 4)]).step_s == pytest.approx(steps[0].seconds)
    assert [found.micro_step_collective_s, found.step_collective_s] == pytest.approx([0.05, 0.05])


def test_what_is_rehearsed_is_the_plan_of_the_batch_or_of_as_much_as_is_quick() -> None:
    quick = ClusterProfile(zero_stage=2, ranks=(_rank(0.001, 0.01), _rank(0.001, 0.03)))
    rows = rows_to_rehearse(quick, 40)
    assert sum(map(sum, rows)) == 40 and sum(rows[0]) > 2 * sum(rows[1]) and len(rows[0]) == len(rows[1])
    slow = quick.scaled(100.0)
    assert 1 <= sum(map(sum, rows_to_rehearse(slow, 40))) < 10
    assert rows_to_rehearse(quick, None) == ((16,), (5,))
    holder = RankProfile(device="card", points=(), max_micro_batch_size=0)
    assert rows_to_rehearse(ClusterProfile(zero_stage=3, ranks=(holder, holder)), 40) == ()
    full = RankProfile(device="card", points=(), max_micro_batch_size=0, state_bytes=9, memory_limit_bytes=8)
    assert rows_to_rehearse(ClusterProfile(zero_stage=3, ranks=(_rank(0.1, 0.1), full)), 40) == ()


class _Cluster:
    """Takes steps as they are by ``truths``, by stage and shards, in each visit so many times slower.

    Rank 0 turns out to have room for ``bound`` samples in the second visit.
    """

    comm = LoopbackComm()

    def __init__(
        self,
        truths: dict[Any, ClusterProfile],
        speeds: Sequence[float] = (1.0,) * rehearsal.NUM_VISITS,
        bound: int = _LARGEST,
    ):
        self.truths, self.speeds, self.bound = truths, speeds, bound
        self.taken: list[tuple[int, tuple[Row, ...], int]] = []

    def take(
        self, profile: ClusterProfile, choose: Callable[[ClusterProfile], Choice]
    ) -> tuple[ClusterProfile, TimedSteps | None]:
        if self.taken and self.bound < profile.ranks[0].max_micro_batch_size:
            first = _rank(0.1, 0.1, largest=self.bound)
            profile = ClusterProfile(zero_stage=profile.zero_stage, ranks=(first, *profile.ranks[1:]))
        (rows,), number = choose(profile)
        speed = self.speeds[len(self.taken) // len(self.truths)]
        step = _step(self.truths[profile.zero_stage, profile.shard_ratios], rows, speed)
        self.taken.append((profile.zero_stage, step.rows, number))
        seconds, waited_s = np.full((1, number), step.seconds), np.array(step.waited_s)[:, None, None]
        return replace(profile), TimedSteps(  # always a new one, as from a StepTaker
            kinds=(step.rows,), seconds=seconds, waited_s=np.broadcast_to(waited_s, (len(waited_s), 1, number))
        )


def _rehearse(cluster: _Cluster, profiles: Sequence[ClusterProfile], *more: Any) -> list[ClusterProfile]:
    taker: Any = cluster
    return rehearse(taker, profiles, *more)


def test_stages_take_turns_and_a_later_visit_knows_what_an_earlier_one_found() -> None:
    alone = [ClusterProfile(zero_stage=stage, ranks=(_rank(0.01, 0.02), _rank(0.01, 0.02))) for stage in (0, 3)]
    truth = {
        (one.zero_stage, None): ClusterProfile(
            zero_stage=one.zero_stage, ranks=(one.ranks[0], one.ranks[1].scaled(3.0))
        )
        for one in alone
    }
    cluster = _Cluster(truth)
    found = _rehearse(cluster, alone, 32)
    assert [stage for stage, _, _ in cluster.taken] == [0, 3] * rehearsal.NUM_VISITS
    assert all(rehearsal.MIN_STEPS <= number <= rehearsal.MAX_STEPS for _, _, number in cluster.taken)
    first, last = cluster.taken[0][1], cluster.taken[-2][1]
    assert sum(first[0]) == sum(first[1]) == 16 and sum(last[0]) > 2 * sum(last[1])
    for one in found:
        assert dict(one.ranks[1].points)[8] == pytest.approx(0.51)


def test_a_slow_visit_changes_nothing() -> None:
    alone = ClusterProfile(zero_stage=2, ranks=(_rank(0.01, 0.02), _rank(0.01, 0.06)))
    for slow in range(rehearsal.NUM_VISITS):
        speeds = [2.0 if visit == slow else 1.0 for visit in range(rehearsal.NUM_VISITS)]
        (found,) = _rehearse(_Cluster({(2, None): alone}, speeds), [alone], 32)
        assert [dict(rank.points)[8] for rank in found.ranks] == pytest.approx([0.17, 0.49])


def test_a_profile_of_other_shards_is_compared_at_the_speed_of_its_reference() -> None:
    reference = ClusterProfile(zero_stage=3, ranks=(_rank(0.1, 0.1), _rank(0.1, 0.2)))
    uneven = ClusterProfile(zero_stage=3, ranks=(_rank(0.1, 0.1), _rank(0.1, 0.15)), shard_ratios=(0.75, 0.25))
    cluster = _Cluster({(3, None): reference, (3, uneven.shard_ratios): uneven}, speeds=[1.3] * rehearsal.NUM_VISITS)
    (found,) = _rehearse(cluster, [uneven], 16, reference)
    assert dict(found.ranks[1].points)[8] == pytest.approx(1.3)
    assert found.shard_ratios == uneven.shard_ratios and len(cluster.taken) == 2 * rehearsal.NUM_VISITS


def test_steps_of_sizes_that_turned_out_not_to_fit_are_forgotten() -> None:
    alone = ClusterProfile(zero_stage=0, ranks=(_rank(0.1, 0.1), _rank(0.1, 0.1)))
    truth = alone.scaled(3.0)
    cluster = _Cluster({(0, None): truth}, bound=4)
    (found,) = _rehearse(cluster, [alone], 32)
    (_, first, _), (_, second, _), *_ = cluster.taken
    assert max(first[0]) > 4 >= max(second[0]) and found.ranks[0].max_micro_batch_size == 4
    assert dict(found.ranks[0].points)[4] == pytest.approx(dict(truth.ranks[0].points)[4])


def _taker() -> StepTaker:
    nothing: Any = None
    return StepTaker(engines=nothing, batches=nothing, comm=LoopbackComm(0, 2), device=nothing)


def _steps_of_largest(profile: ClusterProfile) -> Choice:
    rows = tuple((rank.max_micro_batch_size,) for rank in profile.ranks)
    return ([rows], 1) if any(map(sum, rows)) else ([], 0)


def test_where_a_rank_runs_out_of_memory_without_samples_the_stage_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is left to take from it, so that trying again would never end."""
    monkeypatch.setattr(StepTaker, "_time", lambda *arguments: (None, (1,)))
    monkeypatch.setattr("poplar.profiling.together.give_back", lambda device: None)
    alone = ClusterProfile(zero_stage=3, ranks=(_rank(0.1, 0.1), _rank(0.1, 0.1)))
    found, steps = _taker().take(alone, _steps_of_largest)
    assert steps is None and [rank.max_micro_batch_size for rank in found.ranks] == [0, 0]
    assert [note for note in found.notes if "rank 1 (card), stage 3: ran out of memory" in note] == [*found.notes]
    with pytest.raises(InfeasiblePlanError):
        allocate(found, 8)


def test_a_rank_that_runs_out_of_memory_is_told_of_once_and_keeps_what_may_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the step that then runs is of fewer samples."""

    def time(taker: StepTaker, profile: ClusterProfile, kinds: Any, num_rounds: int) -> Any:
        return (None, (1,)) if kinds[0][1][0] > 10 else (np.zeros((2, 2, 1, 1)), ())

    monkeypatch.setattr(StepTaker, "_time", time)
    monkeypatch.setattr("poplar.profiling.together.give_back", lambda device: None)

    def choose(profile: ClusterProfile) -> Choice:
        largest = profile.ranks[1].max_micro_batch_size
        return [((4,), (largest if largest > 12 else 3,))], 1

    alone = ClusterProfile(zero_stage=3, ranks=(_rank(0.1, 0.1), _rank(0.1, 0.1)))
    found, steps = _taker().take(alone, choose)
    assert steps is not None and found.ranks[1].max_micro_batch_size == 12
    assert found.notes == (
        "rank 1 (card), stage 3: ran out of memory with 14 samples in steps of all ranks, which had fitted it alone; "
        "it gets 12 at most",
    )


def test_a_rank_waits_at_the_end_of_a_step_too() -> None:
    """For an optimizer that is slower than its own, say; it is not its own compute."""

    class Late(LoopbackComm):
        def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
            clock.now_s += 0.03
            return super().gather_floats(values)

    class Engine:
        wait_s = 5.0

        def step(self, micro_batches: Any) -> None:
            clock.now_s += 0.1
            self.wait_s += 0.01

    clock = ScriptedClock(lambda size, number: 0.0)
    engine: Any = Engine()
    times = together._take_steps(engine, [[None]], 2, Late(), FakeDevice(clock=clock))
    assert times == pytest.approx([0.13, 0.13, 0.04, 0.04])


def test_long_steps_are_visited_once() -> None:
    alone = ClusterProfile(zero_stage=0, ranks=(_rank(20.0, 1.0),))
    cluster = _Cluster({(0, None): alone})
    _rehearse(cluster, [alone], 1)
    assert len(cluster.taken) == 1

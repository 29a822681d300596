"""Records: checked when built, the same after JSON, clear about what is wrong."""

from __future__ import annotations

import json
import math
import os
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poplar.errors import ConfigError, PlanMismatchError
from poplar.plan import (
    ClusterProfile,
    Plan,
    Prediction,
    RankPlan,
    RankProfile,
    check_shard_ratios,
    write_text_atomically,
)

_SECONDS = st.floats(0.0, 1e6)
_BYTES = st.integers(0, 2**40)
_NAMES = st.text(max_size=8)


@st.composite
def rank_profiles(draw):
    sizes = sorted(draw(st.sets(st.integers(1, 500), max_size=5)))
    return RankProfile(
        device=draw(_NAMES),
        points=tuple((size, draw(st.floats(1e-9, 1e6))) for size in sizes),
        max_micro_batch_size=draw(st.integers(1, 600)) if sizes else 0,
        device_id=draw(st.none() | _NAMES),
        optimizer_step_s=draw(_SECONDS),
        memory_points=tuple((size, draw(_BYTES)) for size in sizes),
        state_bytes=draw(st.none() | _BYTES),
        memory_limit_bytes=draw(st.none() | _BYTES),
    )


@st.composite
def cluster_profiles(draw):
    ranks = tuple(draw(st.lists(rank_profiles(), min_size=1, max_size=4)))
    ratios = st.lists(st.floats(0.01, 10.0), min_size=len(ranks), max_size=len(ranks))
    return ClusterProfile(
        zero_stage=draw(st.integers(0, 3)),
        ranks=ranks,
        micro_step_collective_s=draw(_SECONDS),
        step_collective_s=draw(_SECONDS),
        precision=draw(st.sampled_from(("fp32", "bf16", "fp16"))),
        shard_ratios=draw(st.none() | ratios.map(tuple)),
    )


@st.composite
def plans(draw):
    zero_stage, num_ranks = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    num_micro_steps = draw(st.integers(1, 4))
    rows = []
    for _ in range(num_ranks):
        length = num_micro_steps if zero_stage >= 2 else draw(st.integers(0, 4))
        rows.append(tuple(draw(st.lists(st.integers(0, 9), min_size=length, max_size=length))))
    if not sum(map(sum, rows)):
        rows[0] = (1,) * num_micro_steps
    by_rank = st.lists(_SECONDS, min_size=num_ranks, max_size=num_ranks)
    peaks = st.lists(st.none() | _BYTES, min_size=num_ranks, max_size=num_ranks)
    prediction = st.builds(
        Prediction, step_s=_SECONDS, compute_s=by_rank, idle_s=by_rank, collective_s=_SECONDS, peak_memory_bytes=peaks
    )
    return Plan(
        zero_stage=zero_stage,
        global_batch_size=sum(map(sum, rows)),
        ranks=tuple(
            RankPlan(micro_batch_sizes=row, device=draw(_NAMES), device_id=draw(st.none() | _NAMES)) for row in rows
        ),
        strategy=draw(st.sampled_from(("exact", "poplar", "flops", "equal", "manual"))),
        predicted=draw(st.none() | prediction),
        precision=draw(st.sampled_from(("fp32", "bf16", "fp16"))),
        shard_ratios=draw(st.none() | st.just((1.0,) * num_ranks)),
        notes=tuple(draw(st.lists(_NAMES, max_size=3))),
    )


@settings(max_examples=60, deadline=None)
@given(plans())
def test_a_plan_is_the_same_after_json(plan):
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert json.loads(text)["kind"] == "poplar-plan" and json.loads(text)["version"] == 1
    assert plan.gradient_accumulation_steps == max(len(rank.micro_batch_sizes) for rank in plan.ranks)


@settings(max_examples=60, deadline=None)
@given(cluster_profiles())
def test_a_profile_is_the_same_after_json(profile):
    assert ClusterProfile.from_json(profile.to_json()) == profile
    assert profile.shard_ratios is None or sum(profile.shard_ratios) == pytest.approx(1.0)


def test_a_plan_is_the_same_after_a_file(tmp_path):
    plan = Plan.manual([[3, 1], 2], zero_stage=2)
    plan.save(tmp_path / "runs" / "plan.json")
    assert Plan.load(tmp_path / "runs" / "plan.json") == plan
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["plan.json"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "plan.json"
    write_text_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text_atomically(path, "new \ud800")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_files_have_the_rights_of_other_new_files(tmp_path):
    (tmp_path / "other").touch()
    write_text_atomically(tmp_path / "plan.json", "x")
    assert (tmp_path / "plan.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text_atomically(pipe, "text")
    assert os.read(reader, 100) == b"text" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write .*file/plan.json"):
        write_text_atomically(tmp_path / "file" / "plan.json", "text")


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": None},
        {"ranks": [5]},
        {"notes": [3]},
        {"notes": "text"},
        {"predicted": {"step_s": "x"}},
        {"predicted": {"step_s": 10**400}},
        {"predicted": {"step_s": 1.0, "compute_s": 3}},
        {"global_batch_size": 10**30},
        {"ranks": [{"micro_batch_sizes": [3], "device": 5}]},
        {"ranks": [{"micro_batch_sizes": 3}]},
    ],
)
def test_edited_plans_are_refused_in_words(change):
    data = json.loads(Plan.manual([3]).to_json()) | change
    with pytest.raises(ConfigError):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "change",
    [
        {"points": [[1]]},
        {"points": [[1, "a"]]},
        {"points": [[1, 10**400]]},
        {"point_spreads": [[1, math.nan]]},
        {"memory_points": [["1", 3]]},
        {"state_bytes": "x"},
        {"device": 5},
        {"memory_limit_bytes": "9"},
        {"optimizer_step_s": True},
    ],
)
def test_edited_profiles_are_refused_in_words(change):
    rank = RankProfile(device="t4-16g", points=((1, 0.1),), max_micro_batch_size=1)
    data = json.loads(ClusterProfile(zero_stage=0, ranks=(rank,)).to_json())
    data["ranks"][0] |= change
    with pytest.raises(ConfigError, match=f"RankProfile.{next(iter(change))}: expected"):
        ClusterProfile.from_json(json.dumps(data))


def test_deeply_nested_json_is_refused():
    with pytest.raises(ConfigError, match="not a plan in JSON"):
        Plan.from_json("[" * 100_000)


def test_files_that_are_no_plan_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the plan"):
        Plan.load(tmp_path / "missing.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read the plan"):
        Plan.load(tmp_path / "binary.json")
    good = json.loads(Plan.manual([2, 1]).to_json())
    for change, message in (
        (None, "not a plan in JSON"),
        ({"kind": "poplar-profile"}, "not a Poplar plan"),
        ({"version": 99}, "has version 99, this release reads version 1"),
        ({"colour": "red"}, "Plan: unknown field 'colour'"),
        ({"ranks": [3]}, "RankPlan: expected an object, got int"),
        ({"ranks": [{"micro_batch_sizes": [2], "size": 1}]}, "RankPlan: unknown field 'size'"),
        ({"global_batch_size": 5}, "add up to 3 samples, global_batch_size is 5"),
    ):
        text = "{" if change is None else json.dumps({**good, **change})
        with pytest.raises(ConfigError, match=message):
            Plan.from_json(text)
    del good["zero_stage"]
    with pytest.raises(ConfigError, match="zero_stage"):
        Plan.from_json(json.dumps(good))


def test_equal_rows_share_one_tuple():
    plan = Plan.manual([[4, 4, 1], [2, 2, 2], [4, 4, 1]])
    assert plan.ranks[0].micro_batch_sizes is plan.ranks[2].micro_batch_sizes
    assert plan.ranks[0].num_samples == 9 and plan.world_size == 3


def test_manual_plans_take_lists_and_mappings():
    """H05, H06: batches given by hand, one entry a rank."""
    assert Plan.manual([24, 12, 16, 24]).global_batch_size == 76
    by_rank = Plan.manual({1: [3, 2], 0: 4}, zero_stage=3)
    assert [rank.micro_batch_sizes for rank in by_rank.ranks] == [(4, 0), (3, 2)]
    assert by_rank.strategy == "manual" and by_rank.predicted is None
    apart = Plan.manual({1: [3, 2], 0: 4})
    assert [rank.micro_batch_sizes for rank in apart.ranks] == [(4,), (3, 2)]
    with pytest.raises(ConfigError, match=r"must name the ranks \[0, 1\]; got \[0, 2\]"):
        Plan.manual({0: 1, 2: 1})
    with pytest.raises(ConfigError, match="add up to 5 samples, global_batch_size is 6"):
        Plan.manual([3, 2], global_batch_size=6)
    with pytest.raises(ConfigError, match="at least one rank"):
        Plan.manual([])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zero_stage": 4}, "zero_stage must be 0, 1, 2 or 3; got 4"),
        ({"zero_stage": True}, "zero_stage must be"),
        ({"global_batch_size": 0, "ranks": (RankPlan(micro_batch_sizes=()),)}, "global_batch_size must be an integer"),
        ({"zero_stage": 2}, r"same number of micro-steps.*got \[2, 1\]"),
        ({"shard_ratios": (1.0,)}, "one ratio a rank: 2; got 1"),
        ({"shard_ratios": (1.0, -1.0)}, "0 or more"),
    ],
)
def test_plans_that_cannot_run_are_refused(settings, message):
    ranks = (RankPlan(micro_batch_sizes=(2, 1)), RankPlan(micro_batch_sizes=(3,)))
    with pytest.raises(ConfigError, match=message):
        Plan(**{"zero_stage": 0, "global_batch_size": 6, "ranks": ranks, **settings})


@pytest.mark.parametrize("rows", [5, [None], ["3"], [[3.0]], [[[3]]], "ab"])
def test_batches_by_hand_are_whole_numbers(rows):
    with pytest.raises(ConfigError, match="micro_batch_sizes needs a size"):
        Plan.manual(rows)


@pytest.mark.parametrize("sizes", [(-1,), (1.0,), (True,), ("2",)])
def test_sizes_are_whole_numbers(sizes):
    with pytest.raises(ConfigError, match="micro_batch_sizes must be integers, 0 or more"):
        RankPlan(micro_batch_sizes=sizes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"points": ((2, 0.1), (1, 0.2))}, "increasing integer sizes"),
        ({"points": ((1, 0.1), (1, 0.2))}, "increasing integer sizes"),
        ({"points": ((0, 0.1),)}, "increasing integer sizes from 1"),
        ({"points": ((1, 0.0),)}, "finite seconds above 0"),
        ({"points": ((1, math.nan),)}, "finite seconds above 0"),
        ({"points": ()}, "a card that only holds shards has neither"),
        ({"max_micro_batch_size": 0}, "a card that computes needs both"),
        ({"max_micro_batch_size": -1}, "must be an integer from 0 to 16777216; got -1"),
        ({"max_micro_batch_size": 2.0}, "must be an integer from 0 to 16777216; got 2.0"),
        ({"max_micro_batch_size": 1 << 62}, "must be an integer from 0 to 16777216"),
        ({"points": ((1, 0.1), (1 << 62, 0.2))}, "increasing integer sizes from 1 to 16777216"),
        ({"memory_points": ((0, 0),)}, "memory_points must have sizes from 1"),
        ({"point_spreads": ((1, math.nan),)}, "point_spreads must be finite"),
        ({"optimizer_step_s": -0.1}, "optimizer_step_s must be a finite number of seconds"),
        ({"optimizer_step_s": math.inf}, "optimizer_step_s must be a finite number of seconds"),
    ],
)
def test_profiles_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        RankProfile(**{"device": "t4-16g", "points": ((1, 0.1),), "max_micro_batch_size": 1, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ranks": ()}, "at least one RankProfile"),
        ({"zero_stage": "2"}, "zero_stage must be"),
        ({"micro_step_collective_s": math.nan}, "micro_step_collective_s"),
        ({"step_collective_s": -1}, "step_collective_s"),
        ({"shard_ratios": (0.5, 0.5)}, "one ratio a rank: 1; got 2"),
    ],
)
def test_clusters_that_cannot_be_are_refused(fields, message):
    rank = RankProfile(device="t4-16g", points=((1, 0.1),), max_micro_batch_size=1)
    with pytest.raises(ConfigError, match=message):
        ClusterProfile(**{"zero_stage": 2, "ranks": (rank,), **fields})


def test_a_scaled_profile_has_every_time_as_much_longer():
    rank = RankProfile(device="a", points=((1, 0.1), (2, 0.2)), max_micro_batch_size=2, optimizer_step_s=0.05)
    cluster = ClusterProfile(zero_stage=2, ranks=(rank, rank), micro_step_collective_s=0.03, step_collective_s=0.01)
    scaled = cluster.scaled(1.5)
    assert scaled.ranks[1].points == ((1, pytest.approx(0.15)), (2, pytest.approx(0.3)))
    assert scaled.ranks[0].optimizer_step_s == pytest.approx(0.075)
    assert (scaled.micro_step_collective_s, scaled.step_collective_s) == (pytest.approx(0.045), pytest.approx(0.015))
    assert cluster.scaled(1.0) == cluster


def test_shard_ratios_become_shares_of_one():
    assert check_shard_ratios([3, 1], 2) == (0.75, 0.25)
    assert check_shard_ratios((0.0, 2.0), 2) == (0.0, 1.0)
    exact = (0.1, 0.2, 0.7)
    assert check_shard_ratios(exact, 3) == exact
    for wrong in ((0, 0), (math.inf, 1), "ab", None):
        with pytest.raises(ConfigError, match="shard_ratios"):
            check_shard_ratios(wrong, 2)


def test_a_plan_refuses_another_cluster():
    """I01: the plan knows its cards by identity, not by number."""
    plan = Plan(
        zero_stage=0,
        global_batch_size=3,
        ranks=(
            RankPlan(micro_batch_sizes=(2,), device="t4-16g", device_id="GPU-a"),
            RankPlan(micro_batch_sizes=(1,), device="t4-16g"),
        ),
    )
    plan.check_cluster(2)
    plan.check_cluster(2, ["GPU-a", "GPU-b"])
    plan.check_cluster(2, [None, None])
    with pytest.raises(PlanMismatchError, match="the plan is for 2 ranks, this run has 3"):
        plan.check_cluster(3)
    with pytest.raises(PlanMismatchError, match="rank 0 runs on card GPU-b, the plan was made with GPU-a"):
        plan.check_cluster(2, ["GPU-b", "GPU-a"])


def test_shares_near_the_largest_float_add_up_to_1() -> None:
    assert check_shard_ratios((1e308, 1e308), 2) == (0.5, 0.5)

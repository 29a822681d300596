"""Predicted against measured: parts by waiting, what is said of them, JSON; and a step laid out in time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from poplar.errors import ConfigError, InfeasiblePlanError
from poplar.plan import ClusterProfile, Plan, Prediction, RankProfile
from poplar.planning.cost import predict
from poplar.planning.record import NOT_ON_CARDS, StepParts, StepRecord
from poplar.planning.timeline import COLLECTIVE, COMPUTE, IDLE, OPTIMIZER, timeline

_PREDICTED = Prediction(step_s=1.1, compute_s=(1.0, 0.9, 0.6), idle_s=(0.0, 0.1, 0.4), collective_s=0.1)


def test_the_rank_that_waits_least_waits_for_the_collectives_alone():
    record = StepRecord.from_waits(_PREDICTED, 2.0, [0.5, 0.2, 1.0])
    assert record.parts == StepParts(compute_s=(1.5, 1.8, 1.0), idle_s=(0.5 - 0.2, 0.0, 1.0 - 0.2), collective_s=0.2)
    for compute_s, idle_s in zip(record.parts.compute_s, record.parts.idle_s, strict=True):
        assert compute_s + idle_s + record.parts.collective_s == pytest.approx(2.0)
    assert record.error == pytest.approx(2.0 / 1.1 - 1)


def test_what_all_ranks_are_predicted_to_idle_is_compared_as_it_is_measured():
    predicted = replace(_PREDICTED, step_s=1.3, idle_s=(0.2, 0.3, 0.6))
    expected = StepRecord(predicted=predicted, step_s=1.0).predicted_parts
    assert expected.idle_s == pytest.approx((0.0, 0.1, 0.4)) and expected.collective_s == pytest.approx(0.3)
    assert StepRecord(predicted=Prediction(step_s=1.0), step_s=1.0).predicted_parts is None


@pytest.mark.parametrize(
    ("step_s", "waited_s", "says"),
    [
        (1.2, [0.15, 0.25, 0.55], None),
        (1.0, [0.1, 0.2, 0.5], None),
        (1.6, [0.6, 0.7, 0.1], "45% longer than predicted; what differs most is compute of rank 2: 1.50 s instead of"),
        (0.7, [0.1, 0.1, 0.1], "36% shorter than predicted; what differs most is compute of rank 0: 600 ms instead of"),
        (1.7, [0.7, 0.8, 1.1], "55% longer than predicted; what differs most is collectives: 700 ms instead of 100 ms"),
        (1.4, [0.1, 1.1, 1.2], "27% longer than predicted; what differs most is idle time, on average over the ranks"),
    ],
)
def test_a_step_that_is_off_says_which_part_differs_most(step_s, waited_s, says):
    record = StepRecord.from_waits(_PREDICTED, step_s, waited_s)
    if says is None:
        assert record.explanation() == []
    else:
        [sentence] = record.explanation()
        assert sentence.startswith(f"a step was {says}")
        assert sentence.endswith(" more" if step_s > 1.1 else " less")


def test_the_record_as_text():
    lines = StepRecord.from_waits(_PREDICTED, 1.2, [0.15, 0.25, 0.55]).lines()
    assert lines == [
        "step: predicted 1.10 s, measured 1.20 s (9% longer)",
        "rank 0: compute predicted 1.00 s, measured 1.05 s; idle predicted 0.0 ms, measured 0.0 ms",
        "rank 1: compute predicted 900 ms, measured 950 ms; idle predicted 100 ms, measured 100 ms",
        "rank 2: compute predicted 600 ms, measured 650 ms; idle predicted 400 ms, measured 400 ms",
        "collectives: predicted 100 ms, measured 150 ms",
    ]
    assert StepRecord.from_waits(_PREDICTED, 1.5).lines() == [
        "step: predicted 1.10 s, measured 1.50 s (36% longer)",
        "a step was 36% longer than predicted",
        NOT_ON_CARDS,
    ]
    by_hand = StepRecord.from_waits(None, 1.5, [0.5])
    assert by_hand.lines()[:2] == [
        "step: measured 1.50 s, nothing was predicted",
        "rank 0: compute measured 1.00 s; idle measured 0.0 ms",
    ]


def test_a_record_is_read_as_it_was_written():
    for waited_s in (None, [0.2, 0.3, 0.5]):
        record = StepRecord.from_waits(_PREDICTED, 1.2, waited_s)
        assert StepRecord.from_json(record.to_json()) == record
    assert StepRecord.from_json(StepRecord.from_waits(None, 1.2).to_json()).predicted is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "this is not a record in JSON"),
        ('{"kind": "poplar-plan", "version": 1}', 'no "kind": "poplar-record"'),
        ('{"kind": "poplar-record", "version": 9}', "the record has version 9, this release reads version 1"),
        ('{"kind": "poplar-record", "version": 1, "predicted": null, "step_s": "x"}', "got 'x'"),
        ('{"kind": "poplar-record", "version": 1, "predicted": null, "steps": 1}', "unknown field 'steps'"),
    ],
)
def test_what_is_not_a_record_is_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        StepRecord.from_json(text)


def test_a_record_of_other_ranks_than_predicted_is_refused():
    with pytest.raises(ConfigError, match="for 3 ranks, 2 were measured"):
        StepRecord.from_waits(_PREDICTED, 1.0, [0.1, 0.2])


def _profile(zero_stage):
    ranks = (
        RankProfile(device="v100-16g", points=((1, 0.1), (8, 0.5)), max_micro_batch_size=8, optimizer_step_s=0.02),
        RankProfile(device="t4-16g", points=((1, 0.3), (4, 1.0)), max_micro_batch_size=4, optimizer_step_s=0.05),
    )
    return ClusterProfile(
        zero_stage=zero_stage,
        ranks=ranks,
        micro_step_collective_s=0.03 if zero_stage >= 2 else 0.0,
        step_collective_s=0.04,
    )


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_timeline_adds_up_to_the_prediction(zero_stage):
    profile = _profile(zero_stage)
    plan = Plan.manual([[8, 1, 8], [2, 3, 0]], zero_stage=zero_stage)
    predicted = predict(profile, plan)
    for rank, spans in enumerate(timeline(profile, plan)):
        assert spans[0].begin_s == 0 and spans[-1].end_s == pytest.approx(predicted.step_s)
        assert all(before.end_s == after.begin_s for before, after in zip(spans, spans[1:], strict=False))
        total_s = {
            kind: math.fsum(span.end_s - span.begin_s for span in spans if span.kind == kind)
            for kind in (COMPUTE, IDLE, COLLECTIVE, OPTIMIZER)
        }
        assert total_s[COMPUTE] + total_s[OPTIMIZER] == pytest.approx(predicted.compute_s[rank])
        assert total_s[IDLE] == pytest.approx(predicted.idle_s[rank])
        assert total_s[COLLECTIVE] == pytest.approx(predicted.collective_s)
        sizes = [span.micro_batch_size for span in spans if span.kind == COMPUTE]
        assert sizes == [size for size in plan.ranks[rank].micro_batch_sizes if size]


def test_a_timeline_needs_a_plan_that_the_profile_can_price():
    with pytest.raises(InfeasiblePlanError, match="fits at most 4"):
        timeline(_profile(0), Plan.manual([8, 5]))

"""Plans, profiles and results as text, and the progress line."""

from __future__ import annotations

import io
import json
import math

import pytest

from poplar.plan import ClusterProfile, Plan, Prediction, RankPlan, RankProfile
from poplar.planning.record import NOT_ON_CARDS, StepRecord
from poplar.progress import Progress, RunFiles
from poplar.tables import (
    closing_table,
    describe_plan,
    format_bytes,
    format_seconds,
    format_sizes,
    join_like_rows,
    plan_table,
    profile_table,
)


def _plan(num_ranks=2):
    rows = [RankPlan(micro_batch_sizes=(4, 4, 1), device="v100-16g")] * (num_ranks - 1)
    return Plan(
        zero_stage=1,
        global_batch_size=9 * (num_ranks - 1) + 2,
        ranks=(*rows, RankPlan(micro_batch_sizes=(2,), device="t4-16g")),
        strategy="exact",
        predicted=Prediction(
            step_s=0.5,
            compute_s=(0.4,) * num_ranks,
            idle_s=(0.05,) * num_ranks,
            peak_memory_bytes=(3 << 30,) * num_ranks,
        ),
        notes=("taken: stage 1: 0.5 s a step", "stage 0: does not fit: rank 1", "rank 1 (t4-16g): smoothed"),
    )


def test_a_plan_is_shown_rank_by_rank_with_its_notes_but_not_the_search():
    text = describe_plan(_plan())
    assert "2 x 4 + 1" in text and "400 ms" in text and "10%" in text and "3.0 GiB" in text
    assert "predicted 500 ms a step (22.0 samples/s)" in text
    assert "- rank 1 (t4-16g): smoothed" in text and "does not fit" not in text


def test_a_manual_plan_shows_what_is_unknown_as_such():
    [header, _, row] = plan_table(Plan.manual([3])).splitlines()
    assert row.split() == ["0", "-", "-", "-", "3", "-", "-", "-"]
    assert header.split()[:2] == ["rank", "card"]


def test_many_like_ranks_share_a_row():
    lines = plan_table(_plan(40)).splitlines()
    assert len(lines) == 4 and lines[2].split()[0] == "0-38" and lines[3].split()[0] == "39"
    assert join_like_rows([("0", "a"), ("1", "b"), ("2", "a")]) == [("0", "a"), ("1", "b"), ("2", "a")]


def test_a_profile_is_shown_with_its_points():
    ranks = (
        RankProfile(device="t4-16g", points=((1, 0.2), (4, 0.4)), max_micro_batch_size=4, state_bytes=5 << 20),
        RankProfile(device="l4", points=(), max_micro_batch_size=0),
    )
    text = profile_table(ClusterProfile(zero_stage=3, ranks=ranks))
    assert "1:200ms 4:400ms" in text and "10.0" in text and "5.0 MiB" in text
    assert text.splitlines()[-1].split() == ["1", "l4", "0", "-", "-", "-"]


def test_the_end_of_a_run_compares_measured_with_predicted_and_with_the_equal_split():
    predicted = Prediction(step_s=0.5, compute_s=(0.4, 0.35), idle_s=(0.0, 0.05), collective_s=0.1)
    text = closing_table(_plan(), StepRecord.from_waits(predicted, 0.4, (0.05, 0.1)), equal_step_s=0.8)
    header, _, first, second = text.splitlines()[:4]
    assert header.split()[-4:] == ["compute", "predicted", "idle", "predicted"]
    assert first.split()[-6:] == ["350", "ms", "400", "ms", "0%", "0%"]
    assert second.split()[-6:] == ["300", "ms", "350", "ms", "12%", "10%"]
    assert "27.5 samples/s, 400 ms a step (predicted 500 ms, 20% shorter)" in text
    assert "13.8 samples/s, 800 ms a step" in text and "2.00 times as fast" in text
    assert "collectives: predicted 100 ms, measured 50 ms" in text
    assert "a step was 20% shorter than predicted; what differs most is compute of rank 0" in text


def test_the_end_of_a_run_on_cards_says_that_parts_are_not_known():
    text = closing_table(_plan(), StepRecord.from_waits(None, 0.4))
    assert text.splitlines()[2].split()[-4:] == ["-", "-", "-", "-"]
    assert text.endswith(NOT_ON_CARDS) and "predicted 500" not in text and "equal split" not in text


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (format_seconds(1.234), "1.23 s"),
        (format_seconds(0.0123), "12 ms"),
        (format_seconds(0.00123), "1.2 ms"),
        (format_bytes(3 << 29), "1.5 GiB"),
        (format_bytes(2048), "2 KiB"),
        (format_bytes(7), "7 B"),
        (format_sizes(()), "0"),
        (format_sizes((5, 5, 0, 5)), "2 x 5 + 0 + 5"),
    ],
)
def test_numbers_are_short(got, expected):
    assert got == expected


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_one_line_on_a_terminal_and_tenths_elsewhere(monkeypatch):
    clock = iter(float(second) for second in range(1000))
    monkeypatch.setattr("poplar.progress.time.monotonic", lambda: next(clock))
    for stream in (_Terminal(), io.StringIO()):
        progress = Progress(20, stream=stream)
        for step in range(1, 21):
            progress.show(step, 2.5, math.nan if step == 1 else 40.0, 5120.0 if step > 1 else math.nan)
        progress.say("held-out loss 2.1")
        text = stream.getvalue()
        assert "step  1/20  loss 2.5000  ETA" in text and "40.0 samples/s  5120 tokens/s  ETA 0:0" in text
        assert text.endswith("held-out loss 2.1\n")
        assert text.count("\n") == (2 if stream.isatty() else 12)
        assert text.count("\r") == (21 if stream.isatty() else 0)


def test_run_files_log_finite_json_and_nothing_without_a_folder(tmp_path):
    with RunFiles(tmp_path / "run") as files:
        files.write("plan.json", "{}")
        files.log(step=1, loss=math.nan)
        files.log(step=2, loss=0.5)
        files.write("record.json", "{}")
        files.remove("record.json", "profile.json")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1, "loss": None}, {"step": 2, "loss": 0.5}]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.jsonl", "plan.json"]
    with RunFiles(None) as files:
        files.write("plan.json", "{}")
        files.remove("plan.json")
        files.log(step=1)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

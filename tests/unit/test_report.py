"""``poplar report``: one page that stands alone, of whole and of unfinished runs, and one line for what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from poplar.allocator import allocate
from poplar.errors import ConfigError
from poplar.fit_config import FitConfig
from poplar.plan import ClusterProfile, Plan, RankProfile
from poplar.planning.record import StepRecord
from poplar.progress import RunFiles
from poplar.report import write_report
from poplar.run_dir import read_run

_EVIL = "<script>alert('$x$')</script>"


def _profile():
    memory = {"memory_points": ((1, 1 << 20), (8, 4 << 20)), "state_bytes": 1 << 19, "memory_limit_bytes": 8 << 20}
    points = ((1, 0.1), (4, 0.25), (8, 0.45))
    fast = RankProfile(device=_EVIL, points=points, max_micro_batch_size=8, point_spreads=((1, 0.2),), **memory)
    slow = RankProfile(device="t4-16g", points=((1, 0.3), (8, 1.4)), max_micro_batch_size=8, **memory)
    return ClusterProfile(zero_stage=1, ranks=(fast, slow), step_collective_s=0.02, notes=(f"a note {_EVIL}",))


def _write_run(folder: Path, *, is_whole=True, is_given=False):
    profile = _profile()
    plan = replace(Plan.manual([[8], [2]]), zero_stage=1) if is_given else allocate(profile, 10)
    if not is_given:
        plan = replace(plan, notes=(*plan.notes, "stage 0: does not fit: rank 1", "taken: stage 1: 0.7 s a step"))
    with RunFiles(folder) as files:
        files.write("config.json", FitConfig(global_batch_size=10, recipe=f"{_EVIL}:recipe").to_json(world_size=2))
        files.write("plan.json", plan.to_json())
        if not is_given:
            files.write("profile.json", profile.to_json())
        for step in range(1, 9):
            strategy = "equal" if step == 5 else plan.strategy
            seconds = None if step == 1 else 1.2 if strategy == "equal" else 0.8
            files.log(step=step, loss=3.0 / step, step_s=seconds, strategy=strategy)
        if is_whole:
            files.log(step=8, eval_loss=0.3125)
            files.write("record.json", StepRecord.from_waits(plan.predicted, 0.8, [0.05, 0.1]).to_json())
    return folder


def test_a_page_tells_the_run_and_stands_alone(tmp_path):
    pytest.importorskip("matplotlib")
    path = write_report(_write_run(tmp_path / "run"))
    page = path.read_text(encoding="utf-8")
    assert path == tmp_path / "run" / "report.html"
    assert page.count("<svg") == 4 and page.count("</svg>") == 4 and page.count("<table>") == 3
    for text in ("Poplar run run", "<td>global_batch_size</td><td>10</td>", "stage 0: does not fit: rank 1", "taken: "):
        assert text in page
    for text in ("step: predicted", "measured 800 ms", "loss 0.3750 in the last", "held-out loss 0.3125 after step 8"):
        assert text in page
    for text in ("800 ms a step, the median of 6 split by exact", "1.20 s a step, the median of 1 split by equal"):
        assert text in page
    assert "<script" not in page and "&lt;script&gt;alert(" in page
    assert set(re.findall(r"https?:[^\"' <]*", page)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.findall(r"(?:src|href)=\"(?!#)", page)


def test_unfinished_runs_and_given_plans_have_a_page_too(tmp_path):
    pytest.importorskip("matplotlib")
    page = write_report(_write_run(tmp_path / "run", is_whole=False, is_given=True)).read_text()
    assert "no record.json: the run has not ended" in page
    assert "nothing was profiled: the plan was given" in page
    assert page.count("<svg") == 1 and "stage 1 was given" in page
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert "no step has been taken" in write_report(tmp_path / "run", tmp_path / "other" / "a.html").read_text()


def test_without_matplotlib_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("poplar.pictures.can_draw", lambda: False)
    page = write_report(_write_run(tmp_path / "run")).read_text()
    assert page.count("pictures need matplotlib") == 2 and "<svg" not in page and page.count("<table>") == 3


def test_a_report_needs_no_torch(tmp_path):
    _write_run(tmp_path / "run")
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom poplar.cli import main\n"
        "result = CliRunner().invoke(main, ['report', 'run', '--out', 'a.html'])\n"
        "assert result.output == 'wrote a.html\\n', result.output\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def _edited(name, old, new):
    def edit(folder):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return edit


def _other_ranks(folder):
    (folder / "record.json").write_text(StepRecord.from_waits(None, 0.8, [0.1]).to_json())


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "plan.json").unlink(), "plan.json is missing: expected a plan"),
        (
            lambda folder: (folder / "metrics.jsonl").unlink(),
            "metrics.jsonl is missing: expected a line for",
        ),
        (lambda folder: (folder / "config.json").write_text("[1]"), "cannot read .*config.json: .*; got list"),
        (lambda folder: (folder / "plan.json").write_bytes(b"\xff\xfe"), "cannot read .*plan.json: expected a plan"),
        (_edited("plan.json", '"ranks": [', '"ranks": 5, "rest": ['), "cannot read .*plan.json"),
        (_edited("plan.json", '"step_s": ', '"step_s": "x", "rest": '), "cannot read .*plan.json: .*'rest'"),
        (_edited("profile.json", '"version": 1', '"version": 0'), "cannot read .*profile.json: .*has version 0"),
        (_edited("profile.json", '"state_bytes": ', '"state_bytes": "x'), "cannot read .*profile.json"),
        (_edited("profile.json", '"zero_stage": 1', '"zero_stage": 2'), "profile.json is of ZeRO stage 2"),
        (_other_ranks, "plan.json has 2, .*record.json has 1"),
        (_edited("metrics.jsonl", '"loss": 1.5', '"loss": "x"'), "metrics.jsonl: .*; line 2: got 'x' for a number"),
        (_edited("metrics.jsonl", '"step": 3, ', ""), "metrics.jsonl: .*; line 3 has no 'step'"),
        (_edited("metrics.jsonl", '{"step": 4', "[4"), "metrics.jsonl: .*; line 4: "),
    ],
)
def test_what_is_missing_or_damaged_is_named(tmp_path, damage, says):
    folder = _write_run(tmp_path / "run")
    damage(folder)
    with pytest.raises(ConfigError, match=says):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_of_a_folder_that_was_used_again_the_last_run_counts_and_a_half_written_line_does_not(tmp_path):
    folder = _write_run(tmp_path / "run")
    with RunFiles(folder) as files:
        files.log(step=1, loss=9.0, step_s=None, strategy="exact")
        files.log(step=1, eval_loss=8.0)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 2, "loss": 7.0})[:-5])
    run = read_run(folder)
    assert [(step.step, step.loss) for step in run.steps] == [(1, 9.0)] and run.eval_losses == ((1, 8.0),)

"""``poplar train`` as users call it: ranks started for it, or by torchrun; what it prints, writes, and refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from poplar.cli import main
from poplar.plan import ClusterProfile, Plan
from poplar.planning.record import StepRecord
from tests.helpers import tiny_recipe

_RECIPES = tiny_recipe.__file__
_ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _plain_machine(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


def _poplar(capfd, *args):
    """Run a command here, its ranks in processes of their own; return exit code, output, errors of all of them."""
    result = CliRunner().invoke(main, args)
    captured = capfd.readouterr()
    return result.exit_code, result.stdout + captured.out, captured.err + result.stderr


def test_train_profiles_plans_trains_and_tells(capfd, tmp_path):
    exit_code, out, err = _poplar(
        capfd,
        *["train", f"{_RECIPES}:without_schedule", "--emulate", "v100-16g,t4-16g", "--global-batch-size", "12"],
        *["--epochs", "10", "--zero-stage", "1", "--compare-steps", "3", "--run-dir", "run"],
    )
    assert exit_code == 0, out + err
    table, closing = out.split("idle  predicted\n")[:2]
    assert "micro-batches" in table and "v100-16g" in table and "t4-16g" in table
    assert "global batch 12, ZeRO stage 1, strategy exact, predicted" in table
    assert re.search(r"this plan: +[\d.]+ samples/s, .* a step \(predicted ", closing)
    assert "held-out loss" in closing and "run directory: run" in closing
    assert re.search(r"step +1/40  loss ", err) and re.search(r"step 40/40  loss .* samples/s", err)
    plan = Plan.load(tmp_path / "run" / "plan.json")
    profile = ClusterProfile.from_json((tmp_path / "run" / "profile.json").read_text())
    assert plan.zero_stage == profile.zero_stage == 1
    assert [row.device for row in plan.ranks] == ["v100-16g", "t4-16g"]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["recipe"] == f"{_RECIPES}:without_schedule"
    losses = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[0]["loss"] > losses[-1]["eval_loss"]
    record = StepRecord.from_json((tmp_path / "run" / "record.json").read_text())
    assert record.predicted == plan.predicted and record.parts is not None
    assert _poplar(capfd, "report", "run")[:2] == (0, "wrote run/report.html\n")
    # The plan that was written serves the next run, on as many ranks.
    exit_code, out, err = _poplar(
        capfd,
        *["train", f"{_RECIPES}:recipe", "--plan", "run/plan.json", "--emulate", "v100-16g,t4-16g", "--steps", "3"],
    )
    assert exit_code == 0, out + err
    assert "strategy exact" in out


def test_profiles_are_written_kept_and_planned_from(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("POPLAR_CACHE_DIR", str(tmp_path / "cache"))
    common = [f"{_RECIPES}:recipe", "--global-batch-size", "6", "--zero-stage", "0", "--emulate", "v100-16g,t4-16g"]
    exit_code, out, err = _poplar(capfd, "profile", *common, "--reuse")
    assert exit_code == 0, out + err
    assert "ZeRO stage 0, fp32: profile.json" in out and "time by batch" in out
    written = (tmp_path / "profile.json").read_text()
    assert ClusterProfile.from_json(written).world_size == 2
    assert list((tmp_path / "cache").rglob("*.json"))
    common_plan = [*common, "--reuse", "--explain", "--measure", "4"]
    exit_code, out, err = _poplar(capfd, "plan", *common_plan, "--out", "measured.json")
    assert exit_code == 0, out + err
    assert re.search(r"^step: predicted .*, measured ", out, re.MULTILINE) and "\nrank 1: compute predicted " in out
    # The kept profile was taken, and a plan from its file is the same one.
    assert _poplar(capfd, "plan", "--profile", "profile.json", "--global-batch-size", "6", "--out", "read.json")[0] == 0
    assert (tmp_path / "measured.json").read_text() == (tmp_path / "read.json").read_text()


@pytest.mark.parametrize(
    ("recipe", "settings", "says"),
    [
        (
            f"{_RECIPES}:recipe",
            ["--nproc", "2", "--global-batch-size", "45"],
            "44 samples, fewer than one global batch",
        ),
        (f"{_RECIPES}:no_parameters", ["--nproc", "2", "--global-batch-size", "4"], "has no parameters"),
        (
            "poplar.recipes.bytes_gpt:recipe",
            ["--emulate", "t4-16g", "--micro-batch-sizes", "90", "--steps", "2"],
            "rank 0 cannot train with micro-batches of up to 90: ",
        ),
    ],
)
def test_bad_recipes_end_every_rank_with_one_line(capfd, recipe, settings, says):
    exit_code, out, err = _poplar(capfd, "train", recipe, *settings)
    assert exit_code == 1
    lines = [line for line in err.splitlines() if not line.startswith("profiling ")]
    assert len(lines) == 1 and lines[0].startswith("poplar: error: ") and says in lines[0], err


def test_an_exception_on_one_rank_ends_all_and_is_shown_with_its_traceback(capfd):
    """I03."""
    began_s = time.monotonic()
    exit_code, out, err = _poplar(capfd, "train", f"{_RECIPES}:broken_loss", "--micro-batch-sizes", "2,2,2")
    assert exit_code == 1 and time.monotonic() - began_s < 30
    assert err.splitlines()[-1] == "poplar: error: rank 1: ValueError: the loss is broken here"
    assert err.count("Traceback") == 1 and "fails_on_rank_1" in err
    assert "StepError" not in out + err


def _torchrun(*args, num_ranks=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)


def test_under_torchrun_the_ranks_are_joined():
    done = _torchrun("-m", "poplar", "train", f"{_RECIPES}:recipe", "--micro-batch-sizes", "5,3", "--steps", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("this plan:") == 1 and "after 4 steps" in done.stdout


def test_examples_run_shortened():
    manual = _torchrun(str(_ROOT / "examples" / "manual_plan.py"), "--zero-stage", "2", "--epochs", "2")
    assert manual.returncode == 0, manual.stderr
    assert "epoch 2: loss" in manual.stdout and "over 8 samples a step" in manual.stdout
    refused = subprocess.run(
        [sys.executable, str(_ROOT / "examples" / "manual_plan.py"), "--micro-batch-sizes", "3,2"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert refused.returncode == 1 and "the plan is for 2 ranks, this run has 1" in refused.stderr
    gpt = _torchrun(
        str(_ROOT / "examples" / "train_gpt.py"), "--steps", "4", "--global-batch-size", "6", "--zero-stage", "0"
    )
    assert gpt.returncode == 0, gpt.stderr
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", gpt.stdout)]
    assert losses[0] > losses[-1] > 0

"""The command line without ranks: help, bad input in one line, which ranks would start, and what is printed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from poplar import cli, launch
from poplar.allocator import allocate
from poplar.cli import doctor as doctor_module
from poplar.cli import main
from poplar.cli.doctor import _Diagnosis, _RankFacts
from poplar.errors import ConfigError, RankFailedError
from poplar.fit_config import FitConfig
from poplar.plan import ClusterProfile, Plan, RankProfile
from poplar.planning.record import StepRecord
from poplar.self_test import Check


def _run(*args):
    return CliRunner().invoke(main, args)


@pytest.fixture(autouse=True)
def _plain_machine(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def started(monkeypatch):
    """Return the calls that would have started ranks."""
    calls = []

    def run_ranks(function, num_ranks, *args):
        calls.append((function.__name__, num_ranks, *args))
        return []

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    return calls


@pytest.fixture
def profile_files(tmp_path):
    names = []
    for stage, collective_s in ((0, 0.05), (2, 0.01)):
        profile = ClusterProfile(
            zero_stage=stage,
            ranks=(
                RankProfile(
                    device="v100-16g",
                    points=((1, 0.02), (8, 0.1)),
                    max_micro_batch_size=8,
                    memory_points=((1, 1 << 30), (8, 4 << 30)),
                    memory_limit_bytes=16 << 30,
                ),
                RankProfile(device="t4-16g", points=((1, 0.06), (4, 0.2)), max_micro_batch_size=4),
            ),
            step_collective_s=collective_s,
        )
        names.append(str(tmp_path / f"profile.z{stage}.json"))
        (tmp_path / f"profile.z{stage}.json").write_text(profile.to_json())
    return names


def test_help_lists_every_command_and_each_has_help():
    listed = _run("--help")
    assert listed.exit_code == 0
    for name in cli._COMMANDS:
        assert f"\n  {name} " in listed.output
        own = _run(name, "--help")
        assert own.exit_code == 0 and own.output.startswith("Usage: "), name


def test_help_and_planning_from_files_need_no_torch(profile_files):
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom poplar.cli import main\n"
        "for args in (['--help'], ['train', '--help'], sys.argv[1:]):\n"
        "    result = CliRunner().invoke(main, args)\n    assert result.exit_code == 0, result.output\n"
        "print('torch' in sys.modules)"
    )
    arguments = [word for name in profile_files for word in ("--profile", name)]
    command = [sys.executable, "-c", code, "plan", *arguments, "--global-batch-size", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


@pytest.mark.parametrize(
    ("args", "exit_code", "says"),
    [
        (["train", "--global-batch-size", "0"], 2, "0 is not in the range x>=1"),
        (["train", "--emulate", "v101-16g:2"], 1, "unknown card 'v101-16g'; did you mean 'v100-16g'?"),
        (["train", "no_such_module:recipe", "--global-batch-size", "4"], 1, "no module 'no_such_module'"),
        (["train", "no_such_file.py:recipe", "--global-batch-size", "4"], 1, "no recipe file 'no_such_file.py'"),
        (["train", "some.module:recipe"], 2, "needs --global-batch-size"),
        (["train", "--nproc", "3", "--micro-batch-sizes", "3,5"], 1, "has 2 entries, this run has 3 ranks"),
        (["train", "--emulate", "t4-16g:3", "--micro-batch-sizes", "[24,12]"], 1, "2 entries, this run has 3 ranks"),
        (["train", "--micro-batch-sizes", "3,x"], 2, "one entry a rank"),
        (["train", "--micro-batch-sizes", "3,5", "--global-batch-size", "9"], 1, "add up to 8 samples"),
        (["train", "--micro-batch-sizes", "[[2,2],[3]]", "--zero-stage", "7"], 2, "is not one of auto, 0, 1, 2, 3"),
        (["train", "--plan", "missing.json"], 1, "cannot read the plan 'missing.json'"),
        (["train", "--memory-fraction", "0.5,nonsense"], 2, "not a list of numbers"),
        (["train", "--memory-fraction", "1.5"], 1, "above 0 and at most 1"),
        (["train", "--emulate", "t4-16g:2", "--memory-fraction", "0.1,0.2,0.3"], 1, "3 entries, this run has 2 ranks"),
        (["train", "--emulate", "t4-16g:2", "--nproc", "3"], 1, "names 2 cards, this run has 3 ranks"),
        (["train", "--strategy", "fast"], 2, "'fast' is not one of"),
        (["plan", "--profile", "missing.json"], 1, "cannot read the profile 'missing.json'"),
        (["plan", "--profile", "a.json", "--measure", "3"], 2, "does not go with --profile"),
        (["report", "missing"], 1, "no run directory 'missing'"),
        (["no-such-command"], 2, "No such command"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_any_rank_starts(started, args, exit_code, says):
    """H06, and what a user mistypes."""
    result = _run(*args)
    assert result.exit_code == exit_code, result.output
    assert says in result.stderr
    assert result.stderr.startswith("poplar: error: ") and result.stderr.count("\n") == 1
    assert isinstance(result.exception, SystemExit) and not started


def test_a_plan_for_another_number_of_ranks_names_both(started, tmp_path):
    Plan.manual([3, 5]).save(tmp_path / "plan.json")
    result = _run("train", "--plan", "plan.json", "--nproc", "4")
    assert result.exit_code == 1 and "the plan is for 2 ranks, this run has 4" in result.stderr
    assert not started


def test_without_gpu_and_words_four_emulated_cards_train_the_default_recipe(started):
    assert _run("train").exit_code == 0
    [(name, num_ranks, reference, config)] = started
    assert (name, num_ranks, reference) == ("train_rank", 4, "poplar.recipes.bytes_gpt:recipe")
    assert config.emulate == "v100-16g:2,t4-16g:2" and config.steps > 0 and config.global_batch_size > 0
    assert config.run_dir is not None and config.run_dir.startswith("runs/")


@pytest.mark.parametrize(
    ("num_cards", "args", "num_ranks", "emulate"),
    [
        (3, ["train"], 3, None),
        (3, ["train", "--nproc", "2"], 2, None),
        (0, ["train", "--nproc", "2"], 2, None),
        (0, ["train", "--micro-batch-sizes", "[24,12,16,24]"], 4, None),
        (0, ["train", "--micro-batch-sizes", "3,5", "--emulate", "t4-16g:2"], 2, "t4-16g:2"),
        (0, ["train", "--emulate", "a100-40g,v100-16g:2"], 3, "a100-40g,v100-16g:2"),
        (0, ["train", "poplar.recipes.bytes_gpt:recipe", "--global-batch-size", "8"], 1, None),
        (0, ["profile"], 4, "v100-16g:2,t4-16g:2"),
    ],
)
def test_ranks_follow_from_cards_and_wishes(started, monkeypatch, num_cards, args, num_ranks, emulate):
    """H05: batches by rank also say how many ranks there are."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_cards)
    result = _run(*args)
    assert result.exit_code == 0, result.output
    assert started[0][1] == num_ranks
    assert started[0][3].emulate == emulate


def test_plan_measures_on_request_in_the_same_start_of_the_ranks(monkeypatch):
    profile = ClusterProfile(
        zero_stage=1, ranks=(RankProfile(device="t4-16g", points=((1, 0.1), (8, 0.4)), max_micro_batch_size=8),)
    )
    calls = []

    def run_ranks(function, num_ranks, *args):
        calls.append((function.__name__, args[-1]))
        predicted = allocate(profile, 8).predicted
        return [profile.to_json()], StepRecord.from_waits(predicted, 0.5, [0.1]).to_json()

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    result = _run("plan", "--emulate", "t4-16g", "--global-batch-size", "8", "--measure", "3")
    assert result.exit_code == 0, result.output
    assert calls == [("plan_rank", 3)]
    assert "step: predicted 400 ms, measured 500 ms (25% longer)" in result.stdout
    assert "what differs most is collectives: 100 ms instead of 0.0 ms, 100 ms more" in result.stdout


def test_under_a_launcher_its_world_size_counts(started, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert _run("train", "--micro-batch-sizes", "1,1,1,1,2").exit_code == 0
    assert started[0][1] == 5
    assert "this run has 5 ranks" in _run("train", "--micro-batch-sizes", "1,1").stderr


def test_flags_arrive_as_settings(started):
    result = _run(
        *["train", "--micro-batch-sizes", "3+3,2", "--zero-stage", "1", "--precision", "bf16", "--seed", "7"],
        *["--max-grad-norm", "0.5", "--memory-fraction", "0.15,1.0", "--eval-every", "9", "--run-dir", "there"],
        *["--steps", "11", "--compare-steps", "0", "--num-workers", "2", "--no-progress", "--backend", "gloo"],
    )
    assert result.exit_code == 0, result.output
    assert started[0][-1] == FitConfig(
        global_batch_size=8,
        micro_batch_sizes=((3, 3), (2,)),
        zero_stage=1,
        precision="bf16",
        seed=7,
        max_grad_norm=0.5,
        memory_fractions=(0.15, 1.0),
        eval_every=9,
        run_dir="there",
        steps=11,
        num_workers=2,
        progress=False,
        backend="gloo",
        recipe="poplar.recipes.bytes_gpt:recipe",
    )


def test_plan_shows_every_rank_and_why_and_writes_what_train_reads(profile_files, tmp_path):
    """H07."""
    result = _run(
        *["plan", "--profile", profile_files[0], "--profile", profile_files[1], "--global-batch-size", "20"],
        *["--out", "plan.json", "--explain"],
    )
    assert result.exit_code == 0, result.output
    header, _, fast, slow = result.stdout.splitlines()[:4]
    for column in ("card", "largest", "samples/s", "micro-batches", "compute", "idle", "memory"):
        assert column in header
    assert "v100-16g" in fast and "80.0" in fast and "of 16.0 GiB" in fast
    assert "t4-16g" in slow and "20.0" in slow
    assert "stage 0: " in result.stdout and "stage 2: " in result.stdout
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.global_batch_size == 20 and plan.zero_stage == 2 and plan.predicted is not None
    assert plan.ranks[0].num_samples > plan.ranks[1].num_samples > 0


@pytest.mark.parametrize(
    ("error", "exit_code", "lines"),
    [
        (ConfigError("expected a, got b"), 1, ["poplar: error: expected a, got b"]),
        (
            RankFailedError("rank 1: ValueError: boom", "Traceback ...\nValueError: boom"),
            1,
            ["Traceback ...", "ValueError: boom", "poplar: error: rank 1: ValueError: boom"],
        ),
        (KeyboardInterrupt(), 130, ["poplar: error: interrupted"]),
    ],
)
def test_errors_of_ranks_are_told_once(monkeypatch, error, exit_code, lines):
    def run_ranks(*args):
        raise error

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    result = _run("train", "--micro-batch-sizes", "1,1")
    assert (result.exit_code, result.stderr.splitlines()) == (exit_code, lines)


def _diagnosis(has_code="yes (sm_75)", problem=""):
    facts = _RankFacts(
        host="a", card="t4-16g", vendor="nvidia", identity="GPU-1", usable="14 GiB", driver="1", has_code=has_code
    )
    return _Diagnosis(
        backend="nccl",
        facts=[facts, facts],
        checks=[Check(name="all-reduce", seconds=0.001, problem=problem)],
        bandwidth={(0, 1): 3.0 * 2**30},
    )


def test_doctor_shows_cards_links_and_checks(monkeypatch):
    monkeypatch.setattr(launch, "run_ranks", lambda *args: _diagnosis())
    result = _run("doctor")
    assert result.exit_code == 0, result.output
    for text in ("torch", "t4-16g", "GPU-1", "yes (sm_75)", "backend: nccl", "all-reduce", "right", "3.0 GiB/s"):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("diagnosis", "says"),
    [
        (_diagnosis(problem="rank 1: expected 3 at element 7, got 0 (1 wrong)"), "NCCL_P2P_DISABLE=1"),
        (_diagnosis(has_code="NO (sm_61)"), "no machine code for the cards of ranks 0, 1"),
    ],
)
def test_doctor_fails_on_wrong_values_and_missing_code(monkeypatch, diagnosis, says):
    """I05."""
    monkeypatch.setattr(launch, "run_ranks", lambda *args: diagnosis)
    result = _run("doctor")
    assert result.exit_code == 1 and says in result.stderr
    assert "all well" not in result.stdout


def test_doctor_examines_two_cpu_ranks_or_as_many_as_asked(monkeypatch):
    asked = []

    def run_ranks(function, num_ranks, *args):
        asked.append((function is doctor_module.diagnose_rank, num_ranks))
        return _diagnosis()

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    for args in ([], ["--nproc", "1"], ["--emulate", "t4-16g:3"]):
        assert _run("doctor", *args).exit_code == 0
    assert asked == [(True, 2), (True, 1), (True, 3)]


def test_settings_are_written_with_what_the_run_adds():
    written = json.loads(FitConfig(global_batch_size=8, micro_batch_sizes=((3, 3), (2,))).to_json(world_size=2))
    assert written["world_size"] == 2 and written["micro_batch_sizes"] == [[3, 3], [2]]
    assert written["zero_stage"] == "auto" and "plan" not in written


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"steps": 0}, "steps must be an integer, 1 or more; got 0"),
        ({"global_batch_size": True}, "global_batch_size must be an integer"),
        ({"zero_stage": True}, "zero_stage must be one of auto, 0, 1, 2, 3"),
        ({"precision": "fp8"}, "precision must be one of"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0"),
        ({"steps": 3, "epochs": 1}, "steps=3 and epochs=1 both say"),
        ({"plan": Plan.manual([4, 5])}, "the plan is for a global batch of 9, global_batch_size is 8"),
        ({"plan": Plan.manual([4, 4]), "micro_batch_sizes": ((4,), (4,))}, "give one of them"),
    ],
)
def test_wrong_settings_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        FitConfig(**{"global_batch_size": 8, **settings})

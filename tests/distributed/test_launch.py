"""Ranks started by elastic launch: results, the error that came first, and an end for everybody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from poplar.errors import ConfigError, RankFailedError, StepError
from poplar.launch import end_rank, run_ranks
from poplar.zero.comm import join_process_group


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


def _fail_on_rank_1(how):
    join_process_group()
    if dist.get_rank() == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "own error":
            raise ConfigError("rank 1 wants a larger batch")
        if how == "exit":
            sys.exit(0)
        if how == "watchdog":
            end_rank(ConfigError("rank 1 gave up"))
        raise ValueError("boom")
    if how == "told by others":
        # A rank that hears of another's failure raises at once, maybe before the failing one has reported.
        raise StepError("rank 1 failed in a step")
    dist.all_reduce(torch.ones(1))


def _greet(word):
    join_process_group()
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return word, float(total), os.environ["LOCAL_WORLD_SIZE"]


def test_what_rank_0_returns_comes_back():
    before = dict(os.environ)
    assert run_ranks(_greet, 2, "hello") == ("hello", 1.0, "2")
    assert {name: value for name, value in os.environ.items() if name in ("OMP_NUM_THREADS", "RANK")} == {
        name: value for name, value in before.items() if name in ("OMP_NUM_THREADS", "RANK")
    }


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ("any error", RankFailedError, "^rank 1: ValueError: boom$"),
        ("told by others", RankFailedError, "^rank 1: ValueError: boom$"),
        ("own error", ConfigError, "^rank 1 wants a larger batch$"),
        ("watchdog", ConfigError, "^rank 1 gave up$"),
        ("exit", RankFailedError, r"^rank 1 was ended by sys.exit\(0\) in the recipe"),
        ("kill", RankFailedError, "rank 1 (left no message|was ended by SIGKILL)"),
    ],
)
def test_the_first_error_ends_every_rank_and_is_the_one_shown(how, error, says):
    """I03."""
    began_s = time.monotonic()
    with pytest.raises(error, match=says) as caught:
        run_ranks(_fail_on_rank_1, 3, how)
    assert time.monotonic() - began_s < 30
    if how == "any error":
        details = caught.value.details
        assert details.endswith("ValueError: boom") and "_fail_on_rank_1" in details
        assert os.path.join("poplar", "launch.py") not in details


def test_under_a_launcher_the_function_is_only_called(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert run_ranks(os.getpid, 5) == os.getpid()


_WAITING = """
import os, sys, time
from poplar.launch import run_ranks
def wait():
    print(os.getpid(), flush=True)
    time.sleep(100)
if __name__ == "__main__":
    try:
        run_ranks(wait, 2)
    except KeyboardInterrupt:
        sys.exit(130)
"""


def test_ctrl_c_ends_parent_and_ranks_without_tracebacks(tmp_path):
    script = tmp_path / "waiting.py"
    script.write_text(_WAITING)
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    ranks = [int(process.stdout.readline()) for _ in range(2)]
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    for rank in ranks:
        status = Path(f"/proc/{rank}/stat")
        assert not status.exists() or ") Z " in status.read_text(), f"rank process {rank} is still there"

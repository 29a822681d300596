"""The benchmarks' own parts: statistics and counters are right, every script starts, a tiny run comes out whole."""

from __future__ import annotations

import json
import math
import random
import socket
import statistics
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from benchmarks import collectives, common, contestants, equal_ranks, gpu, overhead, shares, summary, unlike_ranks
from benchmarks.counters import bytes_sent, metered
from benchmarks.gpt import SIZES, Workload


@pytest.mark.parametrize("script", [collectives, equal_ranks, gpu, overhead, unlike_ranks])
def test_script_starts(script):
    result = CliRunner().invoke(script.main, ["--help"])
    assert result.exit_code == 0 and "--out" in result.output and "--write" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_gpu_script_skips_clearly():
    result = CliRunner().invoke(gpu.main, [])
    assert result.exit_code == 0 and result.output.startswith("skipped: this machine has no GPU")


def test_unknown_system_is_named():
    result = CliRunner().invoke(equal_ranks.main, ["--systems", "local,magic"])
    assert result.exit_code != 0 and "magic" in result.output and "poplar-z3" in result.output


def test_summary_has_a_row_for_every_stage_and_says_what_has_not_been_measured():
    def record(configuration: dict[str, Any], key: str, systems: list[str]) -> dict[str, Any]:
        interval = {"median": 0.9, "low": 0.8, "high": 1.0}
        rows = [{"system": name, key: interval, "over_best_peer": interval, "best_peer": "ddp"} for name in systems]
        about = {"gpu": None, "cpu": "a processor", "cores": 2, "system": "Linux", "torch": "2"}
        return {"configuration": configuration, "machine": about, "rows": rows}

    stages = [f"poplar-z{stage}" for stage in range(4)]
    equal = [
        record({**summary.EQUAL, "accumulation": 1}, "over_local", [*stages, "poplar-z3-gloo"]),
        record({**summary.EQUAL, "accumulation": 4}, "over_local", stages),
    ]
    unlike = [record(summary.UNLIKE, "share_of_ideal", stages)]
    lines = summary.summary(equal, unlike).split("\n")
    assert [line[:5] for line in lines[2:6]] == [f"| {stage} |" for stage in range(4)]
    assert lines[2].count("0.900 [0.800, 1.000] ddp") == 3 and lines[5].count("ddp") == 4
    with pytest.raises(click.ClickException, match="'accumulation': 4"):
        summary.summary(equal[:1], unlike)


# Rounds and statistics.


def test_every_task_has_every_place_in_the_rounds():
    names = ["a", "b", "c"]
    orders = [common.round_order(names, number) for number in range(6)]
    assert all(sorted(order) == names for order in orders)
    for place in range(3):
        assert {order[place] for order in orders} == set(names)
    followers = {(first, second) for order in orders for first, second in zip(order, order[1:], strict=False)}
    assert len(followers) == 6, "neighbours must change, or one task always runs in another's wake"


def test_interleave_keeps_rounds_apart():
    calls = iter(range(100))
    taken = common.interleave({"a": lambda: float(next(calls)), "b": lambda: float(next(calls))}, rounds=3)
    assert sorted(taken["a"] + taken["b"]) == [0, 1, 2, 3, 4, 5]
    for number, (a, b) in enumerate(zip(taken["a"], taken["b"], strict=True)):
        assert {a, b} == {2.0 * number, 2.0 * number + 1}


def test_slowest_rank_counts():
    by_rank = [{"a": [1.0, 5.0], "b": [2.0, 2.0]}, {"a": [3.0, 4.0], "b": [1.0, 6.0]}]
    assert common.slowest(by_rank) == {"a": [3.0, 5.0], "b": [2.0, 6.0]}


def test_ratios_are_paired_by_round():
    others = [1.0, 9.0, 3.0, 30.0, 0.2]
    ratio = common.paired_ratio([1.2 * value for value in others], others)
    assert ratio.median == pytest.approx(1.2) and ratio.low == pytest.approx(1.2) and ratio.high == pytest.approx(1.2)


def test_interval_of_a_median():
    values = [3.0, 1.0, 2.0, 10.0, 4.0, 5.0, 2.5]
    interval = common.median_interval(values)
    assert interval == common.median_interval(values)
    assert interval.median == 3.0 and min(values) <= interval.low < 3.0 < interval.high <= max(values)
    assert common.median_interval([7.0] * 15) == common.Interval(median=7.0, low=7.0, high=7.0)


def test_interval_covers_the_true_median_about_as_often_as_it_says():
    generator = random.Random(1)
    hits = 0
    for _ in range(200):
        interval = common.median_interval([generator.lognormvariate(0, 0.3) for _ in range(15)], resamples=300)
        hits += interval.low <= 1.0 <= interval.high
    assert 0.88 <= hits / 200 <= 0.99


# Counters.


def test_bytes_on_the_wire_are_counted_by_the_kernel():
    if bytes_sent() is None:
        pytest.skip("this system does not tell")
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as sender, server.accept()[0] as receiver:
            before = bytes_sent() or 0
            sender.sendall(bytes(123_456))
            left = 123_456
            while left:
                left -= len(receiver.recv(65536))
            assert (bytes_sent() or 0) - before == 123_456


def test_memory_is_counted_from_before_the_system_was_built():
    kept: list[torch.Tensor] = []

    def use(made):
        temporary = torch.zeros(1 << 20)  # 4 MiB
        kept[:] = [made + temporary[: 1 << 18]]

    _, reading = metered(lambda: torch.zeros(1 << 18), use)
    mib = 1 << 20
    # The system, its result and the one before it, and the temporary.
    assert reading.peak_bytes == (1 + 1 + 1 + 4) * mib
    assert reading.state_bytes == 2 * mib


# What is measured.


def test_model_starts_as_a_random_one_and_alike_everywhere():
    workload = Workload(model="gpt-xs")
    first, second = workload.build_model(), workload.build_model()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    with torch.no_grad():
        loss = first(*workload.samples(4, seed=3)).item()
    assert loss == pytest.approx(math.log(SIZES["gpt-xs"].vocab), rel=0.05)


def test_formulas_of_traffic():
    settings: dict[str, Any] = dict(model="gpt-xs", ranks=4, optimizer="foreach", micro_batch_size=4)
    config = equal_ranks.Configuration(accumulation=4, precision="fp32", **settings)
    sent = [equal_ranks.formula_bytes(stage, 1000, config) for stage in range(4)]
    assert sent == [2 * 3000, 2 * 3000, 5 * 3000, 12 * 3000]
    config = equal_ranks.Configuration(accumulation=1, precision="bf16", **settings)
    sent = [equal_ranks.formula_bytes(stage, 1000, config) for stage in range(4)]
    assert sent == [6000, 4500, 4500, 6000]


def test_different_work_is_refused():
    good = {"first_loss": 7.0, "last_loss": 6.5}
    counts = {"local": {**good, "last_loss": 6.9}, "ddp": good, "fsdp2": good, "poplar-z0": good}
    equal_ranks.check_losses(counts, 1e-4)
    with pytest.raises(RuntimeError, match="fsdp2"):
        equal_ranks.check_losses({**counts, "fsdp2": {**good, "last_loss": 6.6}}, 1e-4)


def test_best_peer_is_the_fastest_of_the_stage():
    rows: list[dict[str, Any]] = [
        {"system": "ddp", "stage": 0, "step_s": 1.0, "times_s": [1.0, 1.0]},
        {"system": "fsdp2", "stage": 3, "step_s": 3.0, "times_s": [3.0, 3.0]},
        {"system": "ds3", "stage": 3, "step_s": 2.0, "times_s": [2.0, 2.0]},
        {"system": "poplar-z3", "stage": 3, "step_s": 1.5, "times_s": [1.5, 1.5]},
    ]
    equal_ranks.compare_with_peers(rows)
    assert rows[3]["best_peer"] == "ds3" and rows[3]["over_best_peer"]["median"] == 0.75
    assert "best_peer" not in rows[0]


def test_micro_batches_to_try_divide_the_share():
    assert contestants.candidates(32) == [4, 8, 16, 32]
    assert contestants.candidates(22) == [22]
    batches = contestants.cut(Workload(model="gpt-xs"), 8, 4, seed=0)
    assert [len(x) for x, _ in batches] == [4, 4]
    config = contestants.Configuration(
        shares=(1.0, 1.0, 0.25), model="gpt-xs", global_batch_size=64, precision="fp32", optimizer="foreach"
    )
    assert config.equal_share == 22


def test_shares_of_a_core():
    assert unlike_ranks.parse_shares("1+0.3") == (1.0, 0.3)
    assert sum(shares.fit_to_cores((1.0, 1.0, 0.25), 1.8)) == pytest.approx(1.8)
    assert shares.fit_to_cores((1.0, 0.3), 2.0) == (1.0, 0.3)
    for share in (0.25, 0.3, 0.5):
        weight = 1.25 ** -shares.nice_difference(share)
        assert weight / (weight + 1) == pytest.approx(share, abs=0.02)
    assert unlike_ranks.idle_share([0.3, 0.3], [2.0, 2.0], share=0.3) == pytest.approx(0.5)


def test_quotas_are_set_and_removed():
    try:
        quota = shares.CpuQuota((1.0, 0.3))
    except OSError as error:
        pytest.skip(f"no CPU quota here: {error}")
    folders = list(quota._folders)
    try:
        name = "cpu.max" if (folders[1] / "cpu.max").exists() else "cpu.cfs_quota_us"
        found = int((folders[1] / name).read_text().split()[0])
        assert found == round(0.3 * shares.PERIOD_US)
    finally:
        quota.close()
    assert len(folders) == 2 and not any(folder.exists() for folder in folders)


# Results.


def test_runs_replace_those_of_the_same_configuration(tmp_path: Path):
    path = tmp_path / "results" / "runs.json"
    common.merge_runs(path, [{"configuration": {"shares": (1, 2)}, "value": 1}, {"configuration": {"shares": (3,)}}])
    runs = common.merge_runs(path, [{"configuration": {"shares": (1, 2)}, "value": 2}])
    assert [run["configuration"]["shares"] for run in runs] == [[1, 2], [3]]
    assert runs[0]["value"] == 2 and json.loads(path.read_text())["runs"] == runs


def test_tables_go_between_their_markers(tmp_path: Path):
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- benchmark:a -->\nold\n<!-- end of benchmark:a -->\nafter\n")
    common.write_between_markers(path, "a", common.markdown_table(["x", "y"], [["1", "2"]]))
    table = "| x | y |\n| --- | --- |\n| 1 | 2 |"
    assert path.read_text() == f"before\n<!-- benchmark:a -->\n{table}\n<!-- end of benchmark:a -->\nafter\n"
    with pytest.raises(ValueError, match="benchmark:b"):
        common.write_between_markers(path, "b", table)


def test_tiny_run_on_equal_ranks():
    config = equal_ranks.Configuration(
        model="gpt-xs", ranks=2, accumulation=1, precision="fp32", optimizer="foreach", micro_batch_size=1
    )
    record = equal_ranks.run(config, ["local", "ddp", "poplar-z3"], rounds=1, burst=1)
    local, ddp, poplar = record["rows"]
    assert ddp["last_loss"] == pytest.approx(poplar["last_loss"], rel=1e-4)
    assert poplar["over_local"]["median"] == pytest.approx(poplar["times_s"][0] / local["times_s"][0])
    assert poplar["state_bytes"] < local["state_bytes"] < ddp["state_bytes"]
    if local["sent_bytes"] is not None:
        assert local["sent_bytes"] == 0
        assert ddp["sent_bytes"] == pytest.approx(ddp["formula_bytes"], rel=0.02)
        assert 0.5 * poplar["formula_bytes"] < poplar["sent_bytes"] < 1.02 * poplar["formula_bytes"]
    assert statistics.median(poplar["times_s"]) == poplar["step_s"] > 0
    text = equal_ranks.table(record)
    assert text.count("\n") == 6 and "| poplar-z3 | 3 |" in text

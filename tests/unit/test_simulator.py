"""Simulated profiles, runs and advice: formulas, bounds, and public measurements where they are at hand."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poplar.catalog import card_names, find_card, parse_cluster
from poplar.errors import ConfigError, InfeasiblePlanError
from poplar.plan import ClusterProfile, RankProfile
from poplar.planning.cost import predict
from poplar.simulation.advice import advise
from poplar.simulation.interconnect import Interconnect, Ring, parse_link
from poplar.simulation.model_spec import ModelSpec
from poplar.simulation.reproduction import CLUSTERS, MODELS, reproduce
from poplar.simulation.reproduction_page import page
from poplar.simulation.step_model import Cluster, choose_precision, compute_s, simulate_profile, state_bytes
from poplar.simulation.transfer import transfer_profile
from poplar.simulator import best_run, describe_cluster, gain_parts, parse_tokens, simulate, split_by_speed

_SMALL = ModelSpec.transformer(layers=8, width=512, heads=8, vocab=1000, seq_len=256, name="small")
_BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "simulator_accuracy.py"


def _cluster(text: str, **link: Any) -> Cluster:
    return Cluster(names=parse_cluster(text), link=Interconnect(**link))


# The step model


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_model_state_is_as_the_stages_say(num_ranks: int) -> None:
    whole, n = 4 * _SMALL.num_parameters, num_ranks
    expected = [4 * whole, 2 * whole + 2 * whole / n, whole + 3 * whole / n, 4 * whole / n]
    assert [state_bytes(_SMALL, stage, 1 / n, "fp32") for stage in range(4)] == pytest.approx(expected)
    assert state_bytes(_SMALL, 0, 1.0, "fp16") == 18 * _SMALL.num_parameters


def test_compute_saturates_with_the_micro_batch() -> None:
    card = find_card("a100-40g")
    seconds = [compute_s(card, _SMALL, size, "fp16") for size in (1, 2, 3, 64)]
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0])
    assert 1 / seconds[0] < 2 / seconds[1] < 64 / seconds[3] < 1 / (seconds[1] - seconds[0])
    assert compute_s(card, _SMALL, 1, "fp16") < compute_s(card, _SMALL, 1, "fp32")


def test_checkpointing_adds_a_forward_and_frees_memory() -> None:
    card, spec = find_card("t4"), ModelSpec.preset("llama-0.5b")
    slope = [compute_s(card, spec, 2, "fp16", flag) - compute_s(card, spec, 1, "fp16", flag) for flag in (False, True)]
    assert slope[1] == pytest.approx(4 / 3 * slope[0])
    plain, freed = (simulate_profile(_cluster("t4:8"), spec, 3, checkpointing=flag) for flag in (False, True))
    assert freed.ranks[0].max_micro_batch_size > plain.ranks[0].max_micro_batch_size


@pytest.mark.parametrize("stage", range(4))
def test_profiles_are_like_measured_ones(stage: int) -> None:
    profile = simulate_profile(_cluster("v100:2,t4:2"), _SMALL, stage)
    assert ClusterProfile.from_json(profile.to_json()) == profile
    assert profile.precision == "fp16" and [rank.device for rank in profile.ranks[1:3]] == ["v100-16g", "t4-16g"]
    for rank in profile.ranks:
        assert rank.points[-1][0] == rank.max_micro_batch_size > 1
        assert rank.state_bytes is not None and rank.memory_limit_bytes is not None
        assert rank.state_bytes < rank.memory_points[0][1] <= rank.memory_points[-1][1] <= rank.memory_limit_bytes
    assert (profile.micro_step_collective_s > 0) == (stage >= 2)
    assert profile.step_collective_s > 0


def test_the_largest_batch_is_the_largest_that_fits() -> None:
    profile = simulate_profile(_cluster("t4:4"), ModelSpec.preset("llama-0.5b"), 3)
    rank = profile.ranks[0]
    assert rank.memory_limit_bytes is not None
    sample = ModelSpec.preset("llama-0.5b").activation_bytes("fp16", False)
    peak = dict(rank.memory_points)[rank.max_micro_batch_size]
    assert peak <= rank.memory_limit_bytes < peak + sample


def test_a_small_shard_leaves_room_for_a_larger_batch() -> None:
    cluster = replace(_cluster("a100-40g:2,t4:2"), shard_ratios=(3.0, 3.0, 1.0, 1.0))
    spec = ModelSpec.preset("llama-1.1b", 512)
    even, uneven = (simulate_profile(one, spec, 3) for one in (replace(cluster, shard_ratios=None), cluster))
    assert uneven.shard_ratios == (0.375, 0.375, 0.125, 0.125)
    assert uneven.ranks[2].max_micro_batch_size > even.ranks[2].max_micro_batch_size
    assert uneven.ranks[0].max_micro_batch_size < even.ranks[0].max_micro_batch_size
    assert uneven.micro_step_collective_s >= even.micro_step_collective_s


def test_a_card_without_room_for_a_sample_holds_shards_only() -> None:
    spec = ModelSpec.preset("llama-1.1b", 4096)
    profile = simulate_profile(_cluster("a100-80g:4,rtx3060:1"), spec, 3)
    assert profile.ranks[4].max_micro_batch_size == 0 and profile.ranks[4].points == ()
    assert profile.ranks[0].max_micro_batch_size > 0


def test_one_rank_communicates_nothing() -> None:
    for stage in range(4):
        profile = simulate_profile(_cluster("t4"), _SMALL, stage)
        assert profile.micro_step_collective_s == profile.step_collective_s == 0.0


def test_compute_hides_collectives_and_a_faster_network_shortens_them() -> None:
    for stage in range(4):
        slow, fast = (
            simulate_profile(_cluster("v100:2,t4:2", inter_bytes_per_s=rate), _SMALL, stage, micro_step_s=0.0)
            for rate in (1e9, 10e9)
        )
        hidden = simulate_profile(_cluster("v100:2,t4:2", inter_bytes_per_s=1e9), _SMALL, stage, micro_step_s=100.0)

        def total(profile: ClusterProfile) -> float:
            return profile.micro_step_collective_s + profile.step_collective_s

        assert total(fast) < total(slow)
        assert 0 < total(hidden) < total(slow)


def test_precision_is_what_all_cards_have() -> None:
    cards = [find_card(name) for name in ("a100", "v100")]
    assert choose_precision(cards, "auto") == "fp16"
    assert choose_precision(cards[:1], "auto") == "bf16"
    with pytest.raises(ConfigError, match="v100-16g does not compute in bfloat16"):
        choose_precision(cards, "bf16")
    with pytest.raises(ConfigError, match="precision must be one of"):
        choose_precision(cards, "fp8")


# Links


def test_ring_costs() -> None:
    ring = Ring(bytes_per_s=1e9, latency_s=0.0, shares=(0.25,) * 4)
    assert ring.shard_s(1e9) == pytest.approx(0.75)
    assert ring.all_reduce_s(1e9) == pytest.approx(1.5)
    assert replace(ring, shares=(0.3, 0.3, 0.3, 0.1)).shard_s(1e9) == pytest.approx(0.9)  # paced by the largest shard
    assert replace(ring, shares=(0.7, 0.1, 0.1, 0.1)).shard_s(1e9) == pytest.approx(1.0)  # one broadcast a rank
    assert replace(ring, latency_s=0.01).shard_s(0.0) == pytest.approx(0.03)


def test_the_slowest_link_sets_the_pace() -> None:
    link = Interconnect(inter_bytes_per_s=10e9)
    a100, v100, v100s, a800 = (find_card(name) for name in ("a100", "v100", "v100s", "a800"))
    assert link.ring_bytes_per_s([a100]) == math.inf
    assert link.ring_bytes_per_s([a100] * 8) == pytest.approx(240e9)
    assert link.ring_bytes_per_s([a800] * 2) < link.ring_bytes_per_s([a100] * 2)
    assert link.ring_bytes_per_s([v100s] * 2) == pytest.approx(0.7 * 15.8e9)
    assert link.ring_bytes_per_s([a100] * 9) == pytest.approx(8e9)  # two nodes
    assert link.ring_bytes_per_s([a100, v100]) == pytest.approx(8e9)  # unlike cards, unlike nodes
    assert replace(link, one_node=True).ring_bytes_per_s([a100, v100]) == pytest.approx(0.7 * 15.8e9)
    assert replace(link, intra_bytes_per_s=1e9).ring_bytes_per_s([a100] * 2) == pytest.approx(1e9)


def test_links_from_text() -> None:
    link = parse_link("inter=25,intra=50,latency-us=5,node=4")
    assert (link.inter_bytes_per_s, link.intra_bytes_per_s, link.ranks_per_node) == (25e9, 50e9, 4)
    assert link.latency_s == pytest.approx(5e-6)
    assert parse_link("node=all,intra=card") == Interconnect(one_node=True)
    for text, message in (
        ("speed=3", "got 'speed=3'"),
        ("inter=fast", "needs a number"),
        ("inter=0", "must be above 0"),
        ("node=0.5", "must be a whole number"),
        ("inter=nan", "must be above 0"),
        ("", "got ''"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_link(text)


# Runs


def test_every_strategy_plans_the_whole_batch_and_exact_leads() -> None:
    for names in ("v100:2,t4:2", "a800:1,v100s:3", "rtx3090:2,rtx4060:1"):
        runs = simulate(_cluster(names), _SMALL, 501)
        assert len(runs) == 16
        for run in runs:
            assert run.plan is not None and run.profile is not None
            assert sum(row.num_samples for row in run.plan.ranks) == 501
            assert run.prediction == predict(run.profile, run.plan)
            exact = next(one for one in runs if (one.zero_stage, one.strategy) == (run.zero_stage, "exact"))
            # What compute hides of collectives differs a little from plan to plan.
            assert exact.samples_per_s >= 0.98 * run.samples_per_s
        best = best_run(runs)
        assert best is not None and best.samples_per_s == max(run.samples_per_s for run in runs)


@settings(deadline=None, max_examples=25)
@given(
    cards=st.lists(st.sampled_from(card_names()), min_size=1, max_size=4),
    batch=st.integers(1, 300),
    stage=st.integers(0, 3),
)
def test_no_plan_beats_the_sum_of_the_cards(cards: list[str], batch: int, stage: int) -> None:
    cluster = Cluster(names=tuple(cards))
    (run,) = simulate(cluster, _SMALL, batch, zero_stages=(stage,), strategies=("exact",))
    assert run.plan is not None and run.prediction is not None
    one, two = ([compute_s(card, _SMALL, size, run.plan.precision) for card in cluster.cards] for size in (1, 2))
    ideal = sum(1 / (second - first) for first, second in zip(one, two, strict=True))
    assert 0 < run.samples_per_s < ideal
    parts = run.prediction
    for compute, idle in zip(parts.compute_s, parts.idle_s, strict=True):
        assert compute + idle + parts.collective_s == pytest.approx(parts.step_s)


def test_gains_add_up() -> None:
    runs = simulate(_cluster("v100:4,t4:4"), ModelSpec.preset("llama-0.5b"), 512, strategies=("equal", "poplar"))
    for slower, faster in zip(runs[::2], runs[1::2], strict=True):
        assert slower.prediction is not None and faster.prediction is not None
        parts = gain_parts(slower.prediction, faster.prediction)
        saved = slower.prediction.step_s - faster.prediction.step_s
        assert parts.balance_s + parts.collective_s + parts.compute_s == pytest.approx(saved)
        assert parts.leading() == "balance"
        # Four cards of each kind: balance gives at most (1 + ratio) / 2.
        ratio = find_card("v100").relative_speed
        assert 1.5 < faster.samples_per_s / slower.samples_per_s < (1 + ratio) / 2


def test_what_does_not_fit_says_where_and_how_much() -> None:
    runs = simulate(_cluster("v100:2,t4:2"), ModelSpec.preset("llama-7b"), 64, strategies=("exact",))
    assert best_run(runs) is None
    assert "stage 0 needs 113.0 GiB of model state on each v100-16g, which has" in runs[0].problem
    assert "GiB are missing" in runs[0].problem
    with pytest.raises(InfeasiblePlanError, match="no card can run one sample of 100000 tokens; the .* lacks"):
        simulate_profile(_cluster("t4:2"), replace(_SMALL, tokens_per_sample=100000, kept_elements=1e12), 3)


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="a global batch of 1 to"):
        simulate(_cluster("t4"), _SMALL, 0)
    with pytest.raises(ConfigError, match="strategy must be one of"):
        simulate(_cluster("t4"), _SMALL, 8, strategies=("best",))
    with pytest.raises(ConfigError, match="zero_stage must be"):
        simulate_profile(_cluster("t4"), _SMALL, 4)
    with pytest.raises(ConfigError, match="at least one card"):
        Cluster(names=())
    with pytest.raises(ConfigError, match="one ratio a rank"):
        Cluster(names=("t4-16g",), shard_ratios=(0.5, 0.5))


def test_tokens_from_text() -> None:
    assert [parse_tokens(text) for text in ("2M", "2Mi", "512k", "1000", "0.5 m")] == [
        2_000_000,
        2 * 2**20,
        512_000,
        1000,
        500_000,
    ]
    for text in ("", "M", "-2M", "2X", "0", "1e6"):
        with pytest.raises(ConfigError, match="tokens must be a number from 1"):
            parse_tokens(text)


def test_weak_and_strong_parts() -> None:
    parts = split_by_speed(_cluster("v100:2,t4:3"))
    assert parts is not None
    assert [describe_cluster(part.names) for part in parts] == ["t4-16g:3", "v100-16g:2"]
    assert split_by_speed(_cluster("t4:3")) is None


def test_512_cards_in_seconds_without_torch() -> None:
    code = """
import sys, time
start = time.perf_counter()
from poplar.catalog import parse_cluster
from poplar.simulation.model_spec import ModelSpec
from poplar.simulator import simulate
from poplar.simulation.step_model import Cluster
names = parse_cluster("a100-80g:128,a100-40g:128,v100-32g:128,a6000:128")
runs = simulate(Cluster(names=names), ModelSpec.preset("llama-7b"), 1024)
assert {run.zero_stage for run in runs if run.plan} >= {3}, [run.problem for run in runs]
assert "torch" not in sys.modules
print(time.perf_counter() - start)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 5.0


# Advice


def test_advice_tells_what_each_kind_brings() -> None:
    advice = advise(_cluster("v100:4,t4:4"), ModelSpec.preset("llama-0.5b"), 512, consider=("a100", "t4"))
    v100, t4 = advice.kinds
    now = advice.best.tokens_per_s
    assert (v100.name, v100.count, t4.name, t4.count) == ("v100-16g", 4, "t4-16g", 4)
    assert v100.tokens_per_s_without < t4.tokens_per_s_without < now
    assert now < t4.tokens_per_s_with_one_more < v100.tokens_per_s_with_one_more
    considered = dict(advice.considered)
    assert considered["a100-80g"] > v100.tokens_per_s_with_one_more
    assert considered["t4-16g"] == pytest.approx(t4.tokens_per_s_with_one_more)
    assert advice.best in advice.by_stage
    assert advice.to_dict()["best"]["zero_stage"] == advice.best.zero_stage


def test_advice_names_what_binds() -> None:
    spec = ModelSpec.preset("llama-0.5b")
    fine = advise(_cluster("a100:2"), spec, 512)
    assert fine.binds == ("compute: nothing else holds the cluster back",)
    slow = advise(_cluster("a100:2,h100:2", inter_bytes_per_s=1e7), spec, 64)
    assert any(sentence.startswith("network:") for sentence in slow.binds)
    few = advise(_cluster("a100:2,t4:6"), spec, 9)
    assert any(sentence.startswith("batch:") for sentence in few.binds)
    tight = advise(_cluster("a100:4,rtx3060:1"), ModelSpec.preset("llama-1.1b", 4096), 64)
    assert any("not one sample fits on a rtx3060-12g" in sentence for sentence in tight.binds)


def test_advice_on_a_model_that_fits_nowhere() -> None:
    with pytest.raises(InfeasiblePlanError, match="llama-7b fits at no stage on t4-16g:2: stage 0: .*stage 3: "):
        advise(_cluster("t4:2"), ModelSpec.preset("llama-7b"), 8)


# The paper's clusters


def test_reproduction_tells_all_cells_and_only_what_it_simulated() -> None:
    paper = reproduce()
    assert len(paper.cells) == len(CLUSTERS) * len(MODELS) * 4
    text = page(paper)
    for strategy, least in (("poplar", 0.98), ("exact", 0.995)):
        gains = [gain for over in ("equal", "flops") for gain, _ in paper.gains(over, strategy)]
        assert min(gains) > least
        assert 1.8 < max(gains) < 3.92
        assert f"{min(gains):.2f} to {max(gains):.2f}" in text
    for cell in paper.cells:
        assert f"| {cell.cluster} | {cell.model} | {cell.zero_stage} |" in text
    # Slow cards beside fast ones make an equal split slower than the fast ones alone.
    alone, joined = (
        next(p.tokens_per_s for p in paper.sweep if (p.fixed, p.num_added) == ("a800-80g", count)) for count in (0, 1)
    )
    assert joined["equal"] < 0.6 * alone["equal"] and joined["exact"] > alone["exact"]


# Public measurements


def _benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulator_accuracy", _BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def accuracy() -> ModuleType:
    module = _benchmark()
    if not (module.DEFAULT_DATA / "layer_times.csv").exists():
        pytest.skip(f"the public layer times are not in {module.DEFAULT_DATA}")
    return module


def test_layer_times_and_speed_ratios_are_within_their_bounds(accuracy: ModuleType) -> None:
    text, medians = accuracy.report(accuracy.read_rows(accuracy.DEFAULT_DATA))
    assert medians["rows judged"] > 400 and "llama-7b (calibration)" in text
    assert medians["median error, fp16"] < 0.15
    assert medians["median error of speed ratios, fp16"] < 0.10
    assert medians["median error of a V100's sequence length left out of the fit, fp16"] < 0.15


def test_shipped_rates_are_the_fitted_ones(accuracy: ModuleType) -> None:
    rows = accuracy.read_rows(accuracy.DEFAULT_DATA)
    calibration = [row for row in rows if row.model == accuracy.CALIBRATION_MODEL]
    groups = accuracy.by(calibration, lambda row: (row.card, row.precision))
    assert len(groups) > 20
    for (name, precision), group in groups.items():
        fitted, shipped = accuracy.fit_rates(find_card(name), group), find_card(name).rates(precision)
        assert shipped.matmul_tflops == pytest.approx(fitted.matmul_tflops, rel=0.005)
        assert shipped.bytes_per_parameter == pytest.approx(fitted.bytes_per_parameter, rel=0.01, abs=0.01)


def test_the_fit_finds_the_rates_that_made_the_times() -> None:
    module = _benchmark()
    card = find_card("a10g")
    rows = [
        module.Row(
            card=card.name, model="llama-3b", precision="fp16", seq_len=length, micro_batch_size=size,
            seconds=compute_s(card, module.layer("llama-3b", length), size, "fp16"),
        )
        for length in (512, 2048)
        for size in (1, 2, 8)
    ]  # fmt: skip
    fitted = module.fit_rates(card, rows)
    assert fitted.matmul_tflops == pytest.approx(card.half.matmul_tflops)
    assert fitted.attention_tflops == pytest.approx(card.half.attention_tflops)
    assert fitted.bytes_per_parameter == pytest.approx(card.half.bytes_per_parameter)


# One card at hand


def _measured_pair(device: str = "v100-16g") -> ClusterProfile:
    rank = RankProfile(
        device=device,
        device_id="here",
        points=((1, 0.1), (2, 0.19), (8, 0.7)),
        max_micro_batch_size=8,
        optimizer_step_s=0.01,
        memory_points=((1, 3 * 2**30), (8, 10 * 2**30)),
        state_bytes=2 * 2**30,
        memory_limit_bytes=find_card(device).usable_memory_bytes,
    )
    return ClusterProfile(zero_stage=2, ranks=(rank, rank), micro_step_collective_s=0.03, step_collective_s=0.02)


def test_a_measured_card_tells_of_others() -> None:
    measured = _measured_pair()
    carried = transfer_profile(measured, parse_cluster("v100,t4"))
    v100, t4 = carried.ranks
    ratio = find_card("v100").relative_speed
    assert v100 == replace(measured.ranks[0], device_id=None)
    assert [seconds / own for (_, seconds), (_, own) in zip(t4.points, v100.points, strict=True)] == pytest.approx(
        [ratio] * 3
    )
    assert t4.optimizer_step_s == pytest.approx(0.01 * ratio)
    assert (carried.micro_step_collective_s, carried.step_collective_s) == (0.03, 0.02)
    assert t4.memory_limit_bytes == find_card("t4").usable_memory_bytes
    # A GiB a sample from 3 GiB at one sample on, in what a profile would use of the memory.
    assert t4.max_micro_batch_size == 1 + int(0.95 * t4.memory_limit_bytes / 2**30 - 3)
    assert transfer_profile(measured, ("a100-80g",) * 2).ranks[0].max_micro_batch_size > 65


def test_a_card_too_small_for_a_sample_holds_shards() -> None:
    measured = _measured_pair("a100-80g")
    small = replace(measured.ranks[0], memory_points=((1, 40 * 2**30), (8, 70 * 2**30)))
    carried = transfer_profile(replace(measured, ranks=(small, small)), parse_cluster("a100,t4"))
    assert carried.ranks[1].max_micro_batch_size == 0 and carried.ranks[1].points == ()


def test_what_cannot_be_carried_over() -> None:
    measured = _measured_pair()
    for changed, names, message in (
        (measured, ("t4-16g",), "is of 2 ranks, 1 cards are named"),
        (replace(measured, shard_ratios=(0.7, 0.3)), ("t4-16g",) * 2, "one kind of card with even shards"),
        (transfer_profile(measured, parse_cluster("v100,t4")), ("t4-16g",) * 2, "one kind of card"),
        (replace(measured, ranks=(replace(measured.ranks[0], device="cpu"),) * 2), ("t4",) * 2, "unknown card 'cpu'"),
    ):
        with pytest.raises(ConfigError, match=message):
            transfer_profile(changed, names)

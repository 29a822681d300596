"""``fit`` over several ranks: the loop, its records, its seeds, and the steps of the equal split."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from poplar.errors import CommunicationError, ConfigError, PlanMismatchError
from poplar.plan import ClusterProfile, Plan, RankProfile
from poplar.planning.record import StepRecord
from poplar.training import fit
from poplar.training_loop import Clock, Loop
from poplar.zero.comm import ProcessGroupComm
from tests.helpers import tiny_recipe
from tests.helpers.spawn import RankFailure, run_ranks


def _weights(result):
    # As numbers: a tensor would be sent as shared memory that its process takes with it.
    return torch.cat([value.flatten() for value in result.engine.full_state_dict().values()]).tolist()


def _fit_by_hand(rank, world_size, run_dir):
    """Two epochs of 44 samples in batches of 16, 16, 12; a learning rate halved after every step."""
    result = fit(
        tiny_recipe.recipe,
        micro_batch_sizes=((4, 4), (5,), (3,)),
        global_batch_size=16,
        zero_stage=1,
        epochs=2,
        eval_every=4,
        run_dir=run_dir,
        progress=False,
    )
    mask = torch.nn.functional.dropout(torch.ones(32), 0.5).tolist()
    assert result.record is not None and result.step_s == result.record.step_s
    return result.steps, result.eval_loss, result.idle_shares, _weights(result), mask, result.loss


def test_records_schedule_and_seeds_of_a_run(tmp_path):
    """X17: the schedule moves once a step; Z41: one set of weights, dropout of each rank's own."""
    results = run_ranks(_fit_by_hand, 3, str(tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["num_samples"] for line in steps] == [16, 16, 12, 16, 16, 12]
    assert [line["weight"] for line in steps] == [16, 16, 12, 16, 16, 12]
    assert [line["learning_rate"] for line in steps] == pytest.approx([0.05 * 0.5**n for n in range(1, 7)])
    assert [line["step"] for line in lines if "eval_loss" in line] == [4, 6]
    assert all(line["grad_norm"] > 0 and not line["skipped"] for line in steps)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["world_size"] == 3 and config["epochs"] == 2
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert [row.micro_batch_sizes for row in plan.ranks] == [(4, 4), (5,), (3,)]
    assert plan.zero_stage == 1 and plan.ranks[0].device == "cpu"
    assert not (tmp_path / "run" / "profile.json").exists()
    record = StepRecord.from_json((tmp_path / "run" / "record.json").read_text())
    assert record.predicted is None and record.parts is not None and len(record.parts.compute_s) == 3
    assert min(record.parts.idle_s) == 0 and 0 < record.parts.collective_s < record.step_s
    for number, (num_steps, eval_loss, idle_shares, weights, mask, loss) in enumerate(results):
        assert num_steps == 6 and loss == steps[-1]["loss"] and eval_loss == lines[-1]["eval_loss"]
        assert len(idle_shares) == 3 and all(0 <= share <= 1 for share in idle_shares)
        assert weights == results[0][3]
        assert all(mask != other[4] for other in results[number + 1 :])


def _fit_with_comparison(rank, world_size):
    """The same run with no, some and all later steps cut equally, in one group."""
    profile = ClusterProfile(
        zero_stage=2,
        ranks=(
            RankProfile(device="v100-16g", points=((1, 0.01), (16, 0.1)), max_micro_batch_size=16),
            RankProfile(device="t4-16g", points=((1, 0.05), (16, 0.5)), max_micro_batch_size=16),
        ),
    )
    cut = []

    class Watch(Loop):
        def _log(self, step, result):
            cut.append((step, self.loader.plan.strategy))
            super()._log(step, result)

    from poplar import training

    weights, seconds = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "profile_to_plan", lambda *args, **settings: (profile,))
        patch.setattr(training, "Loop", Watch)
        for compare_steps in (0, 3):
            result = fit(tiny_recipe.recipe, global_batch_size=11, steps=8, compare_steps=compare_steps, progress=False)
            weights.append(_weights(result))
            seconds.append((result.step_s, result.equal_step_s))
    return weights, seconds, cut, [row.micro_batch_sizes for row in result.plan.ranks]


def test_steps_of_the_equal_split_train_the_same_model():
    for weights, seconds, cut, rows in run_ranks(_fit_with_comparison, 2):
        assert sum(rows[0]) > sum(rows[1])
        assert cut[:8] == [(step, "exact") for step in range(1, 9)]
        assert [strategy for _, strategy in cut[8:]] == ["exact"] * 4 + ["equal"] * 3 + ["exact"]
        assert weights[0] == pytest.approx(weights[1], rel=1e-5, abs=1e-6)
        assert seconds[0][1] is None and seconds[0][0] > 0
        assert all(value > 0 for value in seconds[1])


def _fit_wrongly(rank, world_size):
    messages = []
    for recipe, settings in (
        (tiny_recipe.recipe, {"global_batch_size": 45}),
        (tiny_recipe.recipe, {"global_batch_size": 4, "micro_batch_sizes": ((4,),)}),
        (tiny_recipe.recipe, {"global_batch_size": 4, "plan": Plan.manual([1, 1, 2])}),
        (replace(tiny_recipe.recipe, dataset=lambda: iter(())), {"global_batch_size": 4}),
        (replace(tiny_recipe.recipe, dataset=lambda: tiny_recipe.dataset(44 - rank)), {"global_batch_size": 4}),
        (tiny_recipe.recipe, {"global_batch_size": 3, "plan": Plan.manual([1 + rank, 2 - rank])}),
        (tiny_recipe.recipe, {"global_batch_size": 3, "misspelt": 1}),
    ):
        with pytest.raises((ConfigError, PlanMismatchError, CommunicationError)) as caught:
            fit(recipe, progress=False, **settings)
        messages.append(str(caught.value))
    return messages


def test_what_cannot_run_is_refused_on_every_rank_at_once():
    for messages in run_ranks(_fit_wrongly, 2):
        assert messages.pop(5).startswith("the plan (by checksum) must be the same on every rank")
        assert messages == [
            "the data set has 44 samples, fewer than one global batch of 45; lower global_batch_size",
            "micro_batch_sizes has 1 entries, this run has 2 ranks; give one entry a rank",
            "the plan is for 3 ranks, this run has 2; make a new plan for 2, or start 3 ranks",
            "the data set must be map-style, with a length; got tuple_iterator",
            "the length of the data set must be the same on every rank: rank 0 has 44, rank 1 43",
            "fit: FitConfig.__init__() got an unexpected keyword argument 'misspelt'",
        ]


def _fit_broken(rank, world_size):
    fit(tiny_recipe.broken_loss, global_batch_size=4, micro_batch_sizes=((2,), (2,)), progress=False)


def test_an_exception_on_one_rank_is_that_rank_s_and_known_to_all():
    with pytest.raises(RankFailure) as caught:
        run_ranks(_fit_broken, 2)
    first, second = str(caught.value).split("--- rank 1:")
    assert "StepError: rank 1 failed in a step: ValueError: the loss is broken here" in first
    assert "ValueError: the loss is broken here" in second


def _leave_late(rank, world_size):
    from poplar.training import leave

    with pytest.MonkeyPatch.context() as patch:
        ended = []
        patch.setattr("poplar.training.end_process_group", lambda: ended.append(time.time()))
        time.sleep(0.3 * rank)
        arrived = time.time()
        leave(ProcessGroupComm())
    return arrived, ended


def test_no_rank_leaves_before_all_have_come():
    """L15: rank 0 hosts the store."""
    results = run_ranks(_leave_late, 3)
    last_arrival = max(arrived for arrived, _ in results)
    assert all(len(ended) == 1 and ended[0] >= last_arrival for _, ended in results)


def test_the_clock_counts_whole_steps_of_one_kind(monkeypatch):
    now = iter([10.0, 12.0, 14.0, 20.0, 25.0, 31.0])
    monkeypatch.setattr("poplar.training_loop.time.perf_counter", lambda: next(now))
    clock = Clock()
    assert clock.lap(0.0, by_plan=True, counts=True) != clock.lap(0.5, by_plan=True, counts=True) == 2.0
    assert clock.lap(1.0, by_plan=True, counts=False) == 2.0  # a smaller last batch
    clock.restart()
    clock.lap(9.0, by_plan=False, counts=True)  # the first of its kind
    clock.lap(10.0, by_plan=False, counts=True)
    clock.lap(11.0, by_plan=False, counts=True)
    assert clock.step_s(by_plan=True) == 2.0 and clock.idle_share() == 0.25
    assert clock.waited_s() == 0.5
    assert clock.step_s(by_plan=False) == 5.5


def test_a_run_dir_may_hold_an_earlier_run(tmp_path):
    from poplar.fit_config import new_run_dir

    first = new_run_dir(tmp_path)
    Path(first).mkdir()
    assert new_run_dir(tmp_path) != first

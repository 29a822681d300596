"""The engine's promises beyond parity: repeatable, frugal, and itself between the steps."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import poplar
from poplar.zero.comm import ProcessGroupComm
from poplar.zero.precision import PoplarWarning
from tests.helpers import zoo
from tests.helpers.models import Batch, Case, adamw_two_groups, cross_entropy, tokens
from tests.helpers.parity import TOLERANCE, build, check, distance, reference, rows_of
from tests.helpers.spawn import run_ranks

TOKEN = Case(name="tokens", model=zoo.TiedAcross, data=tokens, num_steps=5, optimizer=adamw_two_groups)
PLAIN = Case(name="plain", model=partial(zoo.Plain, 3), num_steps=3)


def _own_rows(rank: int, world_size: int, batch: Batch) -> list[Batch]:
    """One sample more on every further rank, in micro-batches of two."""
    rows = [row for row in range(len(batch[0])) if row % world_size == rank]
    return [rows_of(batch, rows[start : start + 2]) for start in range(0, len(rows), 2)]


# Hybrid sharding (Z39): shards inside a group of ranks, replicas over groups.


def _hybrid(rank: int, world_size: int, num_replicas: int) -> None:
    for case in (TOKEN, replace(PLAIN, max_grad_norm=0.1)):
        expected = reference(case)
        for stage in range(4):
            check(rank, world_size, case, stage, None, expected, num_replicas=num_replicas)
        if world_size // num_replicas == 2:
            check(rank, world_size, case, 3, [1, 3], expected, num_replicas=num_replicas)


@pytest.mark.parametrize(("world_size", "num_replicas"), [(2, 2), (4, 2)])
def test_hybrid_sharding_equals_one_process(world_size: int, num_replicas: int) -> None:
    run_ranks(_hybrid, world_size, num_replicas, timeout_s=110)


# Repeatable: the same run twice is bitwise the same, dropout included, and the same at every stage.


class _Dropout(zoo.Plain):
    def __init__(self) -> None:
        super().__init__(3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = F.dropout(zoo.checkpointed(block, x), 0.3, self.training)
        return self.head(x)


def _repeat(rank: int, world_size: int) -> None:
    """Z41: every rank draws its own dropout. What stage 3 runs ahead to find its order draws and counts nothing."""
    by_stage = []
    for stage in range(4):
        runs = []
        for _ in range(2):
            torch.manual_seed(rank)
            model = _Dropout().double()
            engine = poplar.initialize(model, adamw_two_groups(model), cross_entropy, zero_stage=stage)
            torch.manual_seed(100 + rank)
            results = [engine.step(_own_rows(rank, world_size, PLAIN.data(step))) for step in range(3)]
            runs.append((results, engine.full_state_dict(), torch.rand(1)))
            engine.close()
        (first, weights, draw), (second, again, _) = runs
        assert first == second, f"z{stage}: {first} then {second}"
        assert all(torch.equal(weights[name], again[name]) for name in weights), f"z{stage}"
        own = len(_own_rows(rank, world_size, PLAIN.data(0)))
        assert weights.pop("calls") == 3 * own, f"z{stage}: buffers were written {weights} times"
        by_stage.append((first, weights, draw))
    first, weights, draw = by_stage[0]
    for stage, (others, others_weights, others_draw) in enumerate(by_stage):
        assert torch.equal(draw, others_draw), f"z{stage} draws other random numbers than z0"
        for got, want in zip(others, first, strict=True):
            assert abs(got.loss - want.loss) < TOLERANCE * want.loss, f"z{stage}: {others}, z0 {first}"
        for name, value in weights.items():
            assert distance(others_weights[name], value) < TOLERANCE, f"z{stage} {name}"


def test_a_repeated_run_is_bitwise_the_same_and_stages_share_dropout() -> None:
    run_ranks(_repeat, 3, timeout_s=60)


# float32, SGD: 1e-5.


def _single(rank: int, world_size: int) -> None:
    for stage in range(4):
        torch.manual_seed(0)
        model, whole = zoo.Plain(3), zoo.Plain(3)
        whole.load_state_dict(model.state_dict())
        engine = poplar.initialize(model, PLAIN.optimizer(model), cross_entropy, zero_stage=stage)
        optimizer = PLAIN.optimizer(whole)
        for step in range(5):
            x, y = PLAIN.data(step)
            result = engine.step(_own_rows(rank, world_size, (x.float(), y)))
            optimizer.zero_grad()
            loss = cross_entropy(whole, (x.float(), y))
            loss.backward()
            optimizer.step()
            assert abs(result.loss - loss.item()) < 1e-5 * loss.item()
        got = engine.full_state_dict()
        for name, value in whole.state_dict().items():
            assert distance(got[name], value) < 1e-5, f"z{stage} {name} {distance(got[name], value)}"
        engine.close()


def test_float32_equals_one_process_to_1e_5() -> None:
    run_ranks(_single, 3, timeout_s=60)


# Collectives: how many, and how many bytes.


class CountingComm:
    """Counts the collectives of another communicator, and the bytes that this rank sends by ring or point to point."""

    def __init__(self, inner: Any):
        self.inner = inner
        self.calls: dict[str, int] = {}
        self.sent_bytes = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if name not in (
            "all_gather",
            "reduce_scatter",
            "all_reduce",
            "gather_floats",
            "gather_objects",
            "broadcast_object",
        ):
            return value

        def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            if isinstance(tensor, Tensor):
                share = (self.inner.world_size - 1) / self.inner.world_size
                self.sent_bytes += round((2 if name == "all_reduce" else 1) * share * tensor.nbytes)
            return value(tensor, *args, **kwargs)

        return counted

    def reset(self) -> None:
        self.calls, self.sent_bytes = {}, 0


def _count(rank: int, world_size: int) -> None:
    num_blocks, micro_steps = 3, 2
    for stage in range(4):
        torch.manual_seed(0)
        model = zoo.Plain(num_blocks)
        num_units = num_blocks + 1
        comm = CountingComm(ProcessGroupComm(None))
        engine = poplar.initialize(model, PLAIN.optimizer(model), cross_entropy, zero_stage=stage, comm=comm)
        param_bytes = sum(buffer.padded_numel * 4 for unit in engine.units for buffer in unit.buffers)
        x, y = PLAIN.data(0)
        own = [(x[:2].float(), y[:2]), (x[2:3].float(), y[2:3])]
        if rank == 1:
            own = own[:1]  # idle in the second micro-step
        for _ in range(2):
            engine.step(own)
        comm.reset()
        engine.step(own)
        calls = comm.calls
        assert calls.pop("gather_floats") == 2, f"z{stage}: {calls}"
        # Forward gathers every unit, backward again the blocks but the last, which stays; the root stays as well.
        gathers = micro_steps * (2 * num_units - 2)
        expected = (
            {"all_reduce": num_units},
            {"reduce_scatter": num_units, "all_gather": num_units},
            {"reduce_scatter": micro_steps * num_units, "all_gather": num_units},
            {"reduce_scatter": micro_steps * num_units, "all_gather": gathers},
        )[stage]
        assert calls == expected, f"z{stage}: {calls}, expected {expected}"
        share = param_bytes * (world_size - 1) / world_size
        times = (2, 2, micro_steps + 1, 3 * micro_steps)[stage]
        slack = 2 * num_units * micro_steps
        assert comm.sent_bytes <= times * share + slack, f"z{stage}: {comm.sent_bytes} bytes, {times * share}"
        assert comm.sent_bytes > 0.6 * times * share
        engine.close()


def test_collectives_of_a_step_are_those_of_zero() -> None:
    run_ranks(_count, 2, timeout_s=60)


# Between the steps.


def _between(rank: int, world_size: int) -> None:
    """Z18: generation of other lengths on every rank; evaluation; weights that are set by hand."""
    expected = reference(PLAIN)
    for stage in range(4):
        where = f"z{stage}"
        model = build(PLAIN, seed=rank)
        engine = poplar.initialize(model, PLAIN.optimizer(model), cross_entropy, zero_stage=stage)
        for step in range(PLAIN.num_steps):
            batch = PLAIN.data(step)
            with engine.unsharded() as whole, torch.no_grad():
                x = batch[0][:1]
                for _ in range(3 + 2 * rank):
                    x = F.pad(whole(x), (0, 3))
                if step == 0:
                    for name, value in build(PLAIN, seed=0).named_parameters():
                        assert torch.equal(whole.get_parameter(name), value), (where, name)
            result = engine.step(_own_rows(rank, world_size, batch))
            assert abs(result.loss - expected.losses[step]) < TOLERANCE, where
            before = engine.evaluate(_own_rows(rank, world_size, batch))
            assert engine.evaluate([batch] if rank == 1 else []) == pytest.approx(before, rel=1e-12)  # L08
        got = engine.full_state_dict()
        for name, value in expected.weights[-1].items():
            assert distance(got[name], value) < TOLERANCE, (where, name)
        with engine.unsharded() as whole, torch.no_grad():
            for param in whole.parameters():
                param.mul_(2)
        doubled = engine.full_state_dict()
        assert all(torch.equal(doubled[name], 2 * got[name]) for name in got), where
        engine.close()


def test_generation_evaluation_and_surgery_between_steps() -> None:
    run_ranks(_between, 3, timeout_s=60)


def _schedulers(rank: int, world_size: int) -> None:
    """X17, H23: the user's scheduler and groups keep working; the momentum that OneCycle moves, too."""
    for stage in range(4):
        torch.manual_seed(0)
        model, whole = zoo.Plain().double(), zoo.Plain().double()
        whole.load_state_dict(model.state_dict())
        pairs = []
        for module in (model, whole):
            optimizer = adamw_two_groups(module)
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 3e-2], total_steps=6)
            pairs.append((optimizer, cycle))
        engine = poplar.initialize(model, pairs[0][0], cross_entropy, zero_stage=stage, shard_ratios=[1, 2])
        assert engine.optimizer is pairs[0][0]
        for step in range(5):
            batch = PLAIN.data(step)
            engine.step(_own_rows(rank, world_size, batch))
            pairs[1][0].zero_grad()
            cross_entropy(whole, batch).backward()
            pairs[1][0].step()
            for _, cycle in pairs:
                cycle.step()
            rates = [[(g["lr"], g["betas"]) for g in optimizer.param_groups] for optimizer, _ in pairs]
            assert rates[0] == rates[1], f"z{stage}, step {step}: {rates}"
        got = engine.full_state_dict()
        for name, value in whole.state_dict().items():
            assert distance(got[name], value) < TOLERANCE, f"z{stage} {name}"
        state = engine.full_optimizer_state_dict()
        plain = pairs[1][0]
        for name, param in whole.named_parameters():
            for entry in ("exp_avg", "exp_avg_sq"):
                assert distance(state["state"][name][entry], plain.state[param][entry]) < TOLERANCE, (
                    stage,
                    name,
                    entry,
                )
            assert float(state["state"][name]["step"]) == 5
        named = {id(param): name for name, param in whole.named_parameters()}
        for group, want in zip(state["param_groups"], plain.param_groups, strict=True):
            assert sorted(group["params"]) == sorted(named[id(param)] for param in want["params"])
        engine.close()


def test_schedulers_groups_and_optimizer_state() -> None:
    run_ranks(_schedulers, 2, timeout_s=60)


def _nothing_to_learn(rank: int, world_size: int) -> None:
    """H20: a step whose labels are all masked, on all ranks, is skipped with a warning."""
    for stage in range(4):
        model = build(TOKEN, seed=rank)
        engine = poplar.initialize(model, TOKEN.optimizer(model), cross_entropy, zero_stage=stage, weight=TOKEN.weight)
        x, y = tokens(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = engine.step([(x, torch.full_like(y, -1))])
            empty = engine.step([])
        assert result.skipped and empty.skipped and result.weight == 0.0
        assert [w.category for w in caught] == [PoplarWarning] * 2
        assert torch.isnan(torch.tensor(engine.evaluate([])))
        full = engine.full_state_dict()
        for name, value in build(TOKEN, seed=0).state_dict().items():
            assert torch.equal(full[name], value)
        engine.close()


def test_a_step_without_any_label_is_skipped() -> None:
    run_ranks(_nothing_to_learn, 2, timeout_s=60)


def _rows_of_a_tied_head(rank: int, world_size: int) -> None:
    """Z08: every row of an odd tied embedding moves, the last rank's too."""
    for stage in range(4):
        model = build(TOKEN, seed=rank)
        engine = poplar.initialize(model, torch.optim.SGD(model.parameters(), 0.1), cross_entropy, zero_stage=stage)
        before = engine.full_state_dict()["embedding.weight"]
        x = torch.arange(7).repeat(2).view(-1, 1)
        engine.step([(x, x)])
        moved = (engine.full_state_dict()["embedding.weight"] - before).abs().amin(1)
        assert (moved > 1e-6).all(), f"z{stage}: {moved}"
        engine.close()


def test_every_row_of_a_tied_head_moves() -> None:
    for world_size in (2, 3):
        run_ranks(_rows_of_a_tied_head, world_size, timeout_s=60)


def _debug_mode(rank: int, world_size: int) -> None:
    for stage in range(4):
        check(rank, world_size, PLAIN, stage, [1, 2], reference(PLAIN), debug=True)


def test_debug_mode_changes_nothing() -> None:
    run_ranks(_debug_mode, 2, timeout_s=60)

"""Half precision: float32 masters, one decision for all ranks, the same at every stage."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import poplar
from poplar.device import Device
from poplar.errors import NonFiniteError
from poplar.zero.precision import PoplarWarning
from tests.helpers import zoo
from tests.helpers.models import Batch, cross_entropy, vectors
from tests.helpers.parity import distance, rows_of
from tests.helpers.spawn import run_ranks


class _Card(Device):
    """A CPU that says what a card would."""

    is_emulated = True  # a plain CPU rank is not asked what it does natively

    def __init__(self, *dtypes: str):
        super().__init__()
        self._dtypes = dtypes

    def native_dtypes(self) -> tuple[str, ...]:
        return self._dtypes


ALL = _Card("fp32", "bf16", "fp16")


def _single(step: int) -> Batch:
    x, y = vectors(step)
    return x.float(), y


def _own(rank: int, step: int) -> list[Batch]:
    rows = ([[0, 1], [2, 3, 4]], [[5, 6, 7, 8]], [])[rank]
    return [rows_of(_single(step), chosen) for chosen in rows]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _train(rank: int, model: nn.Module, num_steps: int = 4, **options: Any) -> tuple[poplar.Engine, list[Any]]:
    engine = poplar.initialize(model, _sgd(model), cross_entropy, **options)
    return engine, [engine.step(_own(rank, step)) for step in range(num_steps)]


def _half(rank: int, world_size: int) -> None:
    """Z46: every stage in bf16 and fp16 over gloo, close to float32 and alike at all stages."""
    torch.manual_seed(0)
    whole = zoo.Plain(3)
    optimizer = _sgd(whole)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = cross_entropy(whole, _single(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        by_stage = []
        for stage in range(4):
            where = f"{precision}, z{stage}"
            torch.manual_seed(rank)
            model = zoo.Plain(3)
            if rank == 0:
                torch.manual_seed(0)
                model = zoo.Plain(3)
            engine, results = _train(
                rank,
                model,
                zero_stage=stage,
                precision=precision,
                device=ALL,
                shard_ratios=[1.0, 2.5, 1.0][:world_size],
            )
            assert not any(result.skipped for result in results), (where, results)
            seen = {buffer.dtype for unit in engine.units for buffer in unit.buffers}
            masters = {param.dtype for group in engine.optimizer.param_groups for param in group["params"]}
            reduced = {buffer.reduce_dtype for unit in engine.units for buffer in unit.buffers}
            assert (seen, masters or {torch.float32}, reduced) == ({dtype}, {torch.float32}, {torch.float32}), where
            for result, want in zip(results, losses, strict=True):
                assert abs(result.loss - want) < 0.02 * want, f"{where}: {result.loss}, float32 {want}"
            got = engine.full_state_dict()
            for name, value in whole.state_dict().items():
                assert distance(got[name], value) < 0.03, f"{where}: {name} {distance(got[name], value)}"
            by_stage.append((results, got))
            with engine.unsharded() as module:
                assert all(param.dtype == dtype for param in module.parameters()), where
            again = engine.full_state_dict()
            assert all(torch.equal(again[name], got[name]) for name in got), f"{where}: unsharded() rounded the masters"
            engine.close()
        for stage, (results, got) in enumerate(by_stage):
            for result, first in zip(results, by_stage[0][0], strict=True):
                assert result.loss == pytest.approx(first.loss, rel=1e-3), (precision, stage)
                assert result.grad_norm == pytest.approx(first.grad_norm, rel=1e-2), (precision, stage)
            for name, value in by_stage[0][1].items():
                assert distance(got[name], value) < 2e-3, (precision, stage, name, distance(got[name], value))


def test_half_precision_follows_float32_at_all_stages() -> None:
    run_ranks(_half, 3, timeout_s=90)


def _overflow(rank: int, world_size: int) -> None:
    """X01, X05, Z24: inf on one rank halves the scale on all; after too many skips at the smallest scale, an error."""
    warnings.filterwarnings("ignore", ".*at stage 3 it is gathered whole", PoplarWarning)
    for stage in range(4):
        where = f"z{stage}"
        torch.manual_seed(0)
        model = nn.Linear(1, 1, bias=False)  # one element: most ranks own nothing
        huge = {"factor": 1.0}

        def loss(module: nn.Module, batch: Tensor, huge: dict[str, float] = huge) -> Tensor:
            return (module(batch).float() * huge["factor"]).mean()

        engine = poplar.initialize(
            model, torch.optim.AdamW(model.parameters(), 0.1), loss, zero_stage=stage, precision="fp16", device=ALL
        )
        ones = [torch.ones(2, 1)]
        assert not engine.step(ones).skipped
        scale, before = engine.loss_scale.value, engine.full_state_dict()
        state = engine.full_optimizer_state_dict()["state"]["weight"]
        huge["factor"] = float("inf") if rank == 1 else 1.0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert engine.step(ones).skipped, where
        assert sum(w.category is PoplarWarning for w in caught) == 1
        assert engine.loss_scale.value == scale / 2, where
        assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items()), where
        after = engine.full_optimizer_state_dict()["state"]["weight"]
        assert all(torch.equal(torch.as_tensor(after[key]), torch.as_tensor(state[key])) for key in state), where
        skips = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PoplarWarning)
            try:
                for _ in range(100):
                    skips += engine.step(ones).skipped
            except NonFiniteError as error:
                assert "smallest loss scale" in str(error) or "in a row" in str(error), (where, error)
            else:
                raise AssertionError(f"{where}: {skips} skipped steps and no end")
        rows = engine.comm.gather_floats([engine.loss_scale.value, skips, engine.num_skipped])
        assert all(row == rows[0] for row in rows), (where, rows)
        engine.close()


def test_overflow_on_one_rank_is_everybodys() -> None:
    run_ranks(_overflow, 3, timeout_s=60)


class _Mixed(nn.Module):
    """Z28: float32 norm, bfloat16 and float16 linears, float64 head, in one block; a frozen part in each."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Module()
        block.norm = nn.LayerNorm(zoo.WIDTH)
        block.brain = nn.Linear(zoo.WIDTH, 5, dtype=torch.bfloat16)
        block.narrow = nn.Linear(5, 7, dtype=torch.float16)
        block.frozen = nn.Linear(7, zoo.WIDTH, dtype=torch.bfloat16).requires_grad_(False)
        self.blocks = nn.ModuleList([block])
        self.head = nn.Linear(zoo.WIDTH, zoo.CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        block = self.blocks[0]
        x = F.linear(block.norm(x).bfloat16(), block.brain.weight, block.brain.bias).half()
        x = block.frozen(torch.tanh(block.narrow(x)).bfloat16())
        return self.head(x.double())


def _mixed(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    whole = _Mixed()
    optimizer = _sgd(whole)
    for step in range(3):
        optimizer.zero_grad()
        cross_entropy(whole, _single(step)).backward()
        optimizer.step()
    frozen = whole.blocks[0].frozen.weight.clone()
    for stage in range(4):
        torch.manual_seed(0)
        model = _Mixed()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*at stage 3 it is gathered whole", PoplarWarning)
            engine, _ = _train(rank, model, num_steps=3, zero_stage=stage, shard_ratios=[1.0, 3.0])
        got = engine.full_state_dict()
        for name, value in whole.state_dict().items():
            tolerance = 1e-2 if value.dtype in (torch.bfloat16, torch.float16) else 2e-3
            assert got[name].dtype == value.dtype, f"z{stage} {name} {got[name].dtype}"
            assert distance(got[name], value) < tolerance, f"z{stage} {name} {distance(got[name], value)}"
        assert torch.equal(got["blocks.0.frozen.weight"], frozen), f"z{stage}"
        engine.close()


def test_dtypes_side_by_side() -> None:
    run_ranks(_mixed, 2, timeout_s=60)


def _automatic(rank: int, world_size: int) -> None:
    """X14: what all cards have, whatever emulation says."""
    cards = {
        "bf16": (ALL, ALL),
        "fp16": (ALL, _Card("fp32", "fp16")),
        "fp32": (_Card("fp32", "bf16"), _Card("fp32", "fp16")),
    }
    for want, by_rank in cards.items():
        model = zoo.Plain()
        engine = poplar.initialize(model, _sgd(model), cross_entropy, precision="auto", device=by_rank[rank])
        assert engine.precision == want, (engine.precision, want)
        engine.close()
    model = zoo.Plain()
    with pytest.warns(PoplarWarning, match=r"ranks \[1\] do not compute in it natively"):
        poplar.initialize(model, _sgd(model), cross_entropy, precision="bf16", device=cards["fp16"][rank]).close()


def test_auto_takes_what_all_cards_have() -> None:
    run_ranks(_automatic, 2, timeout_s=60)


def _clipping(rank: int, world_size: int) -> None:
    """X06, X07, X10, X11, X12: norms (before clipping), and clipping, are those of one process at all stages."""
    for norm_type in (2.0, float("inf"), 1.0):
        for max_value in (None, 0.01):
            torch.manual_seed(0)
            whole = zoo.TiedAcross().double()
            optimizer = _sgd(whole)
            x = torch.arange(7).repeat(2).view(-1, 2)
            batch = (x, x.flip(1))
            cross_entropy(whole, batch).backward()
            norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.3, norm_type)
            if max_value is not None:
                torch.nn.utils.clip_grad_value_(whole.parameters(), max_value)
            optimizer.step()
            for stage in range(4):
                where = f"norm {norm_type}, value {max_value}, z{stage}"
                torch.manual_seed(0)
                model = zoo.TiedAcross().double()
                engine = poplar.initialize(
                    model, _sgd(model), cross_entropy, zero_stage=stage, shard_ratios=[1.0, 9.0],
                    max_grad_norm=0.3, norm_type=norm_type, max_grad_value=max_value,
                )  # fmt: skip
                own = [rows_of(batch, [0])] if rank == 0 else [rows_of(batch, range(1, 7))]
                result = engine.step(own)
                assert result.grad_norm == pytest.approx(norm.item(), rel=1e-12), where
                got = engine.full_state_dict()
                for name, value in whole.state_dict().items():
                    assert distance(got[name], value) < 1e-12, f"{where}: {name} {distance(got[name], value)}"
                engine.close()


def test_norms_and_clipping_are_those_of_one_process() -> None:
    run_ranks(_clipping, 2, timeout_s=60)

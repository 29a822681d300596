"""Model state between micro-steps is within ZeRO's formulas; peaks add whole units, not models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import poplar
from poplar.memory_meter import MemoryMeter
from tests.helpers.spawn import run_ranks

WIDTH, NUM_BLOCKS, DEPTH = 48, 8, 4


class _Model(nn.Module):
    """Equal blocks and a small root, so that a unit is an eighth of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))) for _ in range(NUM_BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * self.scale


def _state_bytes(stage: int, param_bytes: float, share: float) -> float:
    """Adam in float32, P bytes of parameters: see DESIGN's table and ZeRO, arXiv:1910.02054, figure 1."""
    return {
        0: 4 * param_bytes,
        1: 2 * param_bytes + 2 * param_bytes * share,
        2: param_bytes + 3 * param_bytes * share,
        3: 4 * param_bytes * share,
    }[stage]


def _measure(rank: int, world_size: int, ratios: list[float] | None) -> list[dict[str, float]]:
    rows = []
    for stage in range(4):
        meter = MemoryMeter()
        between: list[int] = []

        def loss(model: nn.Module, batch: Tensor, meter: MemoryMeter = meter, between: list[int] = between) -> Tensor:
            between.append(meter.live_bytes)
            return F.mse_loss(model(batch), batch)

        with meter:
            torch.manual_seed(0)
            model = _Model()
            engine = poplar.initialize(
                model, torch.optim.AdamW(model.parameters()), loss, zero_stage=stage, shard_ratios=ratios
            )
            own = [torch.ones(1, WIDTH)] * 3
            for _ in range(2):
                engine.step(own)
            after_steps = meter.live_bytes
            between.clear()
            meter.reset_peak()
            engine.step(own)
            # The last of three micro-steps: gradients of the first two are held, no activation is.
            rows.append({"between": between[2], "after": after_steps, "peak": meter.peak_bytes})
        unit_bytes = max(sum(b.padded_numel * 4 for b in unit.buffers) for unit in engine.units)
        rows[-1] |= {"unit": unit_bytes, "params": sum(b.padded_numel * 4 for u in engine.units for b in u.buffers)}
        engine.close()
        del engine, model
    return rows


@pytest.mark.parametrize(("world_size", "ratios"), [(2, None), (3, None), (2, [3.0, 1.0])])
def test_bytes_of_model_state_are_those_of_zero(world_size: int, ratios: list[float] | None) -> None:
    by_rank = run_ranks(_measure, world_size, ratios, timeout_s=60)
    for rank, rows in enumerate(by_rank):
        share = (ratios[rank] / sum(ratios)) if ratios else 1 / world_size
        for stage, row in enumerate(rows):
            where = f"z{stage}, rank {rank} of {world_size}, shards {ratios or 'equal'}: {row}"
            formula = _state_bytes(stage, row["params"], share)
            slack = 2 * NUM_BLOCKS * DEPTH * WIDTH * 4 + 4096  # one sample's activations, votes, losses, counters
            root_bytes = WIDTH * 4
            unit, param = row["unit"], WIDTH * WIDTH * 4
            # A reduction in flight: the whole gradient, and what arrives from the other ranks.
            in_flight = unit * (2 - 1 / world_size if ratios is None else 1 + share)
            gradients = param_share(stage, row["params"], share)
            assert abs(row["after"] - (formula - gradients)) <= slack, f"{where}, formula {formula - gradients}"
            # As the third forward begins, the second's last reduction may still be under way, and a gather ahead.
            ahead = (0, 0, in_flight, in_flight + unit + root_bytes)[stage]
            assert formula - slack <= row["between"] <= formula + ahead + slack, f"{where}, formula {formula}"
            if stage == 2:
                assert row["peak"] <= formula + unit + in_flight + param + slack, f"{where}, formula {formula}"
            if stage == 3:
                # The root, and the unit in use and the next one, besides the gradients.
                bound = formula + root_bytes + 3 * unit + in_flight + param + slack
                assert row["peak"] <= bound, f"{where}, formula {formula}, bound {bound}"


def param_share(stage: int, param_bytes: float, share: float) -> float:
    """Return the bytes of gradients that a stage keeps from micro-step to micro-step; at stages 0 and 1, for ever."""
    return 0.0 if stage < 2 else param_bytes * share


def _measure_frozen(rank: int, world_size: int) -> tuple[int, int, int]:
    """Return the peak of a step at stage 3, the bytes held between steps, and those of the largest unit."""
    meter = MemoryMeter()
    with meter:
        torch.manual_seed(0)
        model = _Model()
        for block in model.blocks:  # of each block, all is frozen but one layer
            block[1:].requires_grad_(False)
        optimizer = torch.optim.AdamW(param for param in model.parameters() if param.requires_grad)
        engine = poplar.initialize(model, optimizer, lambda m, batch: F.mse_loss(m(batch), batch), zero_stage=3)
        own = [torch.ones(1, WIDTH)] * 2
        engine.step(own)
        held = meter.live_bytes
        meter.reset_peak()
        engine.step(own)
        unit_bytes = max(sum(b.padded_numel * 4 for b in unit.buffers) for unit in engine.units)
    engine.close()
    return meter.peak_bytes, held, unit_bytes


def test_frozen_units_are_freed_as_backward_moves_on() -> None:
    """Nothing tells that a frozen part is done with; kept to the end of backward, all of the model would be whole."""
    for peak, held, unit in run_ranks(_measure_frozen, 2, timeout_s=60):
        assert peak <= held + 4 * unit + 8192, f"{(peak - held) / unit:.1f} units above what is held between steps"


class _AtBackward(torch.autograd.Function):
    """Calls ``note`` when backward begins."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return grad, None


class _Skipping(_Model):
    uses: tuple[int, ...] = tuple(range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for index in self.uses:
            x = torch.tanh(self.blocks[index](x))
        return x * self.scale


def _measure_skipped(rank: int, world_size: int) -> tuple[int, int]:
    """Return what a rank that uses two blocks of eight holds as its backward begins, over what it holds at rest."""
    meter = MemoryMeter()
    seen: list[int] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return _AtBackward.apply(F.mse_loss(model(batch), batch), lambda: seen.append(meter.live_bytes))

    with meter:
        torch.manual_seed(0)
        model = _Skipping()
        engine = poplar.initialize(model, torch.optim.AdamW(model.parameters()), loss, zero_stage=3)
        own = [torch.ones(1, WIDTH)]
        engine.step(own)
        model.uses = (0, NUM_BLOCKS - 1) if rank == 1 else _Skipping.uses
        held = meter.live_bytes
        engine.step(own)
        unit_bytes = max(sum(b.padded_numel * 4 for b in unit.buffers) for unit in engine.units)
    engine.close()
    return seen[-1] - held, unit_bytes


def test_what_was_gathered_for_other_ranks_alone_is_freed_before_backward() -> None:
    """The last block, and the next one ahead; on the rank that skips six others as on the one that uses all."""
    for extra, unit in run_ranks(_measure_skipped, 2, timeout_s=60):
        assert extra <= 2 * unit + 8192, f"{extra / unit:.1f} units"

"""Memory that runs out inside the engine, where a collective is being prepared, ends the step on every rank (P09, P10).

A rank that skips one collective shifts all that follow. So an error is thrown at every place in turn where a stage
allocates; each time all ranks must raise, and the next step must be that of one process.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import nn

import poplar
from poplar.errors import StepError
from poplar.zero.gradients import _WholeGradient
from poplar.zero.stage3 import Stage3
from tests.helpers.spawn import run_ranks

NUM_PLACES = 20
# Whole parameters are allocated before they are gathered, whole gradients when the first gradient comes.
ALLOCATES = ((Stage3, "_memory_for"), (_WholeGradient, "_memory"))


class _Countdown:
    """Throws at the n-th allocation inside a step."""

    def __init__(self) -> None:
        self.left = 0

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("no memory for a buffer")

    def watching(self, owner: type, name: str):
        real = getattr(owner, name)

        def counted(this, *args):
            self.tick()
            return real(this, *args)

        return patch.object(owner, name, counted)


def _model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 4)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(4, 2)).double()


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def _fail_everywhere(rank: int, world_size: int, zero_stage: int) -> int:
    torch.manual_seed(1)
    data = torch.randn(6, 4).double(), torch.randn(6, 2).double()
    halves = [[(data[0][a:b], data[1][a:b]) for a, b in spans] for spans in (((0, 1), (1, 4)), ((4, 6),))]
    model, reference = _model(), _model()
    engine = poplar.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), _loss, zero_stage=zero_stage)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    countdown = _Countdown()
    num_failures = 0
    with countdown.watching(*ALLOCATES[0]), countdown.watching(*ALLOCATES[1]):
        for place in range(1, NUM_PLACES):
            countdown.left = place if rank == 1 else 0
            try:
                engine.step(halves[rank])
                taken = 2
            except (torch.OutOfMemoryError, StepError):
                num_failures += 1
                taken = 1
            countdown.left = 0
            result = engine.step(halves[rank])
            for _ in range(taken):
                optimizer.zero_grad()
                loss = _loss(reference, data)
                loss.backward()
                optimizer.step()
            assert abs(result.loss - loss.item()) < 1e-12, (place, taken)
    return num_failures


@pytest.mark.timeout(90)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_memory_that_runs_out_at_any_allocation_ends_the_step_everywhere(zero_stage):
    failures = run_ranks(_fail_everywhere, 2, zero_stage, timeout_s=60)
    assert failures[0] == failures[1] > 0

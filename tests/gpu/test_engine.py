"""The engine on cards: NCCL where each rank has one, else two ranks share a card over host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import poplar
from poplar.device import CudaDevice
from poplar.zero.comm import ProcessGroupComm
from tests.helpers import zoo
from tests.helpers.models import Case, cross_entropy, sgd, vectors
from tests.helpers.parity import check, reference, rows_of
from tests.helpers.spawn import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")

NUM_RUNS = 20
PLAIN = Case(name="plain", model=zoo.Plain)


class _CardComm(ProcessGroupComm):
    def __repr__(self) -> str:  # the parity body draws its splits by it, on all ranks alike
        return "card"


def _on_card(rank: int, world_size: int) -> dict[str, Any]:
    num_cards = torch.cuda.device_count()
    device = CudaDevice(rank % num_cards)
    group = dist.new_group(backend="nccl") if num_cards >= world_size else dist.group.WORLD
    return {"device": device, "comm": _CardComm(group, device.torch_device)}


def _parity(rank: int, world_size: int) -> None:
    options = _on_card(rank, world_size)
    expected = reference(PLAIN)
    for stage in range(4):
        for ratios in (None, [1.0, 3.0]):
            check(rank, world_size, PLAIN, stage, ratios, expected, **options)


def test_cards_equal_one_process() -> None:
    run_ranks(_parity, 2, timeout_s=100)


def _repeat(rank: int, world_size: int) -> None:
    options = _on_card(rank, world_size)
    own = [rows_of(vectors(0), rows) for rows in ([[0, 1, 2], [3]], [[4, 5, 6, 7, 8]])[rank]]
    for stage in range(4):
        first = None
        for _ in range(NUM_RUNS):
            torch.manual_seed(0)
            model = zoo.Plain(4).double()
            engine = poplar.initialize(model, sgd(model), cross_entropy, zero_stage=stage, **options)
            results = [engine.step(own) for _ in range(2)]
            weights = engine.full_state_dict()
            engine.close()
            first = first or (results, weights)
            assert results == first[0], f"z{stage}"
            assert all(torch.equal(weights[name], value) for name, value in first[1].items()), f"z{stage}"


def test_overlapped_steps_are_bitwise_the_same_each_time() -> None:
    """Z38: a buffer that is used again before its transfer is done shows as another result now and then."""
    run_ranks(_repeat, 2, timeout_s=100)

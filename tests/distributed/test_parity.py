"""Training over ranks equals training in one process: the settings, on one plain and one token model.

Stages 0-3, world sizes 1 to 3, even and uneven shards, random splits: see ``helpers/parity.py``. Models that are
awkward have their own test. SGD with momentum comes first, since Adam hides a wrong factor.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import poplar
from tests.distributed.test_awkward_models import run_cases
from tests.helpers import zoo
from tests.helpers.models import (
    Batch,
    Case,
    adamw_two_groups,
    tokens,
)
from tests.helpers.parity import build, distance, random_split, reference, rows_of
from tests.helpers.spawn import run_ranks


def _summed(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum")


def _few_labels(step: int) -> Batch:
    """Token counts that differ wildly between samples: 1 label, all labels, none."""
    x, y = tokens(step)
    y[:3] = -1
    y[0, step % 4] = 1
    y[3:] = x[3:]
    return x, y


def _adam_settings(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True, weight_decay=0.1, maximize=False)


def _with(optimizer: type[torch.optim.Optimizer], **options: object) -> object:
    return lambda model: optimizer(model.parameters(), **options)


PLAIN = Case(name="plain", model=partial(zoo.Plain, 2), num_steps=4)
TOKEN = Case(name="tokens", model=zoo.TiedAcross, data=tokens, num_steps=5)
CASES = (
    replace(PLAIN, name="sgd_momentum"),  # H01, H21, Z34, Z35, Z37, Z44, Z49
    replace(PLAIN, name="default_weight", weight=None),
    replace(PLAIN, name="weight_is_a_tensor", weight=lambda batch: torch.tensor([len(batch[0])])),  # H03, X18
    replace(PLAIN, name="weight_is_an_int", weight=lambda batch: len(batch[0])),
    replace(PLAIN, name="sum", loss=_summed, reduction="sum"),  # H02
    replace(PLAIN, name="clipped", max_grad_norm=0.05),
    replace(PLAIN, name="adamw_two_groups", optimizer=adamw_two_groups, max_grad_norm=1.0),  # Z31
    replace(TOKEN, name="token_weights"),  # H15, H17, H18, H20
    replace(TOKEN, name="token_weights_few_labels", data=_few_labels, optimizer=adamw_two_groups),
)
# Where the shards are cut is one thing, what steps over them another: these run on two ranks alone.
OPTIMIZERS = (
    replace(PLAIN, name="adagrad", optimizer=_with(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1)),
    replace(PLAIN, name="rmsprop", optimizer=_with(torch.optim.RMSprop, lr=1e-2, momentum=0.9, centered=True)),
    replace(PLAIN, name="adam_amsgrad", optimizer=_adam_settings),
    replace(PLAIN, name="adadelta", optimizer=_with(torch.optim.Adadelta)),
    replace(PLAIN, name="nadam", optimizer=_with(torch.optim.NAdam, lr=1e-2)),
    replace(PLAIN, name="radam", optimizer=_with(torch.optim.RAdam, lr=1e-2)),
    replace(PLAIN, name="adamax", optimizer=_with(torch.optim.Adamax, lr=1e-2)),
    replace(PLAIN, name="asgd", optimizer=_with(torch.optim.ASGD, lr=1e-2)),
    replace(PLAIN, name="rprop", optimizer=_with(torch.optim.Rprop, lr=1e-2)),
    replace(PLAIN, name="adamw_fused", optimizer=_with(torch.optim.AdamW, lr=1e-2, fused=True)),
    replace(PLAIN, name="sgd_nesterov", optimizer=_with(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)),
    replace(PLAIN, name="learning_rate_tensor", optimizer=_with(torch.optim.AdamW, lr=torch.tensor(1e-2))),
)


def _run(rank: int, world_size: int) -> list[str]:
    return run_cases(rank, world_size, [*CASES, *OPTIMIZERS] if world_size == 2 else list(CASES))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_equals_one_process(world_size: int) -> None:
    for failures in run_ranks(_run, world_size, timeout_s=110):
        assert not failures, "\n".join(failures)


# Invariants 1 to 3, as properties: hypothesis draws splits and shards on every rank alike, since it is seeded.


def _invariants(rank: int, world_size: int) -> None:
    expected = {case.name: reference(case) for case in (TOKEN, PLAIN)}

    @settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(
        case=st.sampled_from([TOKEN, PLAIN]),
        seed=st.integers(0, 2**31),
        ratios=st.none() | st.lists(st.sampled_from([0.0, 0.3, 1.0, 7.0]), min_size=world_size, max_size=world_size),
    )
    def split_and_stage_invariance(case: Case, seed: int, ratios: list[float] | None) -> None:
        if ratios is not None and not any(ratios):
            ratios = None
        rng = random.Random(seed)
        splits = [random_split(rng, 9, world_size) for _ in range(2)]
        for stage in range(4):
            model = build(case, seed=rank)
            engine = poplar.initialize(
                model, case.optimizer(model), case.loss, zero_stage=stage, weight=case.weight, shard_ratios=ratios
            )
            for step, split in enumerate(splits):
                batch = case.data(step)
                result = engine.step([None if rows is None else rows_of(batch, rows) for rows in split[rank]])
                want = expected[case.name]
                assert abs(result.loss - want.losses[step]) < 1e-12 * abs(want.losses[step]), (stage, ratios, split)
                assert abs(result.grad_norm - want.norms[step]) < 1e-12 * want.norms[step], (stage, ratios, split)
            weights = engine.full_state_dict()
            for name, value in want.weights[1].items():
                assert distance(weights[name], value) < 1e-12, (stage, ratios, split, name)
            row = [result.loss, result.grad_norm, *(value.double().sum().item() for value in weights.values())]
            rows = engine.comm.gather_floats([*row, engine.num_steps, engine.loss_scale.value, float(result.skipped)])
            assert all(other == rows[0] for other in rows), f"ranks disagree at z{stage}: {rows}"
            engine.close()

    split_and_stage_invariance()


@pytest.mark.parametrize("world_size", [2, 3])
def test_invariants_of_split_stage_and_rank(world_size: int) -> None:
    run_ranks(_invariants, world_size, timeout_s=110)

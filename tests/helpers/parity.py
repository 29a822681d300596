"""The one body for all stages: any split over ranks and micro-steps equals one process on the whole batch.

``check`` trains a ``Case`` in float64 on the ranks of the default group and compares, step by step, the loss and the
gradient norm, then the evaluation loss and the weights, with ``reference``: plain PyTorch on the whole batch.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import poplar
from poplar.errors import ScheduleError, StepError
from poplar.zero.precision import PoplarWarning
from tests.helpers.models import Case

TOLERANCE = 1e-12
# A bias that no loss depends on moves by rounding alone; its own norm is then no scale.
SMALLEST_NORM = 1e-3


@dataclass(frozen=True)
class Trace:
    """What one process computes."""

    losses: list[float]
    norms: list[float]
    weights: list[dict[str, Tensor]]
    """After each step."""
    evaluation: float


def distance(got: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of what is expected."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    got, expected = got.to(wide), expected.to(wide)
    return ((got - expected).norm() / expected.norm().clamp_min(SMALLEST_NORM)).item()


def build(case: Case, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return case.model().double()


def reference(case: Case) -> Trace:
    """Train on the whole batch in this process. No gradient counts as zero."""
    model = build(case, seed=0)
    optimizer = case.optimizer(model)
    losses, norms, weights = [], [], []
    for step in range(case.num_steps):
        case.before_step(model, step)
        optimizer.zero_grad()
        loss = case.loss(model, case.data(step))
        loss.backward()
        trained = [param for param in model.parameters() if param.requires_grad]
        for param in trained:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        norms.append(torch.nn.utils.clip_grad_norm_(trained, case.max_grad_norm or float("inf")).item())
        losses.append(loss.item())
        optimizer.step()
        weights.append({name: value.detach().clone() for name, value in _plain_state_dict(model).items()})
    model.eval()
    with torch.no_grad():
        evaluation = case.loss(model, case.data(case.num_steps)).item()
    return Trace(losses, norms, weights, evaluation)


def _plain_state_dict(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}


def rows_of(batch: Any, rows: Sequence[int]) -> Any:
    """Return a micro-batch: some samples of a batch of tensors in a tuple or a dict."""
    if isinstance(batch, dict):
        return {key: value[list(rows)] for key, value in batch.items()}
    return tuple(value[list(rows)] for value in batch)


def num_samples(batch: Any) -> int:
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])


def random_split(rng: random.Random, num_samples: int, world_size: int) -> list[list[list[int] | None]]:
    """Deal all samples out to ranks and micro-steps; some ranks get little or nothing, some micro-steps are idle."""
    order = list(range(num_samples))
    rng.shuffle(order)
    shares = [rng.choice([0.0, 0.2, 1.0, 1.0]) for _ in range(world_size)]
    shares[rng.randrange(world_size)] = 1.0
    ranks: list[list[list[int] | None]] = [[] for _ in range(world_size)]
    while order:
        size = rng.choice([1, 2, 3, 5])
        rank = rng.choices(range(world_size), shares)[0]
        if rng.random() < 0.2:
            ranks[rng.randrange(world_size)].append(None)
        ranks[rank].append(order[:size])
        order = order[size:]
    return ranks


def check(
    rank: int, world_size: int, case: Case, stage: int, ratios: Sequence[float] | None, expected: Trace, **options: Any
) -> None:
    """Train ``case`` over the ranks; raise an AssertionError that says which case, stage and shards went wrong.

    ``options`` go to ``poplar.initialize``.
    """
    where = f"{case.name}, z{stage}, {world_size} ranks, shards {ratios or 'equal'}{f', {options}' if options else ''}"
    rng = random.Random(where)
    model = build(case, seed=rank)  # only rank 0's weights are the reference's
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*of the model; at stage 3 it is gathered whole", PoplarWarning)
        warnings.filterwarnings("ignore", "batch normalisation uses", PoplarWarning)
        engine = poplar.initialize(
            model,
            case.optimizer(model),
            case.loss,
            zero_stage=stage,
            weight=case.weight,
            reduction=case.reduction,
            max_grad_norm=case.max_grad_norm,
            shard_ratios=ratios,
            units=case.units,
            **options,
        )
    try:
        _train_and_compare(engine, rank, case, expected, rng, where)
    except (ScheduleError, StepError):
        # Allowed where the line says so; on every rank, or the others hang in their next collective.
        if stage != 3 or not case.may_be_refused:
            raise
        engine.comm.barrier()
    engine.close()


def _train_and_compare(
    engine: poplar.Engine, rank: int, case: Case, expected: Trace, rng: random.Random, where: str
) -> None:
    world_size = engine.comm.world_size
    for step in range(case.num_steps):
        case.before_step(engine.module, step)
        batch = case.data(step)
        split = random_split(rng, num_samples(batch), world_size)
        result = engine.step([None if rows is None else rows_of(batch, rows) for rows in split[rank]])
        for what, got, want in (
            ("loss", result.loss, expected.losses[step]),
            ("gradient norm", result.grad_norm, expected.norms[step]),
        ):
            error = abs(got - want) / max(abs(want), SMALLEST_NORM)
            assert error < TOLERANCE, f"{where}, step {step}: {what} {got}, one process {want}; split {split}"
        if step in (0, case.num_steps - 1):
            _compare(f"{where}, after step {step}", engine.full_state_dict(), expected.weights[step], split)
    batch = case.data(case.num_steps)
    split = random_split(rng, num_samples(batch), world_size)
    loss = engine.evaluate([None if rows is None else rows_of(batch, rows) for rows in split[rank]])
    error = abs(loss - expected.evaluation) / abs(expected.evaluation)
    assert error < TOLERANCE, f"{where}: evaluation {loss}, one process {expected.evaluation}; split {split}"


def _compare(where: str, got: dict[str, Tensor], want: dict[str, Tensor], split: Any) -> None:
    assert list(got) == list(want), f"{where}: names {list(got)}, one process {list(want)}"
    for name in want:
        error = distance(got[name], want[name])
        assert error < TOLERANCE, f"{where}: {name} is off by {error:.1e}; split {split}"


def shards_to_try(stage: int, world_size: int) -> tuple[Sequence[float] | None, ...]:
    """Return equal shards (None), and uneven ones with nothing for some rank, where the stage has any.

    Stage 3 gets both, stages 1 and 2 one at two ranks and the other at three: 40 s less. ``POPLAR_TEST_FULL=1``: both.
    """
    if stage == 0 or world_size == 1:
        return (None,)
    uneven = [1, 0] if world_size == 2 else [1, 0, 2.3]
    if stage == 3 or os.environ.get("POPLAR_TEST_FULL"):
        return (None, uneven)
    return (uneven,) if (stage == 1) == (world_size == 2) else (None,)

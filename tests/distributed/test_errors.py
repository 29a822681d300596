"""A failure on one rank reaches every rank and leaves no trace: the next step equals one process exactly."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import poplar
from poplar.errors import CommunicationError, ConfigError, ModelError, NonFiniteError, ScheduleError, StepError
from poplar.zero.precision import PoplarWarning
from tests.helpers import zoo
from tests.helpers.models import Batch, Case, cross_entropy
from tests.helpers.parity import Trace, build, distance, reference, rows_of
from tests.helpers.spawn import run_ranks


class Boom(Exception):
    pass


class _BoomInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Boom("in backward")


class Faulty(zoo.Plain):
    """Fails where ``fault`` says."""

    fault: str | None = None

    def __init__(self) -> None:
        super().__init__(3)

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if self.fault == "forward" and index == 1:
                raise Boom("in forward")
            if self.fault == "memory" and index == 2:
                raise torch.OutOfMemoryError("in forward")
            x = block(x)
            if self.fault == "backward" and index == 1:
                x = _BoomInBackward.apply(x)
        if self.fault == "nan":
            x = x * float("nan")
        return self.head(x)


def _loss(model: nn.Module, batch: Batch) -> Any:
    if model.fault == "vector":
        return model(batch[0])
    if model.fault == "number":
        return 1.0
    if model.fault == "detached":
        return cross_entropy(model, batch).detach()
    return cross_entropy(model, batch)


def _weight(batch: Batch) -> float:
    return len(batch[0])


CASE = Case(name="faulty", model=Faulty, loss=_loss, weight=None, num_steps=4)
FAULTS = {
    "forward": Boom,
    "memory": torch.OutOfMemoryError,
    "backward": Boom,
    "vector": ModelError,
    "number": ModelError,
}


def _split(rank: int, world_size: int, step: int) -> list[Batch]:
    """Rank 1 has one micro-batch more than the others."""
    batch = CASE.data(step)
    if world_size == 2:
        rows = [[[0, 1], [2]], [[3, 4], [5], [6, 7, 8]]]
    else:
        rows = [[[0, 1], [2]], [[3], [4], [5, 6]], [[7, 8]]]
    return [rows_of(batch, chosen) for chosen in rows[rank]]


def _engine(rank: int, stage: int, **changes: Any) -> poplar.Engine:
    model = build(CASE, seed=rank)
    return poplar.initialize(model, CASE.optimizer(model), _loss, zero_stage=stage, **changes)


def _check_step(engine: poplar.Engine, rank: int, expected: Trace, step: int, where: str) -> None:
    result = engine.step(_split(rank, engine.comm.world_size, step))
    assert abs(result.loss - expected.losses[step]) < 1e-12, f"{where}: loss {result.loss}, {expected.losses[step]}"
    got = engine.full_state_dict()
    for name, value in expected.weights[step].items():
        assert distance(got[name], value) < 1e-12, f"{where}: {name} off by {distance(got[name], value)}"


def _raises(kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any], where: str) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{where}: nothing raised, expected {kind}")


def _faults(rank: int, world_size: int) -> None:
    expected = reference(CASE)
    for stage in range(4):
        for fault, kind in FAULTS.items():
            for fails_at in (0, 1):
                where = f"z{stage}, {fault} fails on rank 1 at step {fails_at}"
                engine = _engine(rank, stage)
                for step in range(3):
                    if step == fails_at:
                        engine.module.fault = fault if rank == 1 else None
                        call = partial(engine.step, _split(rank, world_size, step))
                        text = _raises(kind if rank == 1 else StepError, call, where)
                        assert rank == 1 or "rank 1" in text, f"{where}: {text}"
                        engine.module.fault = None
                    _check_step(engine, rank, expected, step, where)
                engine.close()


def test_a_failing_rank_is_heard_everywhere_and_leaves_no_trace() -> None:
    run_ranks(_faults, 2, timeout_s=110)


class _FailingSgd(torch.optim.SGD):
    """Fails after it has updated the first tensor, as an out-of-memory in the middle of a step would."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            first = self.param_groups[0]["params"][0]
            first.data.add_(1.0)
            raise torch.OutOfMemoryError("in the optimizer")
        return super().step(closure)


def _fault_in_the_optimizer(rank: int, world_size: int, parent: str) -> None:
    """Weights may differ afterwards: no step is taken with them, on any rank, until a checkpoint has been loaded."""
    for stage in (0, 1, 2, 3):
        for healthy_steps in (0, 2):
            torch.manual_seed(0)
            model = build(CASE, seed=rank)
            optimizer = _FailingSgd(model.parameters(), lr=0.1, momentum=0.9)
            engine = poplar.initialize(model, optimizer, _loss, zero_stage=stage)
            where = f"stage {stage}, after {healthy_steps} steps"
            for step in range(healthy_steps):
                engine.step(_split(rank, world_size, step))
            folder = f"{parent}/z{stage}-{healthy_steps}"
            engine.save(folder)
            step_again = partial(engine.step, _split(rank, world_size, 0))
            optimizer.fails = rank == 1
            if rank == 1:
                _raises(torch.OutOfMemoryError, step_again, where)
            elif healthy_steps == 0:
                _raises(StepError, step_again, where)
            else:
                step_again()  # hears of it in the next
            optimizer.fails = False
            text = _raises(StepError, step_again, where)
            assert "optimizer" in text, text
            _raises(StepError, partial(engine.evaluate, _split(rank, world_size, 0)), where)
            engine.load(folder)
            assert not step_again().skipped, where
            state = engine.full_state_dict()
            for other in engine.comm.gather_objects(state):
                assert all(torch.equal(other[name], value) for name, value in state.items()), where
            engine.close()


def test_a_failing_optimizer_stops_all_ranks_until_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    run_ranks(_fault_in_the_optimizer, 3, str(tmp_path))


def _fault_on_leader_and_in_evaluation(rank: int, world_size: int) -> None:
    expected = reference(CASE)
    for stage in range(4):
        where = f"z{stage}, rank 0 fails"
        engine = _engine(rank, stage)
        for step in range(2):
            engine.module.fault = "forward" if rank == 0 else None
            evaluate = partial(engine.evaluate, _split(rank, world_size, step))
            _raises(Boom if rank == 0 else StepError, evaluate, where)
            _raises(Boom if rank == 0 else StepError, partial(engine.step, _split(rank, world_size, step)), where)
            engine.module.fault = None
            engine.evaluate(_split(rank, world_size, step))
            assert engine.module.training, where
            _check_step(engine, rank, expected, step, where)
        for bad in (None, 3, [torch.tensor(1.0)], [(torch.ones(2), torch.ones(3))]):
            given = bad if rank == 2 else _split(rank, world_size, 0)
            kind = (ConfigError, TypeError) if rank == 2 else StepError
            _raises(kind, partial(engine.step, given), f"z{stage}, micro-batches {bad}")
        with engine.unsharded():
            _raises(ConfigError, partial(engine.step, _split(rank, world_size, 0)), f"z{stage}, inside unsharded")
        _check_step(engine, rank, expected, 2, where)
        if stage == 3:
            _raises(ModelError, partial(engine.module, CASE.data(0)[0]), "call of a sharded model")
            _check_step(engine, rank, expected, 3, "after a call of the sharded model")
        engine.close()


def test_faults_of_the_first_rank_in_evaluation_and_in_arguments() -> None:
    run_ranks(_fault_on_leader_and_in_evaluation, 3, timeout_s=110)


def _nan(rank: int, world_size: int) -> None:
    """X01, X03."""
    expected = reference(CASE)
    for stage in range(4):
        where = f"z{stage}"
        engine = _engine(rank, stage)
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
        _check_step(engine, rank, expected, 0, where)
        before = engine.full_state_dict()
        state = engine.full_optimizer_state_dict()["state"]
        engine.module.fault = "nan" if rank == 1 else None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = engine.step(_split(rank, world_size, 1))
        assert result.skipped and engine.num_skipped == 1 and engine.num_steps == 1, (where, result)
        texts = [str(w.message) for w in caught if w.category is PoplarWarning]
        assert len(texts) == 1 and "ranks [1]" in texts[0], (where, texts)
        if not result.skipped:
            scheduler.step()
        assert engine.optimizer.param_groups[0]["lr"] == 0.1
        after = engine.full_state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before), where
        new_state = engine.full_optimizer_state_dict()["state"]
        assert all(torch.equal(new_state[n]["momentum_buffer"], state[n]["momentum_buffer"]) for n in state), where
        engine.module.fault = None
        _check_step(engine, rank, expected, 1, where)
        engine.close()
        strict = _engine(rank, stage, non_finite="raise")
        strict.module.fault = "nan" if rank == 0 else None
        text = _raises(NonFiniteError, partial(strict.step, _split(rank, world_size, 0)), where)
        assert "ranks [0]" in text, (where, text)
        strict.module.fault = None
        _check_step(strict, rank, expected, 0, where)
        strict.close()


def test_nan_on_one_rank_is_skipped_or_raised_by_all() -> None:
    run_ranks(_nan, 2, timeout_s=110)


class Wayward(zoo.Plain):
    """Takes its blocks in an order that a rank may change."""

    order: Sequence[int] = (0, 1, 2, 3)

    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x)


def _wayward(rank: int, world_size: int) -> list[str]:
    """At stage 3 another order than agreed is right, or a ScheduleError that names the module; below, always right."""
    refused = []
    case = replace(CASE, name="wayward", model=Wayward, loss=cross_entropy)
    for order in ((0,), (3, 2, 1, 0), (0, 2), (1, 1, 1), (2, 0, 3, 1), (0, 0, 1, 1, 2, 2, 3, 3)):
        for stage in range(4):
            where = f"order {order} on rank 1, z{stage}"
            model = build(case, seed=rank)
            engine = poplar.initialize(model, case.optimizer(model), cross_entropy, zero_stage=stage)
            plain = build(case, seed=0)
            optimizer = case.optimizer(plain)
            for step in range(4):
                changed = step in (1, 2)
                model.order = order if rank == 1 and changed else Wayward.order
                # The reference: each rank's samples by that rank's order.
                optimizer.zero_grad()
                for other in range(world_size):
                    plain.order = order if other == 1 and changed else Wayward.order
                    for batch in _split(other, world_size, step):
                        (cross_entropy(plain, batch) * len(batch[0]) / 9).backward()
                for param in plain.parameters():
                    param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                try:
                    engine.step(_split(rank, world_size, step))
                except (ScheduleError, StepError) as error:
                    assert stage == 3 and changed, where
                    assert "blocks." in str(error), f"{where}: {error}"
                    refused.append(where)
                    continue
                optimizer.step()
                got = engine.full_state_dict()
                for name, value in plain.state_dict().items():
                    assert distance(got[name], value) < 1e-12, (
                        f"{where}, step {step}: {name} {distance(got[name], value)}"
                    )
            engine.close()
    return sorted(set(refused))


def test_another_order_on_one_rank_is_right_or_refused_everywhere() -> None:
    refused = run_ranks(_wayward, 2, timeout_s=110)
    assert refused[0] == refused[1]


def _disagreement(rank: int, world_size: int) -> None:
    for stage in range(4):
        torch.manual_seed(0)
        model = zoo.Plain(2 + (rank == 1)).double()
        start = partial(poplar.initialize, model, CASE.optimizer(model), cross_entropy, zero_stage=stage)
        text = _raises(CommunicationError, start, f"z{stage}, other models")
        assert "differ" in text, text
        engine = _engine(rank, stage)
        engine.step(_split(rank, world_size, 0))
        if rank == 1:
            engine.module.blocks[0].requires_grad_(False)
        _raises(CommunicationError, partial(engine.step, _split(rank, world_size, 1)), f"z{stage}, frozen on one rank")
        engine.module.blocks[0].requires_grad_(True)
        engine.step(_split(rank, world_size, 1))
        if rank == 0:
            engine.module.blocks[1].late = nn.Linear(2, 2)
        text = _raises((ModelError, StepError), partial(engine.step, _split(rank, world_size, 2)), f"z{stage}, late")
        assert "blocks.1.late" in text, text
        engine.close()
        engine = _engine(rank, stage)
        again = partial(poplar.initialize, engine.module, CASE.optimizer(engine.module), _loss, zero_stage=stage)
        assert "has an engine already" in _raises(ConfigError, again, f"z{stage}, twice")
        engine.module.fault = "detached" if rank == 1 else None
        text = _raises(
            (ModelError, StepError), partial(engine.step, _split(rank, world_size, 0)), f"z{stage}, detached"
        )
        assert "does not depend on any trainable parameter" in text, text
        engine.close()
        embedding = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 5), nn.Linear(5, 4)).double()
        engine = poplar.initialize(embedding, CASE.optimizer(embedding), cross_entropy, zero_stage=stage)
        tokens = (torch.tensor([1, 2]), torch.tensor([0, 1]))
        text = _raises(
            (ModelError, StepError), partial(engine.step, [tokens] if rank == 0 else []), f"z{stage}, sparse"
        )
        assert "0.weight has a sparse gradient" in text, text
        engine.close()


def test_ranks_that_disagree_are_told() -> None:
    run_ranks(_disagreement, 2, timeout_s=110)

"""The user's optimizer over shards: the same update as over whole parameters, or a refusal that says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from poplar.errors import ConfigError
from poplar.zero.flat import NO_GROUP
from poplar.zero.optimizer import OptimizerBinding, check_elementwise, group_indices, whole_states
from poplar.zero.units import cut_units

# Optimizers that need more than one element at a time.


class Lamb(Optimizer):
    """A trust ratio by parameter (arXiv:1904.00962), in a few lines."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    trust = param.norm() / param.grad.norm().clamp_min(1e-12)
                    param.sub_(param.grad * trust, alpha=group["lr"])


class Normalised(Optimizer):
    """Divides by the norm over all of its parameters, which on a rank are only some: pieces alone do not show it."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            param.sub_(param.grad / norm, alpha=self.param_groups[0]["lr"])


class Lion(Optimizer):
    """The sign of a mixed momentum; its constructor does not take all of its group's settings."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                moment = state.setdefault("exp_avg", torch.zeros_like(param))
                param.sub_(moment.lerp(param.grad, 1 - group["betas"][0]).sign(), alpha=group["lr"])
                moment.lerp_(param.grad, 1 - group["betas"][1])


def _matrix() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 4))]


REFUSED: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "Muon": torch.optim.Muon,
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": torch.optim.LBFGS,
    "SparseAdam": torch.optim.SparseAdam,
    "Lamb": Lamb,
    "Normalised": Normalised,
}
ACCEPTED: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_maximize_dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
    "adam": torch.optim.Adam,
    "adam_amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adam_learning_rate_tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)),
    "adamw": torch.optim.AdamW,
    "adamw_fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "lion": Lion,
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_need_whole_parameters_are_refused_by_what_they_do(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} with these settings needs whole parameters"):
        check_elementwise(REFUSED[name](_matrix()))


@pytest.mark.parametrize("name", ACCEPTED)
def test_elementwise_optimizers_are_accepted_and_left_as_they_were(name: str) -> None:
    params = _matrix()
    optimizer = ACCEPTED[name](params)
    groups = [dict(group) for group in optimizer.param_groups]
    had_state = {key: dict(value) for key, value in optimizer.state.items()}
    before = torch.get_rng_state()
    check_elementwise(optimizer)
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert {key: dict(value) for key, value in optimizer.state.items()} == had_state
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(params[0], torch.ones(3, 4)) and params[0].grad is None


def test_one_group_with_other_settings_is_enough_to_refuse() -> None:
    class Mixed(Lamb):
        def __init__(self, params: Any, lr: float = 1e-2, layerwise: bool = False):
            Optimizer.__init__(self, params, {"lr": lr, "layerwise": layerwise})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            if self.param_groups[0]["layerwise"]:
                super().step()

    check_elementwise(Mixed(_matrix()))
    with pytest.raises(ConfigError, match="Mixed"):
        check_elementwise(Mixed([{"params": _matrix()}, {"params": _matrix(), "layerwise": True}]))


# The binding, with all ranks in this process.


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2)).double()


def _by_shape(make: Callable[..., Optimizer], model: nn.Module) -> Optimizer:
    """Two groups, told apart by the original shapes; their settings differ in rate alone."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = make(matrices)
    optimizer.add_param_group({"params": others, "lr": 0.02})
    return optimizer


class _Rank:
    """One rank's units and binding, over a model of its own."""

    def __init__(self, make: Callable[..., Optimizer], ratios: list[float], rank: int):
        self.model = _model()
        self.optimizer = _by_shape(make, self.model)
        self.units = cut_units(self.model)
        groups = group_indices(self.optimizer, self.units)
        for unit in self.units:
            unit.build_buffers(lambda p: groups.get(p, NO_GROUP), lambda p: (p.dtype, p.dtype), ratios, rank)
            for buffer in unit.buffers:
                full = torch.zeros(buffer.padded_numel, dtype=buffer.dtype)
                for piece in buffer.pieces:
                    piece.view_of(full).copy_(piece.param.detach())
                buffer.bind(full)
                buffer.shard = buffer.master = buffer.own(full)
        self.group_dicts = list(self.optimizer.param_groups)
        self.binding = OptimizerBinding(self.optimizer, self.units, whole_states(self.optimizer))

    def step(self, grads: dict[str, Tensor]) -> None:
        for unit in self.units:
            for buffer in unit.buffers:
                whole = torch.zeros(buffer.padded_numel, dtype=buffer.dtype)
                for piece in buffer.pieces:
                    piece.view_of(whole).copy_(grads[piece.names[0]])
                buffer.grad = buffer.own(whole)
        self.binding.step()


def _gathered(ranks: list[_Rank]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for index, unit in enumerate(ranks[0].units):
        for number, buffer in enumerate(unit.buffers):
            full = torch.cat([rank.units[index].buffers[number].master.detach() for rank in ranks])
            whole.update({piece.names[0]: piece.view_of(full) for piece in buffer.pieces})
    return whole


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(ACCEPTED)),
    ratios=st.lists(st.sampled_from([0.0, 1.0, 1.0, 4.0]), min_size=1, max_size=4).filter(any),
)
def test_shards_are_updated_as_whole_parameters_are(name: str, ratios: list[float]) -> None:
    """Z31: by the original groups; the optimizer and its group dicts are the user's own, before and after."""
    whole = _model()
    plain = _by_shape(ACCEPTED[name], whole)
    ranks = [_Rank(ACCEPTED[name], ratios, rank) for rank in range(len(ratios))]
    for rank in ranks:
        assert all(a is b for a, b in zip(rank.optimizer.param_groups, rank.group_dicts, strict=True))
        num_tensors = sum(len(group["params"]) for group in rank.optimizer.param_groups)
        assert num_tensors <= 2 * len(rank.units), "one tensor for each unit and group"
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        grads = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in whole.named_parameters()}
        for param_name, param in whole.named_parameters():
            param.grad = grads[param_name]
        plain.step()
        for rank in ranks:
            rank.step(grads)
            assert all(p.grad is None for group in rank.optimizer.param_groups for p in group["params"])
    got = _gathered(ranks)
    for param_name, param in whole.named_parameters():
        torch.testing.assert_close(got[param_name], param.detach(), rtol=1e-12, atol=1e-14)


def test_a_parameter_that_the_optimizer_was_not_given_is_never_stepped() -> None:
    def first_alone(params: list[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(params[:1], lr=0.1)

    rank = _Rank(first_alone, [1.0], 0)
    before = {name: param.detach().clone() for name, param in rank.model.named_parameters()}
    ones = {name: torch.ones_like(value) for name, value in before.items()}
    rank.step(ones)
    for name, value in _gathered([rank]).items():
        # The second matrix is in no group; vectors are in the second.
        moved = {"0.weight": 0.1, "2.weight": 0.0}.get(name, 0.02)
        torch.testing.assert_close(value, before[name] - moved)


def test_a_foreign_tensor_in_a_group_is_named() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]})
    with pytest.raises(ConfigError, match=r"group 1 of the optimizer holds a tensor of shape \(7,\)"):
        group_indices(optimizer, cut_units(model))


@pytest.mark.parametrize("ratios", [[1.0, 1.0], [1.0, 0.0, 2.0]])
def test_parameters_with_other_step_counts_get_tensors_of_their_own(ratios: list[float]) -> None:
    """A parameter that joined late has its own bias correction; one long tensor has one counter."""
    whole = _model()
    plain = _by_shape(torch.optim.Adam, whole)
    ones = {name: torch.ones_like(param) for name, param in whole.named_parameters()}
    late = {"0.weight", "1.bias"}
    for round_ in range(2):
        for name, param in whole.named_parameters():
            param.grad = None if round_ == 0 and name in late else ones[name]
        plain.step()
        if round_ == 0:
            states = {
                name: dict(plain.state[param]) for name, param in whole.named_parameters() if param in plain.state
            }
            values = {name: param.detach().clone() for name, param in whole.named_parameters()}
            states = {n: {k: v.clone() for k, v in s.items()} for n, s in states.items()}
    ranks = []
    for number in range(len(ratios)):
        rank = _Rank(torch.optim.Adam, ratios, number)
        for unit in rank.units:
            for buffer in unit.buffers:
                for piece in buffer.pieces:
                    piece.param.data.copy_(values[piece.names[0]])
        by_param = {p.param: states.get(p.names[0], {}) for u in rank.units for b in u.buffers for p in b.pieces}
        rank.binding = OptimizerBinding(rank.optimizer, rank.units, by_param)
        rank.step(ones)
        ranks.append(rank)
    got = _gathered(ranks)
    for name, param in whole.named_parameters():
        torch.testing.assert_close(got[name], param.detach(), rtol=1e-12, atol=1e-14)


def test_a_rank_that_owns_nothing_steps_without_a_tensor() -> None:
    """Z23."""
    rank = _Rank(torch.optim.AdamW, [1.0, 0.0], 1)
    assert all(not group["params"] for group in rank.optimizer.param_groups)
    rank.step({name: torch.ones_like(param) for name, param in rank.model.named_parameters()})
    assert not rank.optimizer.state

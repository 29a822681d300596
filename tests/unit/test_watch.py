"""What is added to a model after it was sharded is noticed; setting again what is there is fine."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import poplar
from poplar.errors import ModelError
from poplar.zero.watch import ModelWatch
from tests.helpers import zoo
from tests.helpers.models import cross_entropy, sgd, vectors


@pytest.fixture
def model() -> nn.Module:
    return zoo.TiedWithin()


@pytest.fixture
def watch(model: nn.Module) -> Iterator[ModelWatch]:
    watch = ModelWatch(model)
    yield watch
    watch.close()


def _add_module(model: nn.Module) -> None:
    model.blocks[1].extra = nn.Linear(2, 2)


def _append(model: nn.Module) -> None:
    model.blocks.append(nn.Linear(2, 2))


def _register(model: nn.Module) -> None:
    model.register_parameter("extra", nn.Parameter(torch.ones(1)))


def _replace_parameter(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def _replace_module(model: nn.Module) -> None:
    model.head = nn.Linear(zoo.WIDTH, zoo.CLASSES)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_add_module, "module blocks.1.extra"),
        (_append, "module blocks.2"),
        (_register, "parameter extra"),
        (_replace_parameter, "parameter head.weight"),
        (_replace_module, "module head"),
    ],
)
def test_an_addition_is_named(
    model: nn.Module, watch: ModelWatch, change: Callable[[nn.Module], None], named: str
) -> None:
    watch.check()
    change(model)
    with pytest.raises(ModelError, match=f"^{named} was added to the model after initialize"):
        watch.check()


def _tie_again(model: nn.Module) -> None:
    model.blocks[0].down.weight = model.blocks[0].up.weight
    model.head = model.head
    model.head.bias = model.head.bias


def _without_parameters(model: nn.Module) -> None:
    model.activation = nn.ReLU()
    model.cache = None
    model.head.register_parameter("none", None)
    model.register_buffer("counter", torch.zeros(1))


def _elsewhere(model: nn.Module) -> None:
    other = nn.Sequential(nn.Linear(2, 2))
    other.append(nn.Linear(2, 2))
    wrapper = nn.Module()
    wrapper.inner = model


def _freeze(model: nn.Module) -> None:
    model.requires_grad_(False)
    model.eval()


@pytest.mark.parametrize("change", [_tie_again, _without_parameters, _elsewhere, _freeze])
def test_what_adds_no_parameter_is_no_addition(
    model: nn.Module, watch: ModelWatch, change: Callable[[nn.Module], None]
) -> None:
    """``tie_weights()`` and the like set again what is there; wrapping a model does not change it."""
    change(model)
    watch.check()


def test_a_closed_watch_sees_nothing_and_keeps_nobody_alive(model: nn.Module) -> None:
    watch = ModelWatch(model)
    watch.close()
    _append(model)
    watch.check()
    other = zoo.Plain()
    kept = ModelWatch(other)
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    kept.close()


def test_the_engine_refuses_the_next_step_and_goes_on_without_the_addition() -> None:
    model = zoo.Plain().double()
    engine = poplar.initialize(model, sgd(model), cross_entropy, zero_stage=2)
    engine.step([vectors(0)])
    model.late = nn.Linear(2, 2)
    for call in (engine.step, engine.evaluate):
        with pytest.raises(ModelError, match="module late was added"):
            call([vectors(1)])
    assert engine.num_steps == 1
    engine.close()

"""Units hold every parameter once, at any cut; each module knows all units it needs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from poplar.errors import ConfigError, ModelError
from poplar.zero.units import (
    ROOT,
    Unit,
    clean_name,
    cut_units,
    large_units,
    named_parameters_with_ties,
)
from tests.helpers import zoo
from tests.helpers.models import CASES, Case


def _names(units: list[Unit]) -> dict[str, list[str]]:
    return {unit.name: [names[0] for names, _ in unit.params] for unit in units}


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_every_parameter_of_every_model_is_in_one_unit_and_its_modules_know(case: Case) -> None:
    model = case.model()
    units = cut_units(model, case.units)
    held = [param for unit in units for _, param in unit.params]
    assert len(held) == len({id(param) for param in held}) and set(held) == set(model.parameters())
    assert [unit.index for unit in units] == list(range(len(units)))
    assert [unit for unit in units if unit.is_root] in ([], units[:1])
    unit_of = {param: unit for unit in units for _, param in unit.params}
    for module in model.modules():
        for param in module._parameters.values():
            assert param is None or module in unit_of[param].modules
    for unit in units:
        assert len(unit.modules) == len({id(module) for module in unit.modules})
        assert (model in unit.modules) or not unit.is_root
    written = {name for names, _ in named_parameters_with_ties(model) for name in names}
    assert written == {clean_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}


def test_elements_of_lists_and_large_modules_beside_them_are_units() -> None:
    model = nn.Module()
    model.embedding = nn.Embedding(50, 6)
    model.blocks = nn.ModuleList(zoo.Block() for _ in range(3))
    model.norm = nn.LayerNorm(6)
    model.head = nn.Linear(6, 50)
    names = _names(cut_units(model))
    assert list(names) == [ROOT, "embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert names[ROOT] == ["norm.weight", "norm.bias"]
    assert names["blocks.1"] == [f"blocks.1.{part}" for part in ("up.weight", "up.bias", "down.weight", "down.bias")]


def test_only_outermost_lists_are_cut_and_parametrizations_are_no_lists() -> None:
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.ModuleList([nn.Linear(2, 2)]))
    assert list(_names(cut_units(nested))) == ["0", "1"]
    normed = zoo.WeightNorm()
    names = _names(cut_units(normed))
    assert [name for name in names if name.startswith("blocks")] == ["blocks.0", "blocks.1"]
    assert all("parametrizations.weight.0" not in name for name in names)


def test_a_tied_weight_is_one_parameter_with_all_its_names_that_all_its_modules_need() -> None:
    """Z08, Z09."""
    model = zoo.TiedBlocks()
    units = {unit.name: unit for unit in cut_units(model)}
    tied = next(names for names, _ in units["blocks.0"].params if "blocks.0.up.weight" in names)
    assert tied == ("blocks.0.up.weight", "blocks.2.up.weight")
    assert model.blocks[2].up in units["blocks.0"].modules and model.blocks[2].up in units["blocks.2"].modules
    twice = cut_units(zoo.SameBlockTwice())
    assert [unit.name for unit in twice if not unit.is_root and unit.name.startswith("blocks")] == [
        "blocks.0",
        "blocks.1",
    ]


def test_ties_are_told_by_live_objects_alone() -> None:
    """Z09: blocks that were built and freed may leave their ids to others; those are no ties."""
    for _ in range(50):
        model = zoo.Plain(3)
        assert all(len(names) == 1 for names, _ in named_parameters_with_ties(model))
        assert sum(len(unit.params) for unit in cut_units(model)) == 14
        del model
        gc.collect(0)


def test_units_by_name_by_module_and_by_predicate_are_the_same_cut() -> None:
    model = zoo.Plain(3)
    by_name = _names(cut_units(model, ["blocks.0", "blocks.2"]))
    assert list(by_name) == [ROOT, "blocks.0", "blocks.2"] and "blocks.1.up.weight" in by_name[ROOT]
    assert _names(cut_units(model, [model.blocks[0], model.blocks[2]])) == by_name
    assert _names(cut_units(model, lambda name, module: name in ("blocks.0", "blocks.2"))) == by_name
    assert list(_names(cut_units(model, ()))) == [ROOT]


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (["blocks.7"], "units names 'blocks.7', which is not a module of the model; known are blocks, blocks.0"),
        ([nn.Linear(2, 2)], "which is not a module of the model"),
        (["blocks.0", "blocks.0.up"], "units names 'blocks.0.up' and 'blocks.0', which contains it"),
        (["blocks", "blocks.1"], "units names 'blocks.1' and 'blocks', which contains it"),
    ],
)
def test_units_that_cannot_be_are_named(units: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cut_units(zoo.Plain(), units)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match=r"the model \(ReLU\) has no parameters"):
        cut_units(nn.ReLU())


@pytest.mark.parametrize(
    ("wrapped", "name"),
    [
        ("_orig_mod.blocks.0.weight", "blocks.0.weight"),
        ("blocks.0._checkpoint_wrapped_module.up._orig_mod.weight", "blocks.0.up.weight"),
        ("_fsdp_wrapped_module.head.bias", "head.bias"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
    ],
)
def test_names_are_those_that_users_wrote(wrapped: str, name: str) -> None:
    assert clean_name(wrapped) == name


def test_units_over_half_of_the_model_are_found() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(2, 2), nn.Linear(2, 2))
    ((unit, share),) = large_units(cut_units(model))
    assert unit.name == "0" and share == pytest.approx(110 / 122)
    assert large_units(cut_units(zoo.Plain(4))) == []


def test_one_flat_buffer_per_dtype_and_per_frozen_or_trained() -> None:
    """Z28, Z29."""
    block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4))
    block[2].weight.requires_grad_(False)
    (unit,) = cut_units(nn.ModuleList([block]))
    unit.build_buffers(lambda param: 0, lambda param: (param.dtype, param.dtype), [1.0, 1.0], 0)
    found = {(b.dtype, b.requires_grad): sorted(p.names[0] for p in b.pieces) for b in unit.buffers}
    assert found == {
        (torch.float32, True): ["0.0.bias", "0.0.weight", "0.2.bias"],
        (torch.bfloat16, True): ["0.1.bias", "0.1.weight"],
        (torch.float32, False): ["0.2.weight"],
    }
    assert unit.has_frozen and [b.requires_grad for b in unit.trainable_buffers] == [True, True]

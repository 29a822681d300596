"""Tensors inside whatever containers a batch comes in."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from poplar.errors import ConfigError
from poplar.zero.tree import common_first_dimension, map_tensors, move_to, tensors_in

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Frozen:
    x: Any
    note: str = "kept"


@dataclass
class Nested:
    inner: Frozen
    many: list[Any] = field(default_factory=list)


class Encoding(UserDict):
    """As a tokenizer's batch encoding: a mapping with attributes of its own."""

    def __init__(self, data: Any = None):
        super().__init__(data)
        self.tokenizer = "kept"


def _trees() -> st.SearchStrategy[Any]:
    leaves = st.integers(0, 5).map(lambda n: torch.full((2,), float(n))) | st.sampled_from([3, "text", None])

    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(Encoding)
            | st.tuples(inner, inner).map(lambda pair: Pair(*pair))
            | inner.map(Frozen)
            | st.tuples(inner, st.lists(inner, max_size=2)).map(lambda both: Nested(Frozen(both[0]), both[1]))
        )

    return st.recursive(leaves, containers, max_leaves=8)


@settings(max_examples=80, deadline=None)
@given(tree=_trees())
def test_mapping_changes_every_tensor_once_and_nothing_else(tree: Any) -> None:
    before = [value.clone() for value in tensors_in(tree)]
    mapped = map_tensors(lambda tensor: tensor + 1, tree)
    assert type(mapped) is type(tree)
    after = list(tensors_in(mapped))
    assert len(after) == len(before)
    assert all(torch.equal(new, old + 1) for new, old in zip(after, before, strict=True))
    assert all(torch.equal(now, old) for now, old in zip(tensors_in(tree), before, strict=True)), "the original is kept"
    assert move_to(tree, torch.device("cpu")) is tree


def test_classes_and_what_is_no_tensor_are_kept() -> None:
    batch = {
        "pair": Pair(torch.ones(1), 2),
        "frozen": Frozen(torch.ones(1)),
        "encoding": Encoding({"ids": torch.ones(1)}),
        "ordered": OrderedDict(a=torch.ones(1)),
        "class": Frozen,
    }
    moved = move_to(batch, torch.device("meta"))
    assert all(tensor.is_meta for tensor in tensors_in(moved)) and len(list(tensors_in(moved))) == 4
    assert isinstance(moved["pair"], Pair) and moved["pair"].y == 2
    assert moved["frozen"].note == "kept" and moved["encoding"].tokenizer == "kept"
    assert isinstance(moved["ordered"], OrderedDict) and moved["class"] is Frozen


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(5, 2), 5),
        ([torch.zeros(3), {"y": torch.zeros(3, 4, 5)}], 3),
        ((torch.zeros(2), torch.tensor(7.0)), 2),
        (Frozen(torch.zeros(0, 4)), 0),
    ],
)
def test_the_first_dimension_that_all_tensors_share(batch: Any, size: int) -> None:
    assert common_first_dimension(batch) == size


@pytest.mark.parametrize("batch", [torch.tensor(1.0), [], {"text": "none"}, (torch.zeros(2), torch.zeros(3))])
def test_no_common_first_dimension_asks_for_a_weight(batch: Any) -> None:
    """H03: the way out is named."""
    shapes = [tuple(tensor.shape) for tensor in tensors_in(batch) if tensor.dim()]
    with pytest.raises(ConfigError, match="give weight=, a function of the batch") as caught:
        common_first_dimension(batch)
    assert str(shapes) in str(caught.value)


def test_tensors_are_walked_depth_first() -> None:
    values: list[Tensor] = [torch.tensor([float(n)]) for n in range(4)]
    tree = [values[0], {"a": (values[1], Frozen(values[2]))}, Pair(values[3], 1)]
    assert [tensor.item() for tensor in tensors_in(tree)] == [0, 1, 2, 3]

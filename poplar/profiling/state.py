"""What is known of a recipe before anything is put on a card: its least model state by stage, and its fingerprint.

[Note: least model state]
Parameters, gradients, optimizer state and master weights, each whole or cut by the stage: what a rank holds between
micro-steps, to the byte but for padding. Activations and what is gathered for a while come on top, so this can only
rule a stage out. The optimizer's part is found by stepping a copy of it over a few elements.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from poplar.config import Recipe
from poplar.zero.optimizer import is_elementwise_state
from poplar.zero.precision import Precision
from poplar.zero.tree import tensors_in
from poplar.zero.units import named_parameters_with_ties


@dataclass(frozen=True, kw_only=True)
class RecipeFacts:
    """Sizes of a recipe's model state, and what determines its profile."""

    param_bytes: int
    """In the dtypes of computation."""
    master_bytes: int
    """Of master weights, where computation has another dtype."""
    gradient_bytes: int
    optimizer_bytes: int
    """Of state that has a value for every element."""
    fingerprint: str
    """Changes with the parameters' names, shapes and dtypes, the optimizer, the loss, or the shape of a batch."""

    def least_state_bytes(self, zero_stage: int, share: float) -> int:
        """Return the model state of a rank that owns ``share`` of the shards: see [Note: least model state]."""
        cut_bytes = self.sharded_state_bytes(zero_stage)
        return round(self.sharded_state_bytes(3) - cut_bytes + share * cut_bytes)

    def sharded_state_bytes(self, zero_stage: int) -> int:
        """Return the model state that a stage cuts into shards, of all ranks together; at stage 3 that is all of it."""
        by_stage = [self.optimizer_bytes + self.master_bytes, self.gradient_bytes, self.param_bytes]
        return sum(by_stage[:zero_stage])


def learn_facts(recipe: Recipe, precision: Precision, batch: Any) -> RecipeFacts:
    """Build the recipe's model and optimizer, where the recipe builds them, and note what they are."""
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    state_per_element: dict[nn.Parameter, int] = {}
    for group in optimizer.param_groups:
        for dtype in {precision.master_dtype(param, _compute_dtype(precision, param)) for param in group["params"]}:
            num_bytes = _state_bytes_per_element(optimizer, group, dtype)
            state_per_element.update({p: num_bytes for p in group["params"] if p.requires_grad})
    rows: list[Any] = [type(optimizer).__qualname__, _plain(optimizer.param_groups), recipe.reduction]
    rows += [getattr(function, "__qualname__", repr(type(function))) for function in (recipe.loss, recipe.weight)]
    rows += [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors_in(batch)]
    sizes = dict.fromkeys(("param_bytes", "master_bytes", "gradient_bytes", "optimizer_bytes"), 0)
    for names, param in named_parameters_with_ties(model):
        rows.append((names, tuple(param.shape), str(param.dtype), param.requires_grad))
        compute = _compute_dtype(precision, param)
        master = precision.master_dtype(param, compute)
        sizes["param_bytes"] += param.numel() * compute.itemsize
        sizes["master_bytes"] += param.numel() * master.itemsize if master != compute else 0
        if param.requires_grad:
            sizes["gradient_bytes"] += param.numel() * max(4, compute.itemsize)
            sizes["optimizer_bytes"] += param.numel() * state_per_element.get(param, 0)
    return RecipeFacts(**sizes, fingerprint=digest(rows))


def digest(value: Any) -> str:
    """Return a short name for a value made of lists, numbers and texts."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _compute_dtype(precision: Precision, param: nn.Parameter) -> torch.dtype:
    return precision.compute_dtype(param, keep=False)


def _state_bytes_per_element(optimizer: torch.optim.Optimizer, group: dict[str, Any], dtype: torch.dtype) -> int:
    param = nn.Parameter(torch.ones(8, dtype=dtype))
    param.grad = torch.ones_like(param)
    trial = copy.copy(optimizer)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**group, "params": [param]}]
    try:
        with torch.enable_grad():
            trial.step()
    except Exception:  # an optimizer of its own kind; what it holds will show when it runs
        return 0
    state = trial.state[param]
    return sum(value.element_size() for key, value in state.items() if is_elementwise_state(key, value, param.shape))


def _plain(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings of optimizer groups that decide how long a step takes."""
    left_out = ("params", "param_names", "lr", "initial_lr")
    return [{key: str(value) for key, value in group.items() if key not in left_out} for group in groups]

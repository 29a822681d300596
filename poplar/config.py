"""What to train: the recipe. Torch is imported only when something is built, so that planning works without it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poplar.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

Batch = Any
"""Whatever ``Recipe.collate`` returns: a tensor, or tensors in tuples, dicts or dataclasses."""

REDUCTIONS = ("mean", "sum")
PRECISIONS = ("fp32", "bf16", "fp16", "auto")
ZERO_STAGES = (0, 1, 2, 3)
STRATEGIES = ("exact", "poplar", "flops", "equal")


def default_collate(samples: list[Any]) -> Batch:
    """Stack samples as ``torch.utils.data.default_collate`` does."""
    from torch.utils.data import default_collate as torch_default_collate

    return torch_default_collate(samples)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to train. Everything is built by calling it, so nothing is trained by profiling it.

    Raises:
        ConfigError: a field is not callable, or ``reduction`` is unknown.
    """

    model: Callable[[], nn.Module]
    """Builds the model, on CPU or on ``meta``; the same weights on every rank are not needed, rank 0's are sent."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    """Builds the optimizer from the model's original names and shapes; parameter groups are as usual."""
    loss: Callable[[nn.Module, Batch], Tensor]
    """Runs the model on a micro-batch; returns a scalar: the mean over the batch's weight, or the sum."""
    dataset: Callable[[], Dataset]
    """Builds the map-style training set."""
    collate: Callable[[list[Any]], Batch] = default_collate
    """Makes a batch of a list of samples."""
    weight: Callable[[Batch], float | Tensor] | None = None
    """Denominator of the loss's mean (samples, or valid tokens). None: the tensors' common first dimension."""
    reduction: str = "mean"
    """``"mean"``: the loss is a mean over ``weight``; ``"sum"``: it is a sum over the batch."""
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    """Builds the learning-rate schedule, stepped once per real (not skipped) optimizer step."""
    eval_dataset: Callable[[], Dataset] | None = None
    """Builds the held-out set."""
    probe: Callable[[int], Batch] | None = None
    """The largest batch of n samples that training can meet, for profiling. None: samples of ``dataset``."""

    def __post_init__(self) -> None:
        for name in ("model", "optimizer", "loss", "dataset", "collate"):
            value = getattr(self, name)
            if not callable(value):
                raise ConfigError(f"Recipe.{name} must be callable, got {type(value).__name__}")
        for name in ("weight", "scheduler", "eval_dataset", "probe"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ConfigError(f"Recipe.{name} must be callable or None, got {type(value).__name__}")
        if self.reduction not in REDUCTIONS:
            raise ConfigError(f"Recipe.reduction must be one of {', '.join(REDUCTIONS)}; got {self.reduction!r}")


def debug_from_environment() -> bool:
    """Return whether ``POPLAR_DEBUG`` asks for cross-rank checks at every collective."""
    return os.environ.get("POPLAR_DEBUG", "0").lower() not in ("", "0", "false", "no")

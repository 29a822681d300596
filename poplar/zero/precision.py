"""Compute dtype, master weights, and the dynamic loss scale.

    fp32   every parameter computes in its own dtype (float64 stays float64); nothing is cast
    bf16   trainable parameters compute and travel in bfloat16 under autocast; float32 masters on the shard
    fp16   the same in float16, with a dynamic loss scale
    auto   bf16 where every card has it natively, else fp16 where every card has that, else fp32

Frozen parameters and those of batch normalisation keep the dtype they came with. Gradients are summed, over micro-steps
and ranks, in float32 (float64 for float64) in every mode.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from poplar.config import PRECISIONS
from poplar.errors import ConfigError, NonFiniteError

_PARAM_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class PoplarWarning(UserWarning):
    """Something that did not stop the run, and that its owner wants to know."""


@dataclass(frozen=True)
class Precision:
    """How a model computes."""

    name: str
    param_dtype: torch.dtype | None
    """Dtype that trainable parameters compute and travel in; None: each its own."""

    def compute_dtype(self, param: nn.Parameter, keep: bool) -> torch.dtype:
        """Return the dtype of a parameter's whole buffer; ``keep``: it belongs to a module that is never cast."""
        if self.param_dtype is None or keep or not param.requires_grad or not param.dtype.is_floating_point:
            return param.dtype
        return self.param_dtype

    def master_dtype(self, param: nn.Parameter, compute_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that the optimizer sees: at least float32 where parameters are cast."""
        if self.param_dtype is None or not param.requires_grad or compute_dtype != self.param_dtype:
            return param.dtype
        return torch.promote_types(param.dtype, torch.float32)

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        if self.param_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.param_dtype)


def resolve_precision(name: str, native_dtypes: Sequence[Sequence[str]]) -> Precision:
    """Return the precision called ``name``.

    Args:
        native_dtypes: by rank, the dtypes that its card computes in natively ("fp32", "bf16", "fp16").

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in PRECISIONS:
        raise ConfigError(f"precision must be one of {', '.join(PRECISIONS)}; got {name!r}")
    if name == "auto":
        common = set.intersection(*(set(dtypes) for dtypes in native_dtypes)) if native_dtypes else {"fp32"}
        name = next((choice for choice in ("bf16", "fp16") if choice in common), "fp32")
    else:
        lacking = [rank for rank, dtypes in enumerate(native_dtypes) if name not in dtypes]
        if lacking:
            warnings.warn(
                f"precision {name!r}: the cards of ranks {lacking} do not compute in it natively and will be slow or "
                "fail; precision='auto' takes what all cards have",
                PoplarWarning,
                stacklevel=3,
            )
    return Precision(name, _PARAM_DTYPES[name])


class LossScale:
    """The factor on the loss that keeps float16 gradients away from 0, halved on overflow, doubled after a calm time.

    Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2.
    """

    growth_interval = 2000
    minimum = 1.0
    max_skips_at_minimum = 20

    def __init__(self, enabled: bool, initial: float = 2.0**16):
        self.enabled = enabled
        self.value = initial if enabled else 1.0
        self._calm_steps = 0
        self._skips_at_minimum = 0

    def update(self, overflow: bool) -> None:
        """Take note of a step that all ranks took, or all skipped.

        Raises:
            NonFiniteError: the scale cannot fall further and steps keep overflowing.
        """
        if not self.enabled:
            return
        if not overflow:
            self._calm_steps += 1
            self._skips_at_minimum = 0
            if self._calm_steps % self.growth_interval == 0:
                self.value *= 2.0
            return
        self._calm_steps = 0
        if self.value <= self.minimum:
            self._skips_at_minimum += 1
            if self._skips_at_minimum >= self.max_skips_at_minimum:
                raise NonFiniteError(
                    f"{self._skips_at_minimum} steps in a row overflowed at the smallest loss scale ({self.minimum}); "
                    "lower the learning rate, or use precision='bf16' or 'fp32'"
                )
        self.value = max(self.minimum, self.value / 2.0)

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "calm_steps": self._calm_steps, "skips_at_minimum": self._skips_at_minimum}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.enabled:
            self.value = float(state["value"])
            self._calm_steps = int(state["calm_steps"])
            self._skips_at_minimum = int(state["skips_at_minimum"])

"""Gradient norm over all ranks, and clipping.

Every element counts exactly once: each rank measures the shards it owns, and puts the ranks' parts together the same
way, at every stage. Float32 gradients are measured in float32, and their parts put together in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from poplar.errors import ConfigError


def check_norm_type(norm_type: float) -> float:
    """Return ``norm_type`` as a float.

    Raises:
        ConfigError: it is neither positive nor inf.
    """
    try:
        value = float(norm_type)
    except (TypeError, ValueError):
        value = math.nan
    if not value > 0:
        raise ConfigError(f"norm_type must be a number above 0, or inf; got {norm_type!r}")
    return value


def local_norm_part(grads: Iterable[Tensor], norm_type: float) -> float:
    """Return what this rank adds: sum of |g|^p, or the largest |g| for inf. Waits for the device."""
    norms = [torch.linalg.vector_norm(grad, norm_type) for grad in grads if grad.numel()]
    if not norms:
        return 0.0
    values = torch.stack([norm.double() for norm in norms])
    if math.isinf(norm_type):
        return values.max().item()
    return values.pow(norm_type).sum().item()


def global_norm(parts: Sequence[float], norm_type: float) -> float:
    """Put the ranks' parts together. NaN anywhere gives NaN."""
    if any(math.isnan(part) for part in parts):
        return math.nan
    return max(parts) if math.isinf(norm_type) else math.fsum(parts) ** (1.0 / norm_type)


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Return the factor for all gradients, 1.0 if there is nothing to clip; as ``torch.nn.utils.clip_grad_norm_``."""
    if max_norm is None:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))

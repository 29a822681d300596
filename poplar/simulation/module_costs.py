"""Count what a module costs by running it on the meta device. Imported by ``ModelSpec.from_module`` alone: needs torch.

Every operation of the forward and the backward is seen once: its FLOP where it is a matrix product, else the bytes of
its inputs and outputs; what autograd keeps is counted by storage, so that views and twice-used tensors count once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from poplar.errors import ConfigError

_ATTENTION = ("bmm", "baddbmm", "scaled_dot_product", "attention")
"""Parts of the names of the operations that multiply activations with activations."""


@dataclass(kw_only=True)
class ModuleCosts:
    """Of one forward and backward of the whole batch."""

    matmul_flop: float = 0.0
    """Forward: products with weights, convolutions."""
    attention_flop: float = 0.0
    """Forward: products of activations with activations."""
    traffic_bytes: float = 0.0
    """Forward and backward: bytes in and out of everything that is not a product, in the module's own dtype."""
    kept_elements: float = 0.0
    """Elements that autograd keeps for backward, parameters left out."""


def measure_module(module: nn.Module, loss: Callable[[Any, Any], Any], batch: Any) -> ModuleCosts:
    """Run ``loss(module, batch)`` and its backward on meta and count.

    Raises:
        ConfigError: a parameter is not on meta, or the loss does not run there.
    """
    elsewhere = sorted({str(p.device) for p in module.parameters() if not p.is_meta})
    if elsewhere:
        raise ConfigError(f"the module must be built on the meta device; it has parameters on {', '.join(elsewhere)}")
    costs = ModuleCosts()
    own = {_storage_of(p) for p in module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if _storage_of(tensor) not in own:
            kept[_storage_of(tensor)] = tensor
        return tensor

    traffic = _TrafficMode()
    try:
        with traffic, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            flops = FlopCounterMode(display=False)
            with flops:
                value = loss(module, batch)
        costs.kept_elements = float(sum(_storage_elements(tensor) for tensor in kept.values()))
        with traffic:
            value.backward()
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"the loss does not run on the meta device: {error}") from error
    finally:
        module.zero_grad(set_to_none=True)
    for operation, flop in flops.get_flop_counts()["Global"].items():
        if any(part in str(operation) for part in _ATTENTION):
            costs.attention_flop += flop
        else:
            costs.matmul_flop += flop
    costs.traffic_bytes = traffic.num_bytes
    return costs


def parameters_by_unit(module: nn.Module) -> tuple[int, ...]:
    """Return the parameters of each element of the outermost ``ModuleList``s and ``Sequential``s, then of the rest."""
    seen: set[nn.Parameter] = set()
    units = [_count_new(block, seen) for block in _outermost_blocks(module)]
    rest = _count_new(module, seen)
    return tuple(count for count in (rest, *units) if count)


def _outermost_blocks(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return list(module)
    return [block for child in module.children() for block in _outermost_blocks(child)]


def _count_new(module: nn.Module, seen: set[nn.Parameter]) -> int:
    new = [p for p in module.parameters() if p not in seen]
    seen.update(new)
    return sum(p.numel() for p in new)


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _storage_elements(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


class _TrafficMode(TorchDispatchMode):
    """Adds up the bytes of the tensors that go in and out of every operation but views and matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and not any(part in str(func) for part in ("mm", "attention", "convolution", "empty")):
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
            self.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result

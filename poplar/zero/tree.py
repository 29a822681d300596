"""Walk the tensors of a batch or an output, whatever containers they are in."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from poplar.errors import ConfigError


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors inside lists, tuples, mappings and dataclasses, depth first."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a copy of the containers in ``value`` with ``function`` applied to every tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, item) for item in value)
    if isinstance(value, Mapping):
        mapped = {key: map_tensors(function, item) for key, item in value.items()}
        if type(value) is dict:
            return mapped
        copied: Any = copy.copy(value)  # keeps classes such as a tokenizer's batch encoding
        copied.update(mapped)
        return copied
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, map_tensors(function, getattr(value, field.name)))
        return copied
    return value


def move_to(value: Any, device: torch.device) -> Any:
    """Return ``value`` with its tensors on ``device``; itself if they all are."""
    if all(tensor.device == device for tensor in tensors_in(value)):
        return value
    # Towards the CPU nothing would wait for the copy before the tensor is read.
    non_blocking = device.type != "cpu"
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking), value)


def common_first_dimension(batch: Any) -> int:
    """Return the first dimension that all tensors of ``batch`` (those with dimensions) share.

    Raises:
        ConfigError: there is none; the message shows the shapes.
    """
    shapes = [tuple(tensor.shape) for tensor in tensors_in(batch) if tensor.dim() > 0]
    sizes = {shape[0] for shape in shapes}
    if len(sizes) != 1:
        raise ConfigError(
            f"cannot tell the number of samples of a batch from its tensors' shapes {shapes}; give weight=, a function "
            "of the batch that returns the denominator of the loss's mean"
        )
    return sizes.pop()

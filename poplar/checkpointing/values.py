"""Values that are no large tensors, as JSON and back: settings, counters, scheduler state, random state.

JSON has no tuples, no tensors and no keys but strings, and all of these occur in what optimizers and schedulers keep.
They are written as an object with one marked key, ``{"!tuple": [0.9, 0.999]}``. Numbers come back to the last bit.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poplar.errors import CheckpointError


def encode(value: Any, what: str) -> Any:
    """Return ``value`` as something that ``json.dumps`` takes.

    Args:
        what: the value's name, for messages.

    Raises:
        CheckpointError: it holds something else than numbers, strings, containers, tensors and arrays.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        data = value.detach().cpu().flatten().tolist()
        return {"!tensor": data, "dtype": dtype_name(value.dtype), "shape": list(value.shape)}
    if isinstance(value, np.ndarray):
        return {"!array": value.flatten().tolist(), "dtype": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, torch.dtype):
        return {"!dtype": dtype_name(value)}
    if type(value) in (list, tuple):
        items = [encode(item, f"{what}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"!tuple": items}
    if isinstance(value, dict):
        return _encode_dict(value, what)
    raise CheckpointError(
        f"{what} is a {type(value).__name__}, which a checkpoint cannot hold; it takes numbers, strings, lists, "
        "tuples, dicts, tensors and arrays"
    )


def _encode_dict(value: dict[Any, Any], what: str) -> Any:
    if type(value) is Counter or not all(isinstance(key, str) and not key.startswith("!") for key in value):
        pairs = [[encode(k, f"a key of {what}"), encode(item, f"{what}[{k!r}]")] for k, item in value.items()]
        return {"!counter" if isinstance(value, Counter) else "!dict": pairs}
    return {key: encode(item, f"{what}[{key!r}]") for key, item in value.items()}


def decode(value: Any) -> Any:
    """Return what ``encode`` was given.

    Raises:
        CheckpointError: ``value`` is no such thing.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next((key for key in value if key.startswith("!")), None)
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    content = value[kind]
    if kind == "!tuple":
        return tuple(decode(content))
    if kind == "!dtype":
        return dtype_of(content)
    if kind == "!tensor":
        return torch.tensor(content, dtype=dtype_of(value["dtype"])).reshape(value["shape"])
    if kind == "!array":
        return np.array(content, dtype=value["dtype"]).reshape(value["shape"])
    if kind in ("!dict", "!counter"):
        pairs = {decode(key): decode(item) for key, item in content}
        return pairs if kind == "!dict" else Counter(pairs)
    raise CheckpointError(f"the checkpoint holds a value of the unknown kind {kind!r}; was a newer Poplar at work?")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the checkpoint names the dtype {name!r}, which this torch does not have")
    return dtype

"""Random state of this process: Python's, numpy's, and torch's on the CPU and on the current accelerator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch


def random_state() -> dict[str, Any]:
    """Return everything that ``restore_random_state`` needs."""
    state = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Put back what ``random_state`` returned."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Leave the random state as it was."""
    state = random_state()
    try:
        yield
    finally:
        restore_random_state(state)

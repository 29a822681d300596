"""Live tensor bytes of a CPU rank, with a limit: what ``torch.cuda``'s statistics and out-of-memory are to a card.

[Note: storages, not tensors]
Views share memory, so the meter counts storages, each once, from the operator that made it until it dies. It watches
every operator of its thread through a ``TorchDispatchMode``, forward and backward (on CPU, backward runs in the thread
that called it). A weak reference to the storage tells of its death: PyTorch keeps the Python object of a storage as
long as the storage itself, so the meter neither keeps memory alive nor misses its end. An operator whose schema says
that it returns one of its inputs (views, in-place) makes no storage and is passed through; so memory that was there
before the meter started counts only where ``track`` was told of it. ``resize_`` of a storage is no operator, so it is
wrapped while a meter runs, as PyTorch's own ``torch.distributed._tools.mem_tracker`` does. Scratch space inside one
operator, and memory of other threads, is not seen.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_GROWING = {"resize_", "resize_as_", "set_"}
"""In-place operators that may give their tensor another storage, or another size of it."""

_plain_resize = torch.UntypedStorage.resize_


class _StorageRef(weakref.ref):
    """A storage that is counted, and as how much."""

    __slots__ = ("key", "num_bytes", "counted")
    key: int
    num_bytes: int
    counted: bool


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of CPU tensors made in this thread while it is entered, and refuses to go over a limit.

    Args:
        limit_bytes: what would bring the live bytes above this raises ``torch.OutOfMemoryError``. None: no limit.
        owner: who runs out of memory, for the message.
    """

    supports_higher_order_operators = True
    _running: ClassVar[list[MemoryMeter]] = []

    def __init__(self, limit_bytes: int | None = None, owner: str = "this rank"):
        super().__init__()
        self.limit_bytes = limit_bytes
        self.owner = owner
        self.live_bytes = 0
        """Bytes of counted storages that are alive."""
        self.peak_bytes = 0
        """Largest ``live_bytes`` since the start or ``reset_peak``."""
        self.num_operators = 0
        """Operators watched so far."""
        self._storages: dict[int, _StorageRef] = {}
        self._passes: dict[Any, bool] = {}
        self._counting = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing here is compiled; without the wrapper, watching an operator costs a tenth less.
        return False

    def __enter__(self) -> MemoryMeter:
        if not self._running:
            torch.UntypedStorage.resize_ = _watched_resize  # type: ignore[method-assign, assignment]
        self._running.append(self)
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._running.remove(self)
        if not self._running:
            torch.UntypedStorage.resize_ = _plain_resize  # type: ignore[method-assign]

    @property
    def is_running(self) -> bool:
        return self in self._running

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def track(self, *objects: Any) -> None:
        """Count memory that was there before: tensors, modules, optimizers, and lists, tuples or dicts of them.

        Raises:
            torch.OutOfMemoryError: it is more than the limit allows.
        """
        for tensor in _tensors_of(objects):
            self._count(tensor)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count what is made inside, also later: it stands for memory of the host."""
        before, self._counting = self._counting, False
        try:
            yield
        finally:
            self._counting = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operators += 1
        result = func(*args, **kwargs) if kwargs else func(*args)
        passes = self._passes.get(func)
        if passes is None:
            passes = self._passes[func] = _returns_an_input(func)
        if not passes:
            try:
                self._count(result)
            except torch.OutOfMemoryError:
                # The traceback keeps this frame, and it must not keep the memory that there was no room for.
                del result
                raise
        return result

    def _count(self, result: Any) -> None:
        if isinstance(result, Tensor):
            try:
                storage = result.untyped_storage()
            except (NotImplementedError, RuntimeError):
                return  # sparse and opaque tensors are made of tensors that were counted when they were made
            known = self._storages.get(storage._cdata)
            if known is None:
                self._add(storage)
            elif known.num_bytes != storage.nbytes():
                self._set_size(known, storage.nbytes())
        elif isinstance(result, (tuple, list)):
            for item in result:
                self._count(item)

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "cpu":
            return
        num_bytes = storage.nbytes()
        if self._counting:
            self._charge(num_bytes)
        reference = _StorageRef(storage, self._forget)
        reference.key, reference.num_bytes, reference.counted = storage._cdata, num_bytes, self._counting
        self._storages[reference.key] = reference

    def _forget(self, reference: _StorageRef) -> None:
        del self._storages[reference.key]
        if reference.counted:
            self.live_bytes -= reference.num_bytes

    def _set_size(self, reference: _StorageRef, num_bytes: int) -> None:
        if reference.counted:
            self._charge(num_bytes - reference.num_bytes)
        reference.num_bytes = num_bytes

    def _charge(self, num_bytes: int) -> None:
        live_bytes = self.live_bytes + num_bytes
        if self.limit_bytes is not None and live_bytes > self.limit_bytes and num_bytes > 0:
            raise torch.OutOfMemoryError(
                f"{self.owner} is out of memory: tried to allocate {_mib(num_bytes)}, {_mib(self.live_bytes)} of "
                f"{_mib(self.limit_bytes)} are in use"
            )
        self.live_bytes = live_bytes
        self.peak_bytes = max(self.peak_bytes, live_bytes)

    def _before_resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        known = self._storages.get(storage._cdata)
        if known is not None:
            self._set_size(known, num_bytes)


def _watched_resize(storage: torch.UntypedStorage, num_bytes: int) -> None:
    for meter in MemoryMeter._running:
        meter._before_resize(storage, num_bytes)
    _plain_resize(storage, num_bytes)


def _lift_limits() -> None:
    for meter in MemoryMeter._running:
        meter.limit_bytes = None


# A process forked inside a meter, as those that load data, inherits it; its memory is not the card's.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lift_limits)


def _returns_an_input(func: Any) -> bool:
    """Return whether the operator's results are views of its inputs, or the inputs themselves."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.returns or schema.name.split("::")[-1] in _GROWING:
        return False
    # An ``out=`` tensor is an input too, but one that the operator may have grown.
    if any(argument.is_out for argument in schema.arguments):
        return False
    return all(value.alias_info is not None for value in schema.returns)


def _tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif isinstance(value, nn.Module):
        yield from _tensors_of([*value.parameters(), *value.buffers()])
    elif isinstance(value, torch.optim.Optimizer):
        yield from _tensors_of([group["params"] for group in value.param_groups])
        yield from _tensors_of(list(value.state.values()))
    elif isinstance(value, Mapping):
        yield from _tensors_of(value.values())
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from _tensors_of(item)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"

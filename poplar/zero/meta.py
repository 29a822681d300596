"""Models on ``meta``: no memory until their unit's turn, values from ``reset_parameters()`` on rank 0.

The other ranks' values come from rank 0 like those of any model. Where rank 0 holds values (it has read a pretrained
model), the other ranks' model may be on ``meta`` whatever methods its modules have.

[Note: as if built on the CPU]
A module draws its values when it is built, after its children and before it is tied to others. So children are reset
before their parents, which may overwrite them, and a tied parameter gets what the first module that holds it draws.
What a reset must not touch (parameters of other units, sharded already or not there yet; ties that another module has
drawn) is kept out of its reach: for that while a parameter on ``meta`` stands in its place. A model that is its units
in definition order gets, from the same seed, bitwise what a build on the CPU gives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from poplar.errors import ModelError
from poplar.zero.units import Unit


def check_initialisable(model: nn.Module) -> None:
    """Make sure that all that is on ``meta`` can get values, before anything is touched.

    Raises:
        ModelError: names the first module that has no ``reset_parameters``.
    """
    for module_name, module in model.named_modules():
        own = [*module._parameters.items(), *module._buffers.items()]
        on_meta = next((name for name, tensor in own if tensor is not None and tensor.is_meta), None)
        if on_meta is not None and _reset_of(module) is None:
            raise ModelError(
                f"{on_meta!r} of module {module_name!r} ({type(module).__name__}) is on meta, and the module has no "
                "reset_parameters(); build the model on the CPU, or give the module that method"
            )


class MetaParameters:
    """The parameters of a model that are on ``meta``, and those that take their places.

    Args:
        units: with flat buffers, whose table is changed to the new parameters; these have no memory yet.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], device: torch.device):
        self._model = model
        self._device = device
        self._new_by_old: dict[nn.Parameter, nn.Parameter] = {}
        for unit in units:
            for piece in (piece for buffer in unit.buffers for piece in buffer.pieces if piece.param.is_meta):
                hole = torch.empty((), dtype=piece.param.dtype, device=device).expand(piece.shape)
                new = nn.Parameter(hole, requires_grad=piece.param.requires_grad)
                new.__dict__.update(piece.param.__dict__)  # what users have noted on it
                self._new_by_old[piece.param] = new
                piece.param = new
            unit.params = [(names, self._new_by_old.get(param, param)) for names, param in unit.params]

    def materialise(self, unit: Unit, run: bool) -> None:
        """Put the unit's new parameters into the model, with memory and, if ``run``, values."""
        pieces = {piece.param: piece for buffer in unit.buffers for piece in buffer.pieces}
        new = {old: param for old, param in self._new_by_old.items() if param in pieces}
        for param in new.values():
            piece = pieces[param]
            param.data = torch.empty_strided(piece.shape, piece.stride, dtype=param.dtype, device=self._device)
        owners: list[nn.Module] = []
        for module in _children_first(self._model, set()) if new else ():
            names = [name for name, param in module._parameters.items() if param in new]
            for name in names:
                module._parameters[name] = new[module._parameters[name]]  # type: ignore[index]
            owners += [module] if names else []
        drawn_by: dict[nn.Parameter, nn.Module] = {}
        for module in owners:
            inside = set(module.modules())
            free = {param for param in new.values() if param not in drawn_by or drawn_by[param] in inside}
            initialise_buffers(module, self._device, run, free)
            for drawn in module._parameters.values():
                if drawn is not None:
                    drawn_by.setdefault(drawn, module)


def initialise_buffers(
    module: nn.Module, device: torch.device, run: bool, params: Collection[nn.Parameter] = ()
) -> None:
    """Give a module's buffers on ``meta`` memory; if ``run``, reset the module, which can write ``params`` alone."""
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=device)
    reset = _reset_of(module)
    if run and reset is not None:
        with _out_of_reach(module, params):
            reset()


@contextlib.contextmanager
def _out_of_reach(module: nn.Module, params: Collection[nn.Parameter]) -> Iterator[None]:
    """Let parameters on ``meta`` stand in for all of a module's but ``params``."""
    hidden: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    for inner in module.modules():
        for name, param in inner._parameters.items():
            if param is not None and param not in params:
                hidden.append((inner._parameters, name, param))
                inner._parameters[name] = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
    try:
        yield
    finally:
        for owner, name, param in hidden:
            owner[name] = param


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)

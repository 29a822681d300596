"""Cut a model into units: sets of parameters that are gathered, reduced and freed together.

By default the elements of outermost ``ModuleList``s and ``Sequential``s are one unit each (a transformer's blocks),
and so is every module outside them that holds as many parameters as the median of those (large embeddings, heads). The
rest is the root unit, which stays unsharded from the first forward to the end of backward at stage 3.

[Note: units and modules]
A unit is a set of parameters, not a module. A module may need several units (its weight is tied to another unit's),
and a unit several modules (those that hold its parameters, and the element it was cut from). ``Unit.modules`` lists
all modules whose forward must find the unit whole.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from poplar.errors import ConfigError, ModelError
from poplar.zero.flat import FlatBuffer

UnitsArgument = Sequence[str | nn.Module] | Callable[[str, nn.Module], bool] | None
"""How users cut by hand: module names, modules, or a predicate of (name, module)."""

LARGE_UNIT_SHARE = 0.5
ROOT = "(root)"

# Parts of a name that wrappers add and that users never wrote.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


class Unit:
    """Parameters gathered, reduced and freed together.

    Attributes:
        index: position in forward order as far as the definition tells it; the root unit comes first.
        buffers: one flat buffer per (compute dtype, master dtype, requires_grad).
        modules: modules whose forward needs the unit's parameters.
    """

    def __init__(self, index: int, name: str, params: list[tuple[tuple[str, ...], nn.Parameter]]):
        self.index = index
        self.name = name
        self.params = params
        self.modules: list[nn.Module] = []
        self.buffers: list[FlatBuffer] = []

    def __repr__(self) -> str:
        return f"Unit({self.index}, {self.name!r}, {sum(p.numel() for _, p in self.params)} elements)"

    @property
    def is_root(self) -> bool:
        return self.name == ROOT

    @property
    def trainable_buffers(self) -> list[FlatBuffer]:
        return [buffer for buffer in self.buffers if buffer.requires_grad]

    @property
    def has_frozen(self) -> bool:
        return any(not buffer.requires_grad for buffer in self.buffers)

    def build_buffers(
        self,
        group_of: Callable[[nn.Parameter], int],
        dtypes_of: Callable[[nn.Parameter], tuple[torch.dtype, torch.dtype]],
        ratios: Sequence[float],
        rank: int,
    ) -> None:
        """Lay the parameters out in flat buffers; allocates nothing."""
        classes: dict[tuple[Any, ...], list[tuple[tuple[str, ...], nn.Parameter, int]]] = {}
        for names, param in self.params:
            key = (*dtypes_of(param), param.requires_grad)
            classes.setdefault(key, []).append((names, param, group_of(param)))
        self.buffers = [FlatBuffer(members, key[:2], ratios, rank) for key, members in classes.items()]


def clean_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers (compile, checkpoint) add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def named_parameters_with_ties(model: nn.Module) -> list[tuple[tuple[str, ...], nn.Parameter]]:
    """Return every parameter once, with all of its clean names, in definition order."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(clean_name(name))
    return [(tuple(dict.fromkeys(all_names)), param) for param, all_names in names.items()]


def cut_units(model: nn.Module, units: UnitsArgument = None) -> list[Unit]:
    """Cut ``model`` into units that hold every parameter exactly once.

    Raises:
        ConfigError: ``units`` names a module that does not exist, or twice the same parameters.
        ModelError: the model has no parameters.
    """
    all_params = named_parameters_with_ties(model)
    if not all_params:
        raise ModelError(f"the model ({type(model).__name__}) has no parameters; there is nothing to train")
    tops = list(_default_tops(model)) if units is None else _requested_tops(model, units)
    owner: dict[nn.Parameter, str] = {}
    for name, module in tops:
        for param in module.parameters():
            owner.setdefault(param, name)
    by_name: dict[str, list[tuple[tuple[str, ...], nn.Parameter]]] = {ROOT: [], **{name: [] for name, _ in tops}}
    for names, param in all_params:
        by_name[owner.get(param, ROOT)].append((names, param))
    cut = [Unit(0, name, params) for name, params in by_name.items() if params]
    for index, unit in enumerate(cut):
        unit.index = index
    _assign_modules(model, dict(tops), cut)
    return cut


def large_units(units: Sequence[Unit]) -> list[tuple[Unit, float]]:
    """Return the units that hold over half of the model, with their share."""
    sizes = {unit: sum(param.numel() for _, param in unit.params) for unit in units}
    total = sum(sizes.values())
    return [(unit, size / total) for unit, size in sizes.items() if total and size > LARGE_UNIT_SHARE * total]


def _assign_modules(model: nn.Module, tops: dict[str, nn.Module], cut: list[Unit]) -> None:
    unit_of = {param: unit for unit in cut for _, param in unit.params}
    by_name = {unit.name: unit for unit in cut}
    if ROOT in by_name:
        by_name[ROOT].modules.append(model)
    for name, module in tops.items():
        if name in by_name:
            by_name[name].modules.append(module)
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None and module not in unit_of[param].modules:
                unit_of[param].modules.append(module)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(
        module, parametrize.ParametrizationList
    )


def _listed(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the elements of outermost lists below ``module``."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if _is_list(module):
            yield path, child
        elif not isinstance(child, parametrize.ParametrizationList):
            yield from _listed(path, child)


def _default_tops(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    listed: dict[nn.Module, str] = {}
    for name, module in _listed("", model):
        if any(True for _ in module.parameters()):
            listed.setdefault(module, name)
    inside = {module for top in listed for module in top.modules()}
    outside = {
        module: name
        for name, module in model.named_modules()
        if module not in inside and module is not model and any(p is not None for p in module._parameters.values())
    }
    sizes = [sum(param.numel() for param in module.parameters()) for module in listed]
    total = sum(param.numel() for param in model.parameters())
    threshold = statistics.median(sizes) if sizes else total / 8
    tops = dict(listed)
    for module, name in outside.items():
        if sum(p.numel() for p in module._parameters.values() if p is not None) >= max(threshold, 1):
            tops[module] = name
    # Definition order, the best guess at forward order before anything has run.
    position = {module: index for index, module in enumerate(model.modules())}
    for module in sorted(tops, key=position.__getitem__):
        yield tops[module], module


def _requested_tops(model: nn.Module, units: UnitsArgument) -> list[tuple[str, nn.Module]]:
    modules = {clean_name(name): module for name, module in model.named_modules()}
    names = {module: name for name, module in modules.items()}
    if callable(units):
        tops = [(name, module) for name, module in modules.items() if module is not model and units(name, module)]
    else:
        tops = []
        for entry in units or ():
            module = modules.get(entry) if isinstance(entry, str) else entry
            if module is None or module not in names:
                raise ConfigError(
                    f"units names {entry!r}, which is not a module of the model; known are {_some(modules)}"
                )
            tops.append((names[module], module))
    for name, module in tops:
        inner = {m for m in module.modules() if m is not module}
        nested = next((other for other, candidate in tops if candidate in inner), None)
        if nested is not None:
            raise ConfigError(f"units names {nested!r} and {name!r}, which contains it; name one of them")
    return tops


def _some(names: Sequence[str] | dict[str, nn.Module]) -> str:
    shown = [name for name in names if name][:8]
    return ", ".join(shown) + (", ..." if len(names) > 8 else "")

"""Whether a checkpoint belongs to a model and its optimizer: names, ties, shapes, groups; decided before any change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from poplar.checkpointing.values import decode, dtype_name, dtype_of
from poplar.errors import CheckpointError
from poplar.zero.flat import NO_GROUP, FlatBuffer, Piece
from poplar.zero.units import Unit, clean_name

Entry = dict[str, Any]
"""One parameter of the manifest: names, shape, dtype, group, file; state: its optimizer state by entry, or None."""


def pieces_of(units: Iterable[Unit]) -> list[tuple[FlatBuffer, Piece]]:
    """Return every parameter's place."""
    return [(buffer, piece) for unit in units for buffer in unit.buffers for piece in buffer.pieces]


def persistent_buffers(model: nn.Module) -> list[tuple[tuple[str, ...], Tensor]]:
    """Return the buffers that belong to a model's state, each once, with all of its clean names."""
    named: dict[int, tuple[list[str], Tensor]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                full_name = clean_name(f"{module_name}.{name}" if module_name else name)
                named.setdefault(id(buffer), ([], buffer))[0].append(full_name)
    return [(tuple(dict.fromkeys(names)), buffer) for names, buffer in named.values()]


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have more state than parameters and buffers, by its name in torch's state dicts."""
    return {
        clean_name(f"{name}._extra_state" if name else "_extra_state"): module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def match_params(entries: Iterable[Entry], units: Iterable[Unit]) -> dict[Piece, Entry]:
    """Return the stored entry of every parameter of the model.

    Raises:
        CheckpointError: a parameter is missing or unexpected, tied differently, or of another shape; names the first.
    """
    pieces = [piece for _, piece in pieces_of(units)]
    stored = _by_name(entries)
    _check_names("parameter", [piece.names for piece in pieces], stored)
    for piece in pieces:
        entry = stored[piece.names[0]]
        if set(entry["names"]) != set(piece.names):
            raise CheckpointError(
                f"parameter {piece.names[0]} has the names {sorted(piece.names)} in this model and "
                f"{sorted(entry['names'])} in the checkpoint; tie the weights as they were tied then"
            )
        _check_shape("parameter", piece.names[0], piece.shape, entry)
    return {piece: stored[piece.names[0]] for piece in pieces}


def match_buffers(entries: Iterable[Entry], model: nn.Module) -> list[tuple[Tensor, Entry]]:
    """Return the model's persistent buffers with their stored entries; errors as for parameters."""
    buffers = persistent_buffers(model)
    stored = _by_name(entries)
    _check_names("buffer", [names for names, _ in buffers], stored)
    for names, buffer in buffers:
        _check_shape("buffer", names[0], buffer.shape, stored[names[0]])
    return [(buffer, stored[names[0]]) for names, buffer in buffers]


def match_extra_states(stored: Mapping[str, Any], model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have extra state, the same ones as in the checkpoint; errors as for parameters."""
    modules = modules_with_extra_state(model)
    _check_names("extra state", [(name,) for name in modules], stored)
    return modules


def check_optimizer(stored: Mapping[str, Any], params: Mapping[Piece, Entry], optimizer: torch.optim.Optimizer) -> None:
    """Make sure that stored state and settings mean the same to ``optimizer``.

    Raises:
        CheckpointError: another class, another number of groups, or a parameter in another group.
    """
    kind = type(optimizer).__name__
    if stored["class"] != kind:
        raise CheckpointError(
            f"the checkpoint holds the state of {stored['class']}, this engine's optimizer is {kind}. To go on with "
            "another optimizer, load the checkpoint's model-*.safetensors into the model before initialize()"
        )
    if len(stored["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(stored['groups'])} groups, this engine's "
            f"{len(optimizer.param_groups)}; build them as they were then"
        )
    for piece, entry in params.items():
        if NO_GROUP not in (piece.group, entry["group"]) and piece.group != entry["group"]:
            raise CheckpointError(
                f"parameter {piece.names[0]} is in group {piece.group} of this engine's optimizer and in group "
                f"{entry['group']} of the checkpoint's; build the groups as they were then"
            )


def what_is_lost(params: Mapping[Piece, Entry], units: Iterable[Unit]) -> list[str]:
    """Return what loading changes or leaves out on purpose, a sentence each."""
    frozen, rounded = [], []
    for buffer, piece in pieces_of(units):
        stored = dtype_of(params[piece]["dtype"])
        if torch.promote_types(stored, buffer.master_dtype) != buffer.master_dtype:
            rounded.append(f"{piece.names[0]} from {dtype_name(stored)} to {dtype_name(buffer.master_dtype)}")
        if params[piece]["state"] is not None and (not buffer.requires_grad or piece.group == NO_GROUP):
            frozen.append(piece.names[0])
    notes = []
    if rounded:
        notes.append(f"{len(rounded)} parameters were rounded to another dtype, first {rounded[0]}")
    if frozen:
        notes.append(
            f"optimizer state of {len(frozen)} parameters that are not trained here was left out: {frozen[0]}, ..."
        )
    return notes


def stored_states(params: Mapping[Piece, Entry], units: Iterable[Unit]) -> dict[Piece, dict[str, Any]]:
    """Return the optimizer state of every parameter: a dtype where there is one value per element, else the value.

    State in the parameter's own dtype follows it if the parameter has another dtype here, as torch's optimizers have
    it; state in a dtype of its own keeps that.
    """
    states: dict[Piece, dict[str, Any]] = {}
    for buffer, piece in pieces_of(units):
        entry = params[piece]
        states[piece] = state = {}
        for name, value in (entry["state"] or {}).items():
            if "file" not in value:
                state[name] = decode(value["value"])
            elif value["dtype"] == entry["dtype"]:
                state[name] = buffer.master_dtype
            else:
                state[name] = dtype_of(value["dtype"])
    return states


def _by_name(entries: Iterable[Entry]) -> dict[str, Entry]:
    return {name: entry for entry in entries for name in entry["names"]}


def _check_names(what: str, known: list[tuple[str, ...]], stored: Mapping[str, Any]) -> None:
    missing = [names[0] for names in known if names[0] not in stored]
    names_here = {name for names in known for name in names}
    unexpected = [name for name in stored if name not in names_here]
    if missing or unexpected:
        parts = []
        if missing:
            parts.append(f"{len(missing)} {what}s of this model are not in the checkpoint, first {missing[0]!r}")
        if unexpected:
            parts.append(f"{len(unexpected)} {what}s of the checkpoint are not in this model, first {unexpected[0]!r}")
        raise CheckpointError(f"the checkpoint is of another model: {'; '.join(parts)}")


def _check_shape(what: str, name: str, shape: torch.Size, entry: Entry) -> None:
    if list(shape) != entry["shape"]:
        raise CheckpointError(
            f"the checkpoint is of another model: {what} {name} has shape {tuple(entry['shape'])} there, "
            f"{tuple(shape)} here"
        )

"""Put a model's parameters into flat buffers, unit by unit, and hand them to a stage.

Units are cut first, and each is made on the device, sent from rank 0 and sharded before the next one is touched, so
that at stage 3 a model that fits no card whole still starts. What is on ``meta`` is initialised on rank 0 only:
``meta.py``.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from poplar.device import Device
from poplar.errors import CommunicationError, ConfigError
from poplar.zero.comm import Communicator, raise_together
from poplar.zero.flat import NO_GROUP, FlatBuffer
from poplar.zero.meta import MetaParameters, check_initialisable, initialise_buffers
from poplar.zero.optimizer import OptimizerBinding, ParamState, group_indices
from poplar.zero.precision import Precision
from poplar.zero.stage import Stage
from poplar.zero.stage0 import Stage0
from poplar.zero.stage1 import Stage1
from poplar.zero.stage2 import Stage2
from poplar.zero.stage3 import Stage3
from poplar.zero.units import Unit, UnitsArgument, cut_units

STAGES: dict[int, type[Stage]] = {0: Stage0, 1: Stage1, 2: Stage2, 3: Stage3}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is to be laid out over the ranks."""

    zero_stage: int
    ratios: tuple[float, ...]
    """Size of each shard; all equal: equal shards."""
    precision: Precision
    units: UnitsArgument = None
    comm: Communicator
    device: Device
    groups: dict[nn.Parameter, int] = field(default_factory=dict)
    """Optimizer group of each parameter, once known."""


def build(
    model: nn.Module, optimizer: Optimizer, layout: Layout, states: dict[nn.Parameter, ParamState]
) -> tuple[Stage, OptimizerBinding]:
    """Lay the model out, send it from rank 0, and bind the optimizer to the shards.

    Args:
        states: optimizer state to begin with, whole, by parameter.
    Collective.
    """
    units, groups, problem = [], {}, None
    try:
        units = cut_units(model, layout.units)
        groups = layout.groups or group_indices(optimizer, units)
        if layout.comm.rank == 0:
            check_initialisable(model)
        if any(param.is_meta for param in states):
            raise ConfigError(
                f"{type(optimizer).__name__} makes state when it is built, and the model is on meta, where nothing has "
                "values; build the model on the CPU, or use an optimizer that makes state in its first step"
            )
    except Exception as error:
        problem = error
    raise_together(layout.comm, problem, "could not cut the model")
    _check_same_model(units, groups, layout)
    never_cast = {
        param
        for module in model.modules()
        if isinstance(module, _BatchNorm)
        for param in module.parameters(recurse=False)
    }

    def dtypes_of(param: nn.Parameter) -> tuple[torch.dtype, torch.dtype]:
        compute_dtype = layout.precision.compute_dtype(param, keep=param in never_cast)
        return compute_dtype, layout.precision.master_dtype(param, compute_dtype)

    for unit in units:
        unit.build_buffers(lambda param: groups.get(param, NO_GROUP), dtypes_of, layout.ratios, layout.comm.shard_rank)
    on_meta = MetaParameters(model, units, layout.device.torch_device)
    stage = STAGES[layout.zero_stage](model, units, layout.comm, layout.device)
    try:
        for unit in units:
            on_meta.materialise(unit, run=layout.comm.rank == 0)
            for buffer in unit.buffers:
                _fill(buffer, stage, layout)
        _send_buffers(model, layout)
        return stage, OptimizerBinding(optimizer, units, states)
    except BaseException:
        stage.close()  # hooks would keep alive what there was memory for
        raise


def _check_same_model(units: Sequence[Unit], groups: dict[nn.Parameter, int], layout: Layout) -> None:
    """Make sure that all ranks cut the same model the same way, before a collective depends on it. Collective."""
    rows = [f"zero_stage {layout.zero_stage}", f"shard_ratios {layout.ratios}"]
    for unit in units:
        for names, param in unit.params:
            grad = "trained" if param.requires_grad else "frozen"
            shape, group = tuple(param.shape), groups.get(param, NO_GROUP)
            rows.append(f"unit {unit.name}: {names[0]} {shape} {param.dtype} {grad}, optimizer group {group}")
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    if all(other in (None, digest) for other in layout.comm.gather_objects(digest)):
        return
    others = layout.comm.gather_objects(rows)
    for rank, other in enumerate(others):
        for mine, theirs in itertools.zip_longest(others[0], other, fillvalue="nothing"):
            if mine != theirs:
                raise CommunicationError(f"the ranks' models differ: rank 0 has {mine!r}, rank {rank} {theirs!r}")


def _fill(buffer: FlatBuffer, stage: Stage, layout: Layout) -> None:
    """Copy the parameters, as they are on rank 0, into a new whole buffer, and hand it to the stage."""
    device = layout.device.torch_device
    whole = torch.empty(buffer.padded_numel, dtype=buffer.master_dtype, device=device)
    buffer.zero_padding(whole)
    with torch.no_grad():
        for piece in buffer.pieces:
            piece.view_of(whole).copy_(piece.param)
    layout.comm.broadcast(whole, src=0, name=f"initial {buffer.pieces[0].names[0]}...")
    if buffer.dtype == buffer.master_dtype:
        stage.adopt(buffer, whole)
        buffer.master = buffer.shard
    else:
        stage.adopt(buffer, whole.to(buffer.dtype))
        buffer.master = whole[buffer.update_start : buffer.update_stop].clone()


def _send_buffers(model: nn.Module, layout: Layout) -> None:
    """Move the module buffers (statistics, masks) to the device and make them those of rank 0."""
    device = layout.device.torch_device
    for module in model.modules():
        if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            initialise_buffers(module, device, run=layout.comm.rank == 0)
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer.device != device:
                module._buffers[name] = buffer = buffer.to(device)
            if buffer.is_contiguous():
                layout.comm.broadcast(buffer, src=0, name=f"buffer {name}")
            else:
                whole = buffer.contiguous()
                layout.comm.broadcast(whole, src=0, name=f"buffer {name}")
                buffer.copy_(whole)


def layout_signature(units: Sequence[Unit]) -> list[bool]:
    """Return what a change of makes it necessary to build anew: which parameters are trained."""
    return [param.requires_grad for unit in units for _, param in unit.params]

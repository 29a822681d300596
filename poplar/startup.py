"""``initialize``: from a model, an optimizer and a plan to an engine on every rank, or an error on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from poplar.config import PRECISIONS, ZERO_STAGES, debug_from_environment
from poplar.device import Device, current_device
from poplar.engine import Engine, LossFunction, StepSettings, WeightFunction, check_has_no_engine
from poplar.errors import ConfigError, ModelError
from poplar.plan import Plan, check_shard_ratios
from poplar.zero.build import Layout
from poplar.zero.comm import (
    Communicator,
    LoopbackComm,
    ProcessGroupComm,
    check_same,
    join_process_group,
    raise_together,
)
from poplar.zero.debug import CheckedComm
from poplar.zero.hybrid import HybridComm
from poplar.zero.optimizer import check_elementwise
from poplar.zero.precision import PoplarWarning, Precision, resolve_precision
from poplar.zero.units import UnitsArgument, large_units

if TYPE_CHECKING:
    import torch.distributed as dist


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: LossFunction,
    *,
    zero_stage: int | None = None,
    plan: Plan | None = None,
    weight: WeightFunction | None = None,
    reduction: str = "mean",
    precision: str | None = None,
    max_grad_norm: float | None = None,
    max_grad_value: float | None = None,
    norm_type: float = 2.0,
    non_finite: str = "skip",
    shard_ratios: Sequence[float] | None = None,
    units: UnitsArgument = None,
    num_replicas: int = 1,
    group: dist.ProcessGroup | None = None,
    comm: Communicator | None = None,
    device: Device | None = None,
    debug: bool | None = None,
) -> Engine:
    """Shard a model and its optimizer over the ranks of a group, and return the engine that trains them.

    Args:
        model: on the CPU or on meta; its parameters and buffers become those of rank 0.
        optimizer: built on the model's parameters; element-wise (SGD, Adam, ...). It is bound to this rank's shards.
        loss: (model, micro-batch) -> scalar, the mean over the micro-batch's weight (or the sum).
        zero_stage: 0, 1, 2 or 3; None: the plan's, or 0.
        plan: sets stage, shard ratios and precision.
        weight: micro-batch -> denominator of its mean (samples, tokens); None: the tensors' common first dimension.
        reduction: "mean" or "sum", what the loss is.
        precision: "fp32" (each parameter its own dtype), "bf16", "fp16" or "auto"; None: the plan's, or "fp32".
        max_grad_norm: clip the global norm (of ``norm_type``) to this.
        max_grad_value: clip every element to [-value, value].
        non_finite: "skip" a step whose gradients are not finite, on all ranks, or "raise".
        shard_ratios: share of the model state by rank; None: equal.
        units: names, modules, or a predicate (name, module) that cut the model; None: see ``poplar.zero.units``.
        num_replicas: hybrid sharding: shard over world_size / num_replicas neighbouring ranks, replicate over the rest.
        group: the ranks; None: the launcher's group, or this process alone.
        comm: a communicator instead of ``group``.
        device: what this rank runs on; None: the accelerator of this local rank, or the CPU.
        debug: compare the ranks at every collective and after every step, slowly; None: as ``POPLAR_DEBUG`` says.

    Raises:
        ConfigError: an argument is wrong, contradicts the plan, or the optimizer needs whole parameters.
        ModelError: the model has nothing to train.
    Collective.
    """
    device = device or current_device()
    comm = comm or _communicator(group, device, num_replicas)
    if debug_from_environment() if debug is None else debug:
        comm = CheckedComm(comm)
    problem: Exception | None = None
    try:
        settings = StepSettings(
            weight=weight,
            reduction=reduction,
            max_grad_norm=max_grad_norm,
            max_grad_value=max_grad_value,
            norm_type=norm_type,
            non_finite=non_finite,
        )
        stage_number, precision_name, given_ratios = _settle(plan, zero_stage, precision, shard_ratios)
        ratios = check_shard_ratios(given_ratios or [1.0] * comm.shard_world_size, comm.shard_world_size)
        check_has_no_engine(model)
        _check_model(model, optimizer)
        _check_values(model, settings, alone=comm.world_size == 1 and stage_number < 3 and precision_name == "fp32")
    except Exception as error:
        problem = error
    # An argument may be wrong on one rank alone; the others must not wait for it.
    raise_together(comm, problem, "could not initialize")
    # Batches of another plan would be taken twice on one rank, or by nobody.
    check_same(comm, "none" if plan is None else plan.checksum, "plan= (by checksum)")
    if plan is not None:
        plan.check_cluster(comm.world_size, comm.gather_objects(device.device_id))
    layout = Layout(
        zero_stage=stage_number,
        ratios=ratios,
        precision=_agree_on_precision(precision_name, comm, device),
        units=units,
        comm=comm,
        device=device,
    )
    engine = Engine(model, optimizer, loss, layout, settings)
    if comm.world_size > 1:
        _warn_of_surprises(engine)
    return engine


def _warn_of_surprises(engine: Engine) -> None:
    if engine.zero_stage == 3:
        for unit, share in large_units(engine.units):
            warnings.warn(
                f"unit {unit.name} holds {share:.0%} of the model; at stage 3 it is gathered whole; cut it with units=",
                PoplarWarning,
                stacklevel=3,
            )
    if any(isinstance(module, _BatchNorm) and not _is_synchronised(module) for module in engine.module.modules()):
        warnings.warn(
            "batch normalisation uses the statistics of each rank's own micro-batch, so results depend on the split; "
            "use another normalisation (torch.nn.SyncBatchNorm waits for ever where a rank has no samples)",
            PoplarWarning,
            stacklevel=3,
        )
    if any(_has_spectral_norm(module) for module in engine.module.modules()):
        warnings.warn(
            "spectral_norm goes on with its power iteration in every forward, on each rank by its own number of "
            "micro-batches, so results depend on the split",
            PoplarWarning,
            stacklevel=3,
        )


def _check_values(model: nn.Module, settings: StepSettings, alone: bool) -> None:
    """Refuse what would write parameters or gradients in a way that ranks cannot share.

    Args:
        alone: the only copy of the parameters is whole and in this process.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None and not alone:
            raise ModelError(
                f"{name or 'the model'} ({type(module).__name__}) has max_norm={module.max_norm}: its forward rewrites "
                "its weight, on each rank those rows that its own samples use; set max_norm to None, and renormalise "
                "between steps inside `with engine.unsharded():`"
            )
    for name, param in model.named_parameters():
        if isinstance(param, UninitializedParameter):
            raise ModelError(f"{name} has no shape yet; run the model on a sample before initialize()")
        if param.layout is not torch.strided:
            raise ModelError(f"{name} has the layout {param.layout}; flat buffers hold dense parameters, make it one")
    complex_name = next((name for name, p in model.named_parameters() if p.is_complex() and p.requires_grad), None)
    if settings.max_grad_value is not None and complex_name is not None:
        raise ConfigError(f"max_grad_value cannot clip {complex_name}, which is complex; use max_grad_norm")


def _has_spectral_norm(module: nn.Module) -> bool:
    hooks = [*module._forward_pre_hooks.values()]
    return isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks)


def _is_synchronised(module: nn.Module) -> bool:
    return isinstance(module, nn.SyncBatchNorm) or not module.training


def _settle(
    plan: Plan | None, zero_stage: int | None, precision: str | None, shard_ratios: Sequence[float] | None
) -> tuple[int, str, Sequence[float] | None]:
    """Return stage, precision and ratios from the plan and the arguments, which must not contradict it."""
    if plan is not None:
        ratios = None if shard_ratios is None else check_shard_ratios(shard_ratios, plan.world_size)
        given = {"zero_stage": zero_stage, "precision": precision, "shard_ratios": ratios}
        for name, value in given.items():
            if value is not None and value != getattr(plan, name):
                raise ConfigError(
                    f"{name}={value!r} contradicts the plan, which has {getattr(plan, name)!r}; leave it out"
                )
        return plan.zero_stage, plan.precision, plan.shard_ratios
    zero_stage = 0 if zero_stage is None else zero_stage
    if zero_stage not in ZERO_STAGES or isinstance(zero_stage, bool):
        raise ConfigError(f"zero_stage must be 0, 1, 2 or 3; got {zero_stage!r}")
    return zero_stage, precision or "fp32", shard_ratios


def _communicator(group: dist.ProcessGroup | None, device: Device, num_replicas: int) -> Communicator:
    joined = group if group is not None else join_process_group(device=device.torch_device)
    if joined is None:
        return LoopbackComm(0, 1)
    if num_replicas == 1:
        return ProcessGroupComm(joined, device.torch_device)
    return HybridComm(joined, device.torch_device, num_replicas)


def _agree_on_precision(name: str, comm: Communicator, device: Device) -> Precision:
    """Return the precision for all ranks, by what every card does natively. Collective."""
    # A plain CPU rank is no card that bf16 or fp16 were asked for in error: it is a test.
    asks = name == "auto" or device.is_emulated or device.torch_device.type != "cpu"
    rows = comm.gather_objects(device.native_dtypes() if asks else PRECISIONS)
    return resolve_precision(name, [row for row in rows if row is not None])


def _check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if not any(True for _ in model.parameters()):
        raise ModelError(f"the model ({type(model).__name__}) has no parameters; there is nothing to train")
    if not any(param.requires_grad for param in model.parameters()):
        raise ModelError("no parameter of the model requires a gradient; there is nothing to train")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}")
    check_elementwise(optimizer)

"""Bind the user's own optimizer to shards.

The optimizer object and its group dicts are mutated, never replaced, so that learning-rate schedulers and user code
that hold them keep working. Its parameters become one long tensor per (flat buffer, group): what this rank owns of that
group. State that it already has (Adagrad makes it when built; a resumed run brings it) is cut the same way.

[Note: element-wise optimizers]
Running over pieces of flattened parameters is right only if an element's update depends on nothing but that element.
That is tested, not listed: the optimizer's class and settings step a small matrix whole and in flat pieces, and a
difference (Muon, Shampoo, Adafactor, LAMB) is an error.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poplar.errors import ConfigError, ModelError
from poplar.rng import preserved_random_state
from poplar.zero.flat import NO_GROUP, FlatBuffer, GroupSlice, Piece
from poplar.zero.units import Unit

ParamState = dict[str, Any]

# Entries of torch's optimizers that are one number for a whole parameter. A parameter that is itself a scalar has
# moments of the same shape, so only the name can tell.
_SCALAR_STATE = frozenset({"step", "eta", "mu", "mu_product"})


@dataclass(eq=False)
class ShardParam:
    """One tensor that the optimizer updates, and where it lies in its flat buffer."""

    buffer: FlatBuffer
    slice: GroupSlice
    param: nn.Parameter

    @property
    def grad_view(self) -> Tensor:
        """The tensor's part of the buffer's gradient."""
        assert self.buffer.grad is not None
        offset = self.buffer.update_start
        return self.buffer.grad[self.slice.start - offset : self.slice.stop - offset]


class OptimizerBinding:
    """The user's optimizer, running over this rank's shards.

    Args:
        optimizer: built on the original parameters; mutated.
        units: with flat buffers whose ``master`` is in place.
        states: optimizer state by parameter, whole, in the parameter's own shape.
    """

    def __init__(self, optimizer: Optimizer, units: Sequence[Unit], states: dict[nn.Parameter, ParamState]):
        self.optimizer = optimizer
        self.shard_params: list[ShardParam] = []
        self.clear()
        for unit in units:
            # Frozen parameters too: they get no gradient, but keep their state until they are thawed.
            for buffer in unit.buffers:
                self.bind(buffer, states)

    def clear(self) -> None:
        """Take all parameters and state from the optimizer; its groups stay."""
        self.shard_params.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []
        self.optimizer.state.clear()

    def bind(self, buffer: FlatBuffer, states: dict[nn.Parameter, ParamState]) -> None:
        """Give the optimizer this rank's part of ``buffer``; ``states`` holds at least its parameters' state."""
        for group_slice in buffer.group_slices():
            for part in _same_step(group_slice, states):
                self._add(buffer, part, states)

    def _add(self, buffer: FlatBuffer, part: GroupSlice, states: dict[nn.Parameter, ParamState]) -> None:
        offset = buffer.update_start
        param = nn.Parameter(buffer.master[part.start - offset : part.stop - offset], buffer.requires_grad)
        self.shard_params.append(ShardParam(buffer, part, param))
        if part.group == NO_GROUP:
            return
        group = self.optimizer.param_groups[part.group]
        group["params"].append(param)
        state = _cut_state(part, param, states)
        if group.get("fused") or group.get("capturable"):
            # These count their steps on the device; whole states hold single numbers on the CPU.
            state = {
                key: value.to(param.device) if isinstance(value, Tensor) else value for key, value in state.items()
            }
        if state:
            self.optimizer.state[param] = state

    def step(self) -> None:
        """Hand the optimizer its gradients and step it."""
        for shard_param in self.shard_params:
            if not shard_param.buffer.requires_grad:
                continue
            grad = shard_param.grad_view
            # An optimizer tensor of another dtype than its gradient: parameters kept in half precision without masters.
            shard_param.param.grad = grad if grad.dtype == shard_param.param.dtype else grad.to(shard_param.param.dtype)
        self.optimizer.step()
        for shard_param in self.shard_params:
            shard_param.param.grad = None

    def local_states(self) -> Iterator[tuple[ShardParam, ParamState]]:
        """Yield this rank's optimizer tensors with their state."""
        for shard_param in self.shard_params:
            yield shard_param, self.optimizer.state.get(shard_param.param, {})


def group_indices(optimizer: Optimizer, units: Sequence[Unit]) -> dict[nn.Parameter, int]:
    """Return the index of each parameter's optimizer group.

    Raises:
        ConfigError: the optimizer holds a tensor that is not a parameter of the model.
    """
    known = {param for unit in units for _, param in unit.params}
    indices: dict[nn.Parameter, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param not in known:
                raise ConfigError(
                    f"group {index} of the optimizer holds a tensor of shape {tuple(param.shape)} that is not a "
                    "parameter of the model; build the optimizer from the model given to initialize()"
                )
            indices[param] = index
    return indices


def whole_states(optimizer: Optimizer) -> dict[nn.Parameter, ParamState]:
    """Return the state that the optimizer has already, by parameter."""
    return {param: dict(state) for param, state in optimizer.state.items() if state}  # type: ignore[misc]


def is_elementwise_state(key: str, value: Any, shape: torch.Size) -> bool:
    """Return whether a state entry has one value per element of its parameter (moments), not one for all (step)."""
    return isinstance(value, Tensor) and value.shape == shape and key not in _SCALAR_STATE


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose update of an element depends on other elements: see [Note: element-wise optimizers].

    Raises:
        ConfigError: with the optimizer's class.
    """
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "lr", "param_names")}
        if settings.get("capturable"):
            settings["capturable"] = False  # the same update, and the trial is on the CPU, which cannot capture
        try:
            with preserved_random_state(), torch.enable_grad():
                whole, pieces = (
                    _trial_step(optimizer, settings, pieces=False),
                    _trial_step(optimizer, settings, pieces=True),
                )
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise _not_elementwise(optimizer, f"it cannot step a flat tensor: {error}") from error
        if not torch.allclose(whole, pieces, rtol=1e-9, atol=1e-12, equal_nan=True):
            raise _not_elementwise(optimizer, "a matrix stepped whole and in flat pieces gives different weights")


def _not_elementwise(optimizer: Optimizer, why: str) -> ConfigError:
    return ConfigError(
        f"{type(optimizer).__name__} with these settings needs whole parameters ({why}); ZeRO cuts parameters into "
        "flat shards, so use an optimizer that treats elements alone (SGD, Adam, AdamW, Lion, ...)"
    )


def _trial_step(optimizer: Optimizer, settings: dict[str, Any], pieces: bool) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn((6, 4), generator=generator, dtype=torch.float64) * torch.tensor([0.1, 1.0, 3.0, 10.0])
    gradients = [torch.randn((6, 4), generator=generator, dtype=torch.float64) * scale for scale in (3.0, 0.2, 1.0)]
    parts = start.flatten().split([5, 12, 7]) if pieces else [start]
    params = [nn.Parameter(part.clone()) for part in parts]
    # Two optimizers, as on two ranks: one that looks at all of its parameters together (a norm, a learned step size)
    # would see some of them only.
    owners = [params[:2], params[2:]] if pieces else [params]
    trials = [_like(optimizer, owned, {**settings, "lr": 0.01}) for owned in owners]
    for gradient in gradients:
        for param, part in zip(params, gradient.flatten().split([5, 12, 7]) if pieces else [gradient], strict=True):
            param.grad = part.clone()
        for trial in trials:
            trial.step()
    return torch.cat([param.detach().flatten() for param in params])


def _like(optimizer: Optimizer, params: list[nn.Parameter], settings: dict[str, Any]) -> Optimizer:
    """Return a new optimizer of the same class and settings over other parameters."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
        accepted = settings  # type: ignore[assignment]
    try:
        return type(optimizer)([{**settings, "params": params}], **{k: v for k, v in settings.items() if k in accepted})
    except TypeError:
        # The constructor does not take the settings; a shallow copy of the user's object keeps what its class added.
        trial = copy.copy(optimizer)
        trial.state = defaultdict(dict)
        trial.param_groups = [{**settings, "params": params}]
        return trial


def _same_step(group_slice: GroupSlice, states: dict[nn.Parameter, ParamState]) -> Iterator[GroupSlice]:
    """Cut a slice where its parameters' scalar state (the step counter) differs: one tensor has one counter."""
    run: list[Piece] = []
    for piece in group_slice.pieces:
        if run and _scalars(states.get(piece.param), piece) != _scalars(states.get(run[0].param), run[0]):
            yield _run_slice(group_slice, run)
            run = []
        run.append(piece)
    if run:
        yield _run_slice(group_slice, run)


def _run_slice(whole: GroupSlice, run: list[Piece]) -> GroupSlice:
    start = max(whole.start, run[0].start)
    # The gap before the next parameter belongs to nobody; the slice's own end may cut the last parameter.
    stop = min(whole.stop, run[-1].stop)
    return GroupSlice(whole.group, start, stop, tuple(run))


def _scalars(state: ParamState | None, piece: Piece) -> dict[str, Any]:
    scalars = {}
    for key, value in (state or {}).items():
        if not is_elementwise_state(key, value, piece.shape):
            scalars[key] = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        else:
            scalars[key] = "elementwise"
    return scalars


def _cut_state(part: GroupSlice, param: nn.Parameter, states: dict[nn.Parameter, ParamState]) -> ParamState:
    """Return the state of the optimizer tensor ``param`` that covers ``part``, cut from whole states."""
    first = states.get(part.pieces[0].param)
    if not first:
        return {}
    state: ParamState = {}
    for key, value in first.items():
        if is_elementwise_state(key, value, part.pieces[0].shape):
            state[key] = torch.zeros(param.shape, dtype=value.dtype, device=param.device)
            for piece in part.pieces:
                _copy_overlap(state[key], part.start, piece, states[piece.param][key])
        else:
            state[key] = copy.deepcopy(value)
    return state


def _copy_overlap(target: Tensor, target_start: int, piece: Piece, whole: Tensor) -> None:
    """Copy the part of a parameter's whole state that falls into ``target``, in the flat buffer's memory order."""
    if whole.shape != piece.shape:
        raise ModelError(
            f"optimizer state of {piece.names[0]} has shape {tuple(whole.shape)}, the parameter {tuple(piece.shape)}"
        )
    flat = torch.empty(piece.stop - piece.start, dtype=whole.dtype, device=target.device)
    flat.as_strided(piece.shape, piece.stride).copy_(whole)
    start, stop = max(piece.start, target_start), min(piece.stop, target_start + target.numel())
    target[start - target_start : stop - target_start].copy_(flat[start - piece.start : stop - piece.start])

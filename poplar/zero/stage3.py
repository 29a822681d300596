"""ZeRO stage 3: parameters, gradients and optimizer state are sharded.

Memory:  (P + P + 2P) / N on every rank (Adam); during a micro-step the root unit, the whole parameters of the unit in
         use and of the next one, and the whole gradients of the unit being filled and of the one being reduced.
Traffic: two all-gathers of parameters (forward, backward) and a reduce-scatter of gradients in every micro-step.
A step:  before a module runs, unshard its unit; after its forward, reshard; in backward, unshard again when a saved
         parameter is asked for, reduce when the unit's gradients are complete, reshard. One unit is gathered ahead.
Source:  ZeRO, arXiv:1910.02054, section 5.3 (P_os+g+p).

[Note: saved parameters are handles]
Autograd saves parameters (and views of them) for backward, which would keep every whole buffer alive. So while forward
runs, a saved tensor that lies in a whole buffer is replaced by a handle: buffer, offset, shape. Unpacking the handle in
backward unshards the unit, whatever shape the module's outputs had, and only if the value is needed at all. A whole
buffer is freed by letting go of it, never by shrinking its storage under somebody: whoever still holds a view (a
checkpoint's recomputed tensors) keeps correct memory.

[Note: parameters read outside their module]
A module's hooks cannot see ``F.linear(h, embedding.weight)`` in another module's forward. While the order is recorded,
every torch function is watched, and a unit that is read while resharded joins the root: it stays whole for the
micro-step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from poplar.device import Device
from poplar.errors import ModelError, ScheduleError, StepError
from poplar.rng import preserved_random_state
from poplar.zero.comm import Communicator, Work, raise_together
from poplar.zero.flat import FlatBuffer
from poplar.zero.schedule import Op, complete_order
from poplar.zero.stage2 import Stage2
from poplar.zero.units import Unit

PREFETCHED_UNITS = 1


class Phase(Enum):
    OUTSIDE = auto()
    FORWARD = auto()
    BACKWARD = auto()


class Stage3(Stage2):
    number = 3

    def __init__(self, model: nn.Module, units: Sequence[Unit], comm: Communicator, device: Device):
        super().__init__(model, units, comm, device)
        self._phase = Phase.OUTSIDE
        self._training = True
        self._orders: dict[bool, list[Op]] = {}  # by training
        self._always = {unit for unit in self.units if unit.is_root}  # whole for the whole micro-step
        self._always_agreed = self._always
        self._position = 0  # of the next op to issue
        self._recorded: list[Op] | None = None  # what this rank records, while it records
        self._claims = dict.fromkeys(self.units, 0)  # gathers issued and not used up; above 0 the unit is whole
        self._held: set[Unit] = set()  # whole until their backward
        self._ahead: set[Unit] = set()  # gathered before they were needed
        self._used: set[Unit] = set()  # needed in this forward
        self._open: list[Unit] = []  # in backward: whole, with frozen parameters, so that completion does not show
        self._completed: set[Unit] = set()  # of those: have all the gradients that they are expected to get
        self._depth = dict.fromkeys(self.units, 0)  # modules of the unit that are running
        self._gathers: dict[Unit, list[Work]] = {}
        self._buffer_at: dict[int, tuple[Unit, FlatBuffer]] = {}  # by address of the whole buffer's storage
        self._unit_of = {piece.param: unit for unit in self.units for buffer in unit.buffers for piece in buffer.pieces}
        self._hooks = list(self._register_hooks())

    # Parameters.

    def adopt(self, buffer: FlatBuffer, full: Tensor) -> None:
        buffer.full = None
        buffer.shard = buffer.own(full).clone()
        buffer.unbind()

    def publish(self) -> None:
        """Nothing to do: the next forward gathers the updated shards."""

    def unshard_all(self) -> None:
        for unit in self.units:
            self._unshard_together(unit)
            self._wait(unit)

    def reshard_all(self) -> None:
        for unit in self.units:
            for buffer in unit.buffers:
                if buffer.full is not None and buffer.full is not buffer.shard:
                    buffer.shard.copy_(buffer.own(buffer.full))
            self._release(unit)

    def _issue_unshard(self, unit: Unit) -> None:
        self._gather(unit, self._memory_for(unit))

    def _unshard_together(self, unit: Unit) -> None:
        """Gather a unit where no vote follows that could tell of a rank without memory for it. Collective."""
        wholes: list[Tensor] = []
        problem: Exception | None = None
        try:
            wholes = self._memory_for(unit)
        except Exception as error:
            problem = error
        raise_together(self.comm, problem, f"could not gather {unit.name}")
        self._gather(unit, wholes)

    def _memory_for(self, unit: Unit) -> list[Tensor]:
        """Return whole buffers with the own shards in place. Before ``_gather``, so that all of them go out or none."""
        wholes = []
        for buffer in unit.buffers:
            full = buffer.shard if buffer.shard.numel() == buffer.padded_numel else buffer.full
            if full is None:
                full = torch.empty(buffer.padded_numel, dtype=buffer.dtype, device=buffer.shard.device)
                buffer.own(full).copy_(buffer.shard)
            wholes.append(full)
        return wholes

    def _gather(self, unit: Unit, wholes: Sequence[Tensor]) -> None:
        works = self._gathers.setdefault(unit, [])
        for buffer, full in zip(unit.buffers, wholes, strict=True):
            buffer.full = full
            with self._communicating():
                works.append(self.comm.all_gather(full, buffer.offsets, name=f"parameters of {unit.name}"))
        self._claims[unit] += 1

    def _wait(self, unit: Unit) -> None:
        works = self._gathers.pop(unit, None)
        if works is None:
            return
        for work in works:
            self._wait_for(work)
        for buffer in unit.buffers:
            assert buffer.full is not None
            buffer.bind(buffer.full)
            if buffer.padded_numel:
                self._buffer_at[buffer.full.data_ptr()] = (unit, buffer)

    def _release(self, unit: Unit) -> None:
        """Use up one claim; reshard the unit with the last."""
        if self._claims[unit] == 0:
            return
        self._claims[unit] -= 1
        if self._claims[unit] == 0:
            self._wait(unit)
            self._held.discard(unit)
            self._ahead.discard(unit)
            for buffer in unit.buffers:
                if buffer.full is not None:
                    self._buffer_at.pop(buffer.full.data_ptr(), None)
                buffer.unbind()

    def _release_everything(self) -> None:
        for unit in self.units:
            self._claims[unit] = min(self._claims[unit], 1)
            self._release(unit)
            self._depth[unit] = 0
        self._open.clear()

    # The order.

    def _need(self, unit: Unit) -> None:
        """Return when the unit is whole; issue what the order has up to it."""
        if self._claims[unit] == 0:
            if self._phase is Phase.OUTSIDE:
                raise ModelError(
                    f"{unit.name} was used outside Engine.step and Engine.evaluate while its parameters are sharded; "
                    "call the model inside `with engine.unsharded():`"
                )
            self._advance_to(unit)
        self._ahead.discard(unit)
        self._used.add(unit)
        self._wait(unit)
        if self._phase is Phase.BACKWARD and unit not in self._always:
            self._close_frozen(before=unit)
        self._run_ahead()

    def _advance_to(self, unit: Unit) -> None:
        if self._recorded is not None:
            self.comm.broadcast_object(("unshard", unit.index), self.comm.rank)
            self._recorded.append(Op("unshard", unit.index, in_backward=self._phase is Phase.BACKWARD))
            self._unshard_together(unit)
            return
        order = self._orders[self._training]
        places = range(self._position, len(order))
        place = next((p for p in places if order[p].kind == "unshard" and order[p].unit == unit.index), None)
        if place is None:
            raise ScheduleError(
                f"rank {self.comm.rank}: {unit.name} ran once more, or later, than in the order that the ranks agreed "
                "on for this micro-step. Its control flow differs between ranks or batches; at stage 3 leave it out of "
                "units= (the root stays whole), or use stage 2"
            )
        while self._position <= place:
            self._issue_next()
        self._ahead.clear()  # what was ahead has been skipped

    def _run_ahead(self) -> None:
        """Issue what may go now: reductions of complete units, and the next gather."""
        if self._recorded is not None or self._phase is Phase.OUTSIDE:
            return
        order = self._orders[self._training]
        while self._position < len(order):
            op = order[self._position]
            if op.kind == "reduce":
                if self.units[op.unit] not in self._ready:
                    return
            elif len(self._ahead) >= PREFETCHED_UNITS:
                return
            self._issue_next()

    def _issue_next(self) -> None:
        op = self._orders[self._training][self._position]
        unit = self.units[op.unit]
        if op.kind == "reduce":
            self._launch(unit)
            self._ready.discard(unit)
        else:
            self._issue_unshard(unit)
            self._ahead.add(unit)
            if op.until_backward:
                self._held.add(unit)
        self._position += 1  # last: what memory ran out for is still to be issued

    def _launch_rest(self) -> None:
        """Issue the rest of the order as an idle rank does: gather and free, reduce what there is."""
        order = self._orders.get(self._training, [])
        while self._position < len(order):
            op = order[self._position]
            self._issue_next()
            if op.kind == "unshard" and self._claims[self.units[op.unit]] == 1:
                self._release(self.units[op.unit])
        self._release_everything()
        self._phase = Phase.OUTSIDE

    # One micro-step.

    def begin_forward(self, training: bool) -> None:
        self.collector.begin_forward()
        self._phase = Phase.FORWARD
        self._training = training
        self._position = 0
        self._ready.clear()
        self._used.clear()
        for unit in self.units:
            if unit in self._always:
                self._need(unit)

    def end_forward(self) -> None:
        self._launch_rest()

    def begin_backward(self, is_last: bool) -> None:
        self.collector.begin_backward()
        self._phase = Phase.BACKWARD
        for unit in self.units:
            if unit not in self._used and unit not in self._ahead:
                self._release(unit)  # gathered for the sake of others

    def idle_micro_step(self, is_last: bool, training: bool = True) -> None:
        self._training = training
        self._position = 0
        self.collector.begin_backward()
        self._launch_rest()

    def abandon(self) -> None:
        self._release_everything()  # whatever failed, perhaps for want of memory, needs no parameters any more
        self._launch_rest()

    def _on_complete(self, unit: Unit) -> None:
        self.device.pace()
        self._ready.add(unit)
        self._completed.add(unit)
        if self._recorded is not None:
            self._recorded.append(Op("reduce", unit.index))
            self.collector.restart(unit)
        if unit not in self._always and not unit.has_frozen:
            self._release(unit)
        self._run_ahead()

    def _close_frozen(self, before: Unit) -> None:
        """Release units whose completion does not show, once backward has moved on to another unit."""
        for unit in [u for u in self._open if u is not before and (u in self._completed or not u.trainable_buffers)]:
            self._open.remove(unit)
            self._release(unit)
        if before.has_frozen and before not in self._open:
            self._open.append(before)
            self._completed.discard(before)

    def agree_on_order(self) -> None:
        """Nothing to do: the recorded order has the reductions in it."""

    # Recording: see [Note: recording the order].

    def needs_recording(self, training: bool) -> bool:
        return training not in self._orders

    def forget_orders(self) -> None:
        """Record anew before the next micro-step."""
        self._orders.clear()

    def record(self, training: bool, leader: int, compute: Callable[[], None]) -> None:
        """Make the order of a micro-step, by ``compute`` (forward, and backward if training) on ``leader``.

        Raises:
            the leader's own exception on the leader, StepError on the others.
        Collective.
        """
        message: tuple[list[int], list[Op]] | str
        if self.comm.rank == leader:
            message = self._lead(training, compute)
        else:
            message = self._follow(leader)
        if isinstance(message, str):
            raise StepError(f"rank {leader} failed in its first micro-step: {message}")
        always, ops = message
        if {self.units[index] for index in always} != self._always_agreed:
            self._orders.clear()
        self._always = self._always_agreed = {self.units[index] for index in always}
        self._orders[training] = complete_order(
            ops,
            always=always,
            all_units=[unit.index for unit in self.units],
            trainable=[unit.index for unit in self._trainable],
            training=training,
        )

    def _lead(self, training: bool, compute: Callable[[], None]) -> tuple[list[int], list[Op]]:
        self._recorded = []
        self.collector.discard = True
        buffers: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        try:
            # In here, since memory may run out, and the others are waiting to be told.
            buffers += [
                (module._buffers, name, buffer, buffer.clone())
                for module in self.model.modules()
                for name, buffer in module._buffers.items()
                if buffer is not None
            ]
            with preserved_random_state(), _ParameterReads(self._read):
                compute()
            message: Any = (sorted(unit.index for unit in self._always), self._recorded)
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
            self._always = self._always_agreed
            raise
        finally:
            with torch.no_grad():
                for owner, name, buffer, before in buffers:
                    buffer.copy_(before)
                    owner[name] = buffer  # forward may have put another one in its place
            self._recorded = None
            self.collector.discard = False
            self._release_everything()
            self._phase = Phase.OUTSIDE
            self.comm.broadcast_object(("end", message), self.comm.rank)
        return message

    def _follow(self, leader: int) -> tuple[list[int], list[Op]] | str:
        problem: Exception | None = None
        while True:
            kind, value = self.comm.broadcast_object(None, leader)
            if kind == "end":
                if problem is not None:
                    raise problem
                return value
            try:
                self._unshard_together(self.units[value])
                self._release(self.units[value])
            except Exception as error:  # the leader has been told, and is about to end
                problem = error

    def _read(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            unit = self._unit_of.get(tensor) if isinstance(tensor, nn.Parameter) else None
            if unit is not None and self._claims[unit] == 0 and self._phase is not Phase.OUTSIDE:
                self._always = self._always | {unit}
                self._need(unit)

    # Hooks.

    def _register_hooks(self) -> Iterator[Any]:
        units_of: dict[nn.Module, list[Unit]] = {}
        for unit in self.units:
            if not unit.is_root:
                for module in unit.modules:
                    units_of.setdefault(module, []).append(unit)
        for module, units in units_of.items():
            # In a compiled block these are to run as they are: a graph knows nothing of collectives and resharding.
            yield module.register_forward_pre_hook(torch.compiler.disable(self._make_enter(units)))
            yield module.register_forward_hook(torch.compiler.disable(self._make_exit(units)))

    def _make_enter(self, units: Sequence[Unit]) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            for unit in units:
                self._depth[unit] += 1
                self._need(unit)

        return enter

    def _make_exit(self, units: Sequence[Unit]) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            for unit in units:
                self._depth[unit] -= 1
                in_use = self._depth[unit] > 0 or unit in self._held or unit in self._always
                if self._phase is Phase.FORWARD and not in_use:
                    self._release(unit)

        return leave

    def saving(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for forward in which autograd saves handles of parameters: see the note above."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            return tensor
        found = self._buffer_at.get(tensor.untyped_storage().data_ptr()) if tensor.layout == torch.strided else None
        if found is None or tensor.dtype != found[1].dtype:
            return tensor
        return (*found, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        unit, buffer, shape, stride, offset = saved
        self._need(unit)
        assert buffer.full is not None
        return buffer.full.as_strided(shape, stride, offset)

    def close(self) -> None:
        super().close()
        for hook in self._hooks:
            hook.remove()


# Reading these of a resharded parameter is harmless: they are about the tensor, not of it.
_ABOUT = {"size", "numel", "dim", "ndimension", "stride", "is_floating_point", "is_complex", "element_size", "type"}
_VIEW_PROPERTIES = {torch.Tensor.T, torch.Tensor.mT, torch.Tensor.H, torch.Tensor.mH, torch.Tensor.data}


class _ParameterReads(TorchFunctionMode):
    """Tells of the tensors that torch functions are about to read."""

    def __init__(self, read: Callable[[Iterable[Any]], None]):
        super().__init__()
        self._read = read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        is_property = name in ("__get__", "__set__", "__delete__")
        is_view = name == "__get__" and getattr(func, "__self__", None) in _VIEW_PROPERTIES
        if name not in _ABOUT and (not is_property or is_view):
            self._read(args)
            for argument in args:
                if isinstance(argument, (list, tuple)):
                    self._read(argument)
            self._read((kwargs or {}).values())
        return func(*args, **(kwargs or {}))

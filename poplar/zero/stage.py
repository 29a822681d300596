"""What all ZeRO stages share: gradients reduced unit by unit, in one order, while backward goes on.

    engine                             stage
    for each micro-batch:
      begin_forward()
      loss = ...
      begin_backward(is_last)
      loss.backward()                  collects gradients, launches reductions of complete units
      end_backward()                   launches the rest
      (or idle_micro_step(is_last), or abandon() after an exception)
    finish_reductions()                every reduction is in ``buffer.grad``
    (clip, optimizer.step())
    publish()                          updated shards reach the other ranks
    clear_gradients()

Stages 0 and 1 reduce once a step, in the backward of each rank's last micro-batch. Stages 2 and 3 reduce in every
micro-step. A stage differs from this base in what one reduction is (``_reduce``), where its result goes (``_merge``),
and how updated parameters reach the other ranks (``publish``); stage 3 gathers parameters as well.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from poplar.device import Device
from poplar.zero.comm import Communicator, Work
from poplar.zero.flat import FlatBuffer
from poplar.zero.gradients import GradientCollector
from poplar.zero.units import Unit


class Stage:
    """Base of the four stages.

    Attributes:
        reduces_every_micro_step: whether all ranks must run the same number of micro-steps.
    """

    number: int
    reduces_every_micro_step = False
    max_in_flight: int | None = None  # reductions that may be under way at once; None: any number

    def __init__(self, model: nn.Module, units: Sequence[Unit], comm: Communicator, device: Device):
        self.model = model
        self.units = list(units)
        self.comm = comm
        self.device = device
        self.collector = GradientCollector(self.units, self._on_complete)
        self._trainable = [unit for unit in self.units if unit.trainable_buffers]
        # Backward meets units in about the reverse of their definition, until the ranks have agreed on what they saw.
        self._order = self._trainable[::-1]
        self._order_agreed = False
        self._observed: list[Unit] = []
        self._ready: set[Unit] = set()
        self._launched = 0
        self._reducing = False
        self._to_launch: deque[tuple[FlatBuffer, Tensor]] = deque()
        self._in_flight: deque[tuple[Work, FlatBuffer, Tensor]] = deque()
        self.wait_s = 0.0  # seconds this process has spent in collectives, waiting and copying
        self._pacing = list(self._pace_forward()) if device.is_emulated else []

    # What differs by stage.

    def adopt(self, buffer: FlatBuffer, full: Tensor) -> None:
        """Take over a buffer's whole parameters ``full``, the same on every rank, in the form that this stage keeps."""
        buffer.bind(full)
        buffer.shard = full[buffer.update_start : buffer.update_stop]

    def _reduce(self, buffer: FlatBuffer, full: Tensor) -> Work:
        return self.comm.reduce_scatter(full, buffer.offsets, name=f"gradients of {buffer.pieces[0].names[0]}...")

    def _merge(self, buffer: FlatBuffer, full: Tensor) -> None:
        raise NotImplementedError

    def publish(self) -> None:
        """Bring the updated shards to the ranks that need them. Collective at stages 1 and 2."""
        works = []
        for unit, buffer in self.trainable_buffers():
            assert buffer.full is not None
            with self._communicating():
                works.append(self.comm.all_gather(buffer.full, buffer.offsets, name=f"parameters of {unit.name}"))
        for work in works:
            self._wait_for(work)

    def trainable_buffers(self) -> Iterator[tuple[Unit, FlatBuffer]]:
        """Yield the buffers that get gradients, with their units, in definition order."""
        for unit in self._trainable:
            for buffer in unit.trainable_buffers:
                yield unit, buffer

    # Parameters: whole at all times, except at stage 3.

    def begin_forward(self, training: bool) -> None:
        """Prepare for a forward (and, if training, its backward)."""
        self.collector.begin_forward()
        self._ready.clear()
        self._launched = 0

    def end_forward(self) -> None:
        """Close a forward that has no backward."""

    def saving(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for the forward of a training micro-step."""
        return contextlib.nullcontext()

    def needs_recording(self, training: bool) -> bool:
        """Return whether ``record`` must be called before the next micro-step (stage 3)."""
        return False

    def record(self, training: bool, leader: int, compute: Callable[[], None]) -> None:
        """Agree on the order of a micro-step's collectives (stage 3). Collective."""

    def forget_orders(self) -> None:
        """Agree anew before the next micro-step."""

    def unshard_all(self) -> None:
        """Make all parameters whole on every rank. Collective at stage 3."""

    def reshard_all(self) -> None:
        """Undo ``unshard_all``; what was written into the own shard stays."""

    # One step.

    def begin_backward(self, is_last: bool) -> None:
        """Begin a backward; ``is_last``: it is this rank's last of the step."""
        self._reducing = self.reduces_every_micro_step or is_last
        self._observed = []
        self.collector.begin_backward()

    def end_backward(self) -> None:
        """Launch the reductions that backward has not launched itself."""
        self.collector.end_backward()
        self._launch_rest()

    def idle_micro_step(self, is_last: bool, training: bool = True) -> None:
        """Take part in a micro-step's collectives without computing."""
        if training:
            self.begin_forward(training)
            self.begin_backward(is_last)
            self._launch_rest()

    def abandon(self) -> None:
        """Complete the collectives of a micro-step that an exception has ended on this rank; no other follows it."""
        self._reducing = True
        self._launch_rest()

    def finish_reductions(self) -> None:
        """Wait until every launched reduction is in ``buffer.grad``."""
        while self._in_flight:
            self._finish_oldest()

    def late_units(self) -> list[int]:
        """Return the units that still hold gradients: see [Note: late gradients]."""
        return [unit.index for unit in self._trainable if self.collector.has_gradients(unit)]

    def reduce_late(self, indices: Sequence[int]) -> None:
        """Reduce the units that are late on some rank. Collective, with the same ``indices`` everywhere."""
        for index in indices:
            self._launch(self.units[index])
        self.finish_reductions()

    def clear_gradients(self) -> None:
        """Drop all gradients, of shards and on their way."""
        self.collector.clear()
        self._to_launch.clear()
        for _, buffer in self.trainable_buffers():
            buffer.grad = None

    def agree_on_order(self) -> None:
        """Reduce from now on in the order that the lowest rank with samples has seen. Collective; does it once."""
        if self._order_agreed:
            return
        seen = self.comm.gather_objects([unit.index for unit in self._observed])
        first = next((order for order in seen if order), None)
        if first is not None:
            order = [self.units[index] for index in first]
            self._order = order + [unit for unit in self._order if unit not in order]
            self._order_agreed = True

    def close(self) -> None:
        """Remove all hooks."""
        self.collector.close()
        for handle in self._pacing:
            handle.remove()

    def _pace_forward(self) -> Iterator[Any]:
        """Let an emulated card take its time unit by unit, as a real one would."""
        for unit in self.units:
            if unit.modules:
                yield unit.modules[0].register_forward_hook(lambda *_: self.device.pace())

    # Reductions.

    def _on_complete(self, unit: Unit) -> None:
        self.device.pace()
        if unit not in self._observed:
            self._observed.append(unit)
        if self._reducing:
            self._ready.add(unit)
            while self._launched < len(self._order) and self._order[self._launched] in self._ready:
                self._launch_next()

    def _launch_rest(self) -> None:
        while self._reducing and self._launched < len(self._order):
            self._launch_next()

    def _launch_next(self) -> None:
        self._launch(self._order[self._launched])
        self._launched += 1

    def _launch(self, unit: Unit) -> None:
        """Launch the unit's reductions.

        Where memory runs out on the way, the next call goes on at the buffer that this one has come to: one collective
        too few would shift all that follow.
        """
        if not self._to_launch:
            self._to_launch.extend(self.collector.take(unit))
        while self._to_launch:
            while self.max_in_flight is not None and len(self._in_flight) >= self.max_in_flight:
                self._finish_oldest()
            buffer, full = self._to_launch[0]
            with self._communicating():
                self._in_flight.append((self._reduce(buffer, full), buffer, full))
            self._to_launch.popleft()

    def _finish_oldest(self) -> None:
        work, buffer, full = self._in_flight.popleft()
        self._wait_for(work)
        self._merge(buffer, full)

    def _wait_for(self, work: Work) -> None:
        with self._communicating():
            work.wait()

    @contextlib.contextmanager
    def _communicating(self) -> Iterator[None]:
        """Count what is done inside as waiting, not as compute: even to issue a collective may take copies."""
        self.device.pace()
        began = time.perf_counter()
        yield
        self.wait_s += time.perf_counter() - began
        self.device.mark()

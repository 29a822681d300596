"""Gradients on their way from autograd to the flat buffers, and from there to the ranks that own them.

    autograd -> p.grad -> whole flat gradient of the unit -> (complete) -> reduced over ranks -> gradient of the shard

[Note: late gradients]
A unit counts as complete when the parameters that got a gradient last time have got one. That is a guess about time,
never about right and wrong: units are reduced in one order that all ranks share, whatever the guess, and a gradient
that arrives after its unit was reduced (reentrant checkpointing of shared weights, a branch taken for the first time)
opens a new whole buffer, which goes with the unit's next reduction. What is still there after the last micro-step is
found by the vote at the end of the step and reduced then, by all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from poplar.errors import ModelError
from poplar.zero.flat import FlatBuffer, Piece
from poplar.zero.units import Unit


class _WholeGradient:
    """The whole flat gradient of one buffer while backward fills it."""

    def __init__(self, buffer: FlatBuffer):
        self.buffer = buffer
        self.full: Tensor | None = None
        self.spare: Tensor | None = None  # memory of the last reduction, kept at stages 0 and 1
        self.written: set[Piece] = set()  # has a value in ``full``
        self.arrived: set[Piece] = set()  # came in this backward, since the last take
        self.seen: set[Piece] = set()  # came in this backward
        self.expected: set[Piece] = set(buffer.pieces)
        # Expected and not arrived; counted, since a hook has no time to compare sets.
        self.num_missing = len(buffer.pieces)

    def arrive(self, piece: Piece) -> None:
        """Note that the piece's gradient has come."""
        if piece not in self.arrived:
            self.arrived.add(piece)
            self.seen.add(piece)
            self.num_missing -= piece in self.expected

    def restart(self) -> None:
        """Wait for all expected pieces again."""
        self.arrived = set()
        self.num_missing = len(self.expected)

    def add(self, piece: Piece, grad: Tensor) -> None:
        if self.full is None:
            self.full = self._memory()
        view = piece.view_of(self.full)
        if piece in self.written:
            view.add_(grad)
        else:
            view.copy_(grad)
            self.written.add(piece)

    def take(self) -> Tensor:
        """Return the whole gradient, zero where nothing was written, and begin anew."""
        full = self.full
        if full is None:
            full = self._memory().zero_()
        else:
            for piece in self.buffer.pieces:
                if piece not in self.written:
                    full[piece.start : piece.stop].zero_()
            self.buffer.zero_padding(full)
        self.full, self.written = None, set()
        self.restart()
        return full

    def clear(self) -> None:
        self.full, self.written, self.seen = None, set(), set()
        self.restart()

    def _memory(self) -> Tensor:
        memory, self.spare = self.spare, None
        if memory is None:
            buffer = self.buffer
            memory = torch.empty(buffer.padded_numel, dtype=buffer.reduce_dtype, device=buffer.shard.device)
        return memory


class GradientCollector:
    """Moves each parameter's gradient into its unit's whole flat gradient as soon as autograd has made it.

    ``on_complete(unit)`` is called when a unit has all the gradients it is expected to get.
    """

    def __init__(self, units: Sequence[Unit], on_complete: Callable[[Unit], None]):
        self._on_complete = on_complete
        self._wholes = {unit: [_WholeGradient(buffer) for buffer in unit.trainable_buffers] for unit in units}
        self._handles = []
        self.discard = False  # True while a micro-step is run for its order alone
        self._in_backward = False
        for unit, wholes in self._wholes.items():
            for whole in wholes:
                for piece in whole.buffer.pieces:
                    hook = self._make_hook(unit, whole, piece)
                    self._handles.append(piece.param.register_post_accumulate_grad_hook(hook))

    def _make_hook(self, unit: Unit, whole: _WholeGradient, piece: Piece) -> Callable[[Tensor], None]:
        def collect(param: Tensor) -> None:
            grad, param.grad = param.grad, None
            assert grad is not None
            if grad.layout != torch.strided:
                raise ModelError(f"{piece.names[0]} has a sparse gradient; build its module with sparse=False")
            if not self._in_backward:  # it would count unweighted, and unscaled
                raise ModelError(
                    f"{piece.names[0]} got a gradient outside of the backward that Engine.step runs; do not call "
                    "backward() in or beside the loss function: return the sum of all losses, or use "
                    "torch.autograd.grad"
                )
            if not self.discard:
                whole.add(piece, grad)
            whole.arrive(piece)
            if self.is_complete(unit):
                self._on_complete(unit)

        return collect

    def is_complete(self, unit: Unit) -> bool:
        return all(whole.num_missing == 0 for whole in self._wholes[unit])

    def has_gradients(self, unit: Unit) -> bool:
        """Return whether the unit holds gradients that have not been taken yet."""
        return any(whole.written for whole in self._wholes[unit])

    def take(self, unit: Unit) -> list[tuple[FlatBuffer, Tensor]]:
        """Return the unit's whole gradients, and begin anew."""
        return [(whole.buffer, whole.take()) for whole in self._wholes[unit]]

    def keep(self, buffer: FlatBuffer, full: Tensor) -> None:
        """Use the memory ``full`` for the buffer's next whole gradient."""
        for whole in self._all():
            if whole.buffer is buffer:
                whole.spare = full

    def begin_forward(self) -> None:
        """Accept no gradient until backward begins."""
        self._in_backward = False

    def begin_backward(self) -> None:
        """Forget which gradients earlier backwards have brought (the gradients stay)."""
        self._in_backward = True
        for whole in self._all():
            whole.seen = set()
            whole.restart()

    def restart(self, unit: Unit) -> None:
        """Let the unit be incomplete again, as ``take`` does."""
        for whole in self._wholes[unit]:
            whole.restart()

    def end_backward(self) -> None:
        """Expect next time what this backward has brought."""
        self._in_backward = False
        for whole in self._all():
            if whole.seen:
                whole.expected = whole.seen

    def clear(self) -> None:
        """Drop all gradients, and accept none until the next backward."""
        self._in_backward = False
        for whole in self._all():
            whole.clear()

    def _all(self) -> Iterator[_WholeGradient]:
        for wholes in self._wholes.values():
            yield from wholes

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

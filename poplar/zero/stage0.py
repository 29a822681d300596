"""ZeRO stage 0: plain data parallelism; every rank holds everything.

Memory:  parameters P, gradients P, optimizer state (Adam) 2P on every rank.
Traffic: one all-reduce of the gradients a step: 2P (N - 1) / N sent by each rank.
A step:  accumulate locally over micro-batches; in the last backward, all-reduce each unit as soon as it is complete;
         every rank then takes the same optimizer step on the same numbers.
Source:  Li et al., PyTorch Distributed (arXiv:2006.15704): buckets that overlap with backward.
"""

from __future__ import annotations

from torch import Tensor

from poplar.zero.comm import Work
from poplar.zero.flat import FlatBuffer
from poplar.zero.stage import Stage


class Stage0(Stage):
    number = 0

    def adopt(self, buffer: FlatBuffer, full: Tensor) -> None:
        buffer.replicated = True
        super().adopt(buffer, full)

    def _reduce(self, buffer: FlatBuffer, full: Tensor) -> Work:
        return self.comm.all_reduce(full, name=f"gradients of {buffer.pieces[0].names[0]}...")

    def _merge(self, buffer: FlatBuffer, full: Tensor) -> None:
        if buffer.grad is None:
            buffer.grad = full
        else:
            buffer.grad.add_(full)

    def clear_gradients(self) -> None:
        # The memory serves the next step, which overwrites it.
        for _, buffer in self.trainable_buffers():
            if buffer.grad is not None:
                self.collector.keep(buffer, buffer.grad)
        super().clear_gradients()

    def publish(self) -> None:
        """Nothing to do: every rank has updated everything."""

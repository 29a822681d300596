"""ZeRO stage 1: the optimizer state is sharded.

Memory:  parameters P and gradients P on every rank, optimizer state (Adam) 2P / N.
Traffic: reduce-scatter of gradients and all-gather of parameters once a step: 2P (N - 1) / N sent by each rank.
A step:  accumulate locally over micro-batches; in the last backward, reduce each complete unit to the ranks that own
         its shards; step the optimizer on the own shard; gather the updated parameters.
Source:  ZeRO, arXiv:1910.02054, section 5.1 (P_os).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from poplar.device import Device
from poplar.zero.comm import Communicator
from poplar.zero.flat import FlatBuffer
from poplar.zero.stage import Stage
from poplar.zero.units import Unit


class Stage1(Stage):
    number = 1

    def __init__(self, model: nn.Module, units: Sequence[Unit], comm: Communicator, device: Device):
        super().__init__(model, units, comm, device)
        self._reduced: dict[FlatBuffer, Tensor] = {}

    def _merge(self, buffer: FlatBuffer, full: Tensor) -> None:
        if buffer.grad is None:
            buffer.grad = buffer.own(full)
            self._reduced[buffer] = full
        else:
            buffer.grad.add_(buffer.own(full))

    def clear_gradients(self) -> None:
        # The whole buffers serve the next step, which overwrites them.
        for buffer, full in self._reduced.items():
            self.collector.keep(buffer, full)
        self._reduced.clear()
        super().clear_gradients()

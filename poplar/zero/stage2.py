"""ZeRO stage 2: optimizer state and gradients are sharded.

Memory:  parameters P on every rank, gradients P / N and optimizer state (Adam) 2P / N; during backward, the whole
         gradients of the unit being filled and of the one being reduced.
Traffic: reduce-scatter of gradients in every micro-step, all-gather of parameters once a step.
A step:  in every backward, reduce each complete unit to the ranks that own its shards, add the own slice to the shard's
         gradient and free the rest; step the optimizer on the own shard; gather the updated parameters.
Source:  ZeRO, arXiv:1910.02054, section 5.2 (P_os+g).
"""

from __future__ import annotations

from torch import Tensor

from poplar.zero.flat import FlatBuffer
from poplar.zero.stage import Stage


class Stage2(Stage):
    number = 2
    reduces_every_micro_step = True
    max_in_flight = 1

    def _merge(self, buffer: FlatBuffer, full: Tensor) -> None:
        if buffer.grad is None:
            own = buffer.own(full)
            # A copy lets go of the other ranks' parts; a rank that owns everything has none to let go of.
            buffer.grad = own if own.numel() == full.numel() else own.clone()
        else:
            buffer.grad.add_(buffer.own(full))

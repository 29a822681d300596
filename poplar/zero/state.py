"""Whole parameters and whole optimizer state, by name, gathered from the shards.

The same table of (names, start, stop, group) that cut them puts them together; padding and gaps are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from poplar.zero.comm import Communicator
from poplar.zero.flat import FlatBuffer, Piece
from poplar.zero.optimizer import OptimizerBinding, ParamState, ShardParam, is_elementwise_state
from poplar.zero.stage import Stage


def whole_params(stage: Stage) -> Iterator[tuple[Piece, Tensor]]:
    """Yield every parameter, whole, on the CPU, in the dtype that the optimizer sees. Collective."""
    for unit in stage.units:
        for buffer in unit.buffers:
            whole = _gather(stage.comm, buffer, [(buffer.update_start, buffer.master)], buffer.master_dtype)
            for piece in buffer.pieces:
                yield piece, _cut_out(piece, whole)


def whole_optimizer_state(stage: Stage, binding: OptimizerBinding) -> Iterator[tuple[Piece, ParamState]]:
    """Yield the optimizer's state of every parameter that has one, whole, on the CPU. Collective."""
    local: dict[FlatBuffer, list[tuple[ShardParam, ParamState]]] = {}
    for shard_param, state in binding.local_states():
        local.setdefault(shard_param.buffer, []).append((shard_param, state))
    for unit in stage.units:
        for buffer in unit.trainable_buffers:
            yield from _buffer_state(stage.comm, buffer, local.get(buffer, []))


def _buffer_state(
    comm: Communicator, buffer: FlatBuffer, parts: list[tuple[ShardParam, ParamState]]
) -> Iterator[tuple[Piece, ParamState]]:
    # Ranks with an empty shard hold no state, so all learn from those that do which entries there are.
    described = [
        entry
        for rows in comm.gather_objects([_describe(part, state) for part, state in parts]) or []
        for entry in rows or []
    ]
    dtypes: dict[str, torch.dtype] = {}
    for _, _, entries in described:
        dtypes.update({key: value for key, (elementwise, value) in entries.items() if elementwise})
    wholes: dict[str, Tensor] = {}
    for key, dtype in sorted(dtypes.items()):
        pieces = [(part.slice.start, state[key]) for part, state in parts if key in state]
        wholes[key] = _gather(comm, buffer, pieces, dtype)
    for piece in buffer.pieces:
        entries = next((e for start, stop, e in described if e and start <= piece.start < max(stop, start + 1)), None)
        if entries is None:
            entries = next((e for start, stop, e in described if e and start < piece.stop and stop > piece.start), None)
        if entries is not None:
            yield (
                piece,
                {
                    key: _cut_out(piece, wholes[key]) if elementwise else value
                    for key, (elementwise, value) in entries.items()
                },
            )


def _describe(part: ShardParam, state: ParamState) -> tuple[int, int, dict[str, tuple[bool, Any]]]:
    entries: dict[str, tuple[bool, Any]] = {}
    for key, value in state.items():
        if is_elementwise_state(key, value, part.param.shape):
            entries[key] = (True, value.dtype)
        else:
            entries[key] = (False, value.detach().cpu().clone() if isinstance(value, Tensor) else value)
    return part.slice.start, part.slice.stop, entries


def _gather(comm: Communicator, buffer: FlatBuffer, parts: list[tuple[int, Tensor]], dtype: torch.dtype) -> Tensor:
    whole = torch.zeros(buffer.padded_numel, dtype=dtype, device=buffer.shard.device)
    with torch.no_grad():
        for start, values in parts:
            whole[start : start + values.numel()].copy_(values)
    if not buffer.replicated:
        comm.all_gather(whole, buffer.offsets, name=f"state of {buffer.pieces[0].names[0]}...").wait()
    return whole


def _cut_out(piece: Piece, whole: Tensor) -> Tensor:
    # A copy, so that one parameter does not keep the whole buffer alive, in the plain memory layout.
    return torch.empty(piece.shape, dtype=whole.dtype, device="cpu").copy_(piece.view_of(whole))

"""Whole parameters and whole optimizer state, by name: gathered from the shards, and cut into them again.

The same table of (names, start, stop, group) serves both ways; padding and gaps are not in it. One flat buffer is whole
at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from poplar.zero.comm import Communicator
from poplar.zero.flat import FlatBuffer, Piece
from poplar.zero.optimizer import OptimizerBinding, ParamState, ShardParam, is_elementwise_state
from poplar.zero.stage import Stage


def whole_params(stage: Stage, *, wanted: bool = True) -> Iterator[tuple[Piece, Tensor]]:
    """Yield every parameter, whole, on the CPU, in the dtype that the optimizer sees.

    Args:
        wanted: False on ranks that only take part: nothing is copied and nothing yielded there.
    Collective.
    """
    for unit in stage.units:
        for buffer in unit.buffers:
            whole = _gather(stage.comm, buffer, [(buffer.update_start, buffer.master)], buffer.master_dtype)
            for piece in buffer.pieces if wanted else ():
                yield piece, _cut_out(piece, whole)


def whole_optimizer_state(
    stage: Stage, binding: OptimizerBinding, *, wanted: bool = True
) -> Iterator[tuple[Piece, ParamState]]:
    """Yield the optimizer's state of every parameter that has one, whole, on the CPU; ``wanted`` is as above.

    Collective.
    """
    local: dict[FlatBuffer, list[tuple[ShardParam, ParamState]]] = {}
    for shard_param, state in binding.local_states():
        local.setdefault(shard_param.buffer, []).append((shard_param, state))
    for unit in stage.units:
        for buffer in unit.buffers:
            yield from _buffer_state(stage.comm, buffer, local.get(buffer, []), wanted)


def overwrite_params(stage: Stage, read: Callable[[Piece, Tensor], None]) -> None:
    """Set every parameter, between steps, to values that rank 0 reads.

    Args:
        read: called on rank 0 alone, with a parameter's place and a tensor of its shape, on the device, to be filled.
    Collective: one broadcast a flat buffer.
    """
    for unit in stage.units:
        for buffer in unit.buffers:
            whole = torch.zeros(buffer.padded_numel, dtype=buffer.master_dtype, device=buffer.shard.device)
            if stage.comm.rank == 0:
                for piece in buffer.pieces:
                    read(piece, piece.view_of(whole))
            stage.comm.broadcast(whole, src=0, name=f"stored {buffer.pieces[0].names[0]}...")
            _overwrite(buffer, whole)


@torch.no_grad()
def _overwrite(buffer: FlatBuffer, whole: Tensor) -> None:
    if buffer.full is not None:
        buffer.full.copy_(whole)  # the shard is a view of it
    else:
        buffer.shard.copy_(buffer.own(whole))
    if buffer.master is not buffer.shard:
        buffer.master.copy_(whole[buffer.update_start : buffer.update_stop])


def overwrite_optimizer_state(
    stage: Stage,
    binding: OptimizerBinding,
    stored: Mapping[Piece, ParamState],
    read: Callable[[Piece, str, Tensor], None],
) -> None:
    """Replace all of the optimizer's state by one that rank 0 reads; the optimizer gets new tensors to update.

    Args:
        stored: each parameter's state by entry, the same on every rank: a ``torch.dtype`` stands for one value per
            element, to be read; anything else is the value itself. Empty: the parameter has no state.
        read: called on rank 0 alone, with place, entry, and a tensor of the parameter's shape to be filled.
    Collective: one broadcast an entry of each flat buffer.
    """
    binding.clear()
    for unit in stage.units:
        for buffer in unit.buffers:
            wholes: dict[tuple[str, torch.dtype], Tensor] = {}
            states: dict[nn.Parameter, ParamState] = {}
            for piece in buffer.pieces:
                state = states[piece.param] = {}
                for entry, value in stored[piece].items():
                    if not isinstance(value, torch.dtype):
                        state[entry] = value
                        continue
                    if (entry, value) not in wholes:
                        wholes[entry, value] = buffer.shard.new_zeros(buffer.padded_numel, dtype=value)
                    state[entry] = piece.view_of(wholes[entry, value])
                    if stage.comm.rank == 0:
                        read(piece, entry, state[entry])
            for (entry, _), whole in wholes.items():
                stage.comm.broadcast(whole, src=0, name=f"stored {entry} of {buffer.pieces[0].names[0]}...")
            binding.bind(buffer, states)


def _buffer_state(
    comm: Communicator, buffer: FlatBuffer, parts: list[tuple[ShardParam, ParamState]], wanted: bool
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
    for piece in buffer.pieces if wanted else ():
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

"""Save and load training at any ZeRO stage, world size, split and shard ratio.

    save: meet -> gather one flat buffer at a time -> rank 0 writes it -> manifest -> rename into place
    load: meet -> rank 0 checks everything -> broadcast one flat buffer at a time -> each rank keeps its part

A checkpoint holds whole tensors under the names that the user gave, so nothing in it knows of shards. Only rank 0
touches the file system, so none has to be shared; all ranks take part, since rank 0 alone cannot see their shards.

[Note: failing together]
What rank 0 does alone between two collectives (write, read) may fail while the others already wait in the next one. So
its first failure is kept, the remaining collectives are gone through, and all ranks raise at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

import poplar
from poplar.checkpointing.files import MAX_FILE_BYTES, RANDOM, TensorReader, read_manifest
from poplar.checkpointing.match import (
    check_optimizer,
    match_buffers,
    match_extra_states,
    match_params,
    modules_with_extra_state,
    persistent_buffers,
    pieces_of,
    stored_states,
    what_is_lost,
)
from poplar.checkpointing.values import decode, encode
from poplar.checkpointing.write import EXPORT_FILE_BYTES, CheckpointWriter, ExportWriter
from poplar.errors import CheckpointError, ConfigError, PoplarError
from poplar.rng import random_state, restore_random_state
from poplar.zero.comm import Communicator
from poplar.zero.flat import Piece
from poplar.zero.meeting import MEETING_TIMEOUT_S, meet
from poplar.zero.precision import PoplarWarning
from poplar.zero.state import overwrite_optimizer_state, overwrite_params, whole_optimizer_state, whole_params

if TYPE_CHECKING:
    from poplar.engine import Engine

# How an optimizer computes is this run's choice; everything else in its groups is the training's.
_OWN_SETTINGS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})


class _Attempt:
    """Does what one rank does alone, until the first failure: see [Note: failing together]."""

    def __init__(self) -> None:
        self.failure: Exception | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return the function's result; None after a failure."""
        if self.failure is None:
            try:
                return function(*args)
            except Exception as error:
                self.failure = error
        return None

    def raise_together(self, comm: Communicator, what: str) -> None:
        """Raise on every rank if one has failed: its own error there if that is Poplar's, CheckpointError elsewhere.

        Collective.
        """
        own = self.failure
        text = f"{type(own).__name__}: {own}" if own is not None else None
        failures = [(rank, text) for rank, text in enumerate(comm.gather_objects(text)) if text is not None]
        if isinstance(own, PoplarError):
            raise own
        if failures:
            rank, text = failures[0]
            raise CheckpointError(f"rank {rank} {what}: {text}") from own


def save_checkpoint(
    engine: Engine,
    path: str | os.PathLike[str],
    extra: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = MEETING_TIMEOUT_S,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write everything that going on with training needs into the folder ``path``, replacing a checkpoint there.

    Args:
        extra: what the caller wants back from ``load_checkpoint``, by name: ``loader.state_dict()``,
            ``scheduler.state_dict()``, numbers. The same on every rank, or None on all but rank 0.
        timeout_s: how long to wait for ranks that have not called this.
        max_file_bytes: size of a file, and so what rank 0 collects on the host.

    Raises:
        CommunicationError: some rank does not call this.
        CheckpointError: it cannot be written; an older checkpoint at ``path`` is then still there.
    Collective.
    """
    comm = engine.comm
    meet(comm, "Engine.save", timeout_s)
    _check_not_unsharded(engine)
    manifest, random_by_rank = _describe(engine, extra)
    attempt, is_writer = _Attempt(), comm.rank == 0
    writer = CheckpointWriter(path, max_file_bytes)
    if is_writer:
        attempt.run(writer.begin)
    for piece, whole in whole_params(engine._stage, wanted=is_writer):
        attempt.run(writer.add_param, piece, whole)
    for piece, state in whole_optimizer_state(engine._stage, engine._binding, wanted=is_writer):
        attempt.run(writer.add_state, piece, state)
    if is_writer:
        for names, buffer in persistent_buffers(engine.module):
            attempt.run(writer.add_buffer, names, buffer)
        attempt.run(writer.finish, manifest, random_by_rank)
        writer.discard()
    attempt.raise_together(comm, f"could not save to {os.fspath(path)}")


def _check_not_unsharded(engine: Engine) -> None:
    if engine._is_unsharded:
        raise ConfigError("save, load and export_model cannot run inside `with engine.unsharded():`; leave it first")


def _describe(engine: Engine, extra: Mapping[str, Any] | None) -> tuple[dict[str, Any], list[Any]]:
    """Return the manifest without its tensors, and the random state of each rank. Collective."""
    comm, attempt = engine.comm, _Attempt()
    own = attempt.run(_encode_extra, extra, comm.rank)
    groups = attempt.run(_encode_groups, engine.optimizer)
    extra_states = attempt.run(_encode_extra_states, engine.module)
    attempt.raise_together(comm, "could not save")
    digests = {name: _digest(value) for name, value in own.items()} if own is not None else None
    rows = comm.gather_objects((digests, encode(random_state(), "the random state")))
    for rank, (other, _) in enumerate(rows):
        if other is not None and other != rows[0][0]:
            names = sorted({*other, *(rows[0][0] or {})})
            name = next(name for name in names if other.get(name) != (rows[0][0] or {}).get(name))
            raise CheckpointError(
                f"extra[{name!r}] differs between rank 0 and rank {rank}; one value is stored for all, so give the "
                "same on every rank, or None on all but rank 0"
            )
    manifest = {
        "poplar_version": poplar.__version__,
        "torch_version": torch.__version__,
        "world_size": comm.world_size,
        "zero_stage": engine.zero_stage,
        "precision": engine.precision,
        "num_steps": engine.num_steps,
        "num_skipped": engine.num_skipped,
        "skipped_in_a_row": engine._skipped_in_a_row,
        "loss_scale": engine.loss_scale.state_dict() if engine.loss_scale.enabled else None,
        "optimizer": {"class": type(engine.optimizer).__name__, "groups": groups},
        "extra_states": extra_states,
        "extra": own,
    }
    return manifest, [state for _, state in rows]


def _encode_extra(extra: Mapping[str, Any] | None, rank: int) -> dict[str, Any] | None:
    if extra is None:
        return {} if rank == 0 else None
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise ConfigError(f"extra must be a dict with names as keys; got {type(extra).__name__}")
    return {name: encode(value, f"extra[{name!r}]") for name, value in extra.items()}


def _encode_extra_states(module: torch.nn.Module) -> dict[str, Any]:
    return {name: encode(part.get_extra_state(), name) for name, part in modules_with_extra_state(module).items()}


def _encode_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {
            name: encode(value, f"{name!r} of the optimizer's group {index}")
            for name, value in group.items()
            if name not in _OWN_SETTINGS
        }
        for index, group in enumerate(optimizer.param_groups)
    ]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def load_checkpoint(
    engine: Engine, path: str | os.PathLike[str], *, timeout_s: float = MEETING_TIMEOUT_S
) -> dict[str, Any]:
    """Put the engine into the state that ``save_checkpoint`` stored, and return the ``extra`` that was given there.

    Rank 0 alone reads ``path``. Call it last before the training loop: on as many ranks as then, random state goes on
    where it was; on another number of ranks it is derived from it anew, with a warning.

    Raises:
        CommunicationError: some rank does not call this.
        CheckpointError: the checkpoint is missing, damaged, or of another model or optimizer. The engine is as it was,
            unless the message says otherwise.
    Collective.
    """
    comm = engine.comm
    meet(comm, "Engine.load", timeout_s)
    _check_not_unsharded(engine)
    folder, attempt = Path(path), _Attempt()
    found = attempt.run(_open, engine, folder) if comm.rank == 0 else None
    attempt.raise_together(comm, f"could not load {folder}")
    manifest, random_by_rank = comm.broadcast_object(found, src=0)
    notes = _overwrite(engine, manifest, TensorReader(folder), attempt)
    attempt.raise_together(comm, f"could not go on reading {folder} (the engine is half loaded; load again)")
    notes += _restore_random(comm, random_by_rank)
    for note in notes:
        warnings.warn(f"{folder}: {note}", PoplarWarning, stacklevel=3)
    return decode(manifest["extra"])


def _open(engine: Engine, folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """Return the manifest and the random states, once all is known to be whole and to fit the engine."""
    manifest = read_manifest(folder)
    params = match_params(manifest["parameters"], engine._stage.units)
    match_buffers(manifest["buffers"], engine.module)
    match_extra_states(manifest["extra_states"], engine.module)
    check_optimizer(manifest["optimizer"], params, engine.optimizer)
    return manifest, json.loads((folder / RANDOM).read_text(encoding="utf-8"))


def _overwrite(engine: Engine, manifest: dict[str, Any], reader: TensorReader, attempt: _Attempt) -> list[str]:
    """Set everything but the random state; return what the user may want to know. Collective."""
    stage, comm = engine._stage, engine.comm
    params = match_params(manifest["parameters"], stage.units)
    states = stored_states(params, stage.units)
    settings = [decode(group) for group in manifest["optimizer"]["groups"]]
    notes = what_is_lost(params, stage.units)

    def read_param(piece: Piece, target: Tensor) -> None:
        attempt.run(reader.read_into, target, params[piece]["file"], params[piece]["names"][0])

    def read_state(piece: Piece, entry: str, target: Tensor) -> None:
        stored = params[piece]
        attempt.run(reader.read_into, target, stored["state"][entry]["file"], f"{stored['names'][0]}/{entry}")

    overwrite_params(stage, read_param)
    for buffer, entry in match_buffers(manifest["buffers"], engine.module):
        received = torch.empty(buffer.shape, dtype=buffer.dtype, device=buffer.device)
        if comm.rank == 0:
            attempt.run(reader.read_into, received, entry["file"], entry["names"][0])
        comm.broadcast(received, src=0, name=f"stored buffer {entry['names'][0]}")
        buffer.copy_(received)
    for name, module in match_extra_states(manifest["extra_states"], engine.module).items():
        module.set_extra_state(decode(manifest["extra_states"][name]))
    overwrite_optimizer_state(stage, engine._binding, states, read_state)
    for group, stored_settings in zip(engine.optimizer.param_groups, settings, strict=True):
        _overwrite_settings(group, stored_settings)
    engine.num_steps, engine.num_skipped = manifest["num_steps"], manifest["num_skipped"]
    engine._skipped_in_a_row = manifest["skipped_in_a_row"]
    if manifest["loss_scale"] is not None:
        engine.loss_scale.load_state_dict(manifest["loss_scale"])
    return notes


def _overwrite_settings(group: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        current = group.get(name)
        if isinstance(current, Tensor) and isinstance(value, (Tensor, int, float)):
            current.copy_(torch.as_tensor(value))  # a learning rate that others hold, too
        else:
            group[name] = value


def _restore_random(comm: Communicator, random_by_rank: list[Any]) -> list[str]:
    """Set this rank's random state; return a note if it had to be derived."""
    if len(random_by_rank) == comm.world_size:
        restore_random_state(_for_this_machine(decode(random_by_rank[comm.rank])))
        return []
    key = [int(_digest(random_by_rank[0]), 16), comm.world_size, comm.rank]
    words = numpy.random.SeedSequence(key).generate_state(3)
    random.seed(int(words[0]))
    numpy.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))
    return [
        f"it was saved on {len(random_by_rank)} ranks, this run has {comm.world_size}: every rank's random state was "
        "derived anew, so dropout and the like draw other numbers than they would have"
    ]


def _for_this_machine(state: dict[str, Any]) -> dict[str, Any]:
    """Leave out an accelerator's random state where there is none."""
    return state if torch.cuda.is_available() else {name: part for name, part in state.items() if name != "cuda"}


def export_model(
    engine: Engine,
    path: str | os.PathLike[str],
    *,
    timeout_s: float = MEETING_TIMEOUT_S,
    max_file_bytes: int = EXPORT_FILE_BYTES,
) -> None:
    """Write the model alone, for use without Poplar: parameters and buffers under their original names.

    Trained parameters are stored in the dtype that the optimizer sees (float32 with mixed precision), frozen ones in
    their own. A tied weight is stored under its first name; the others stand in the file's metadata, as
    ``safetensors.torch.save_model`` has it, and ``load_model`` puts them back.

    Args:
        path: a folder, which gets ``model.safetensors``, or above ``max_file_bytes`` several files and their index, as
            in the Hugging Face libraries; or a name that ends in ".safetensors": that file alone, whatever its size.

    Raises:
        CommunicationError: some rank does not call this.
        CheckpointError: it cannot be written.
    Collective.
    """
    comm = engine.comm
    meet(comm, "export_model", timeout_s)
    _check_not_unsharded(engine)
    buffers = persistent_buffers(engine.module)
    all_names = [piece.names for _, piece in pieces_of(engine.units)] + [names for names, _ in buffers]
    writer = ExportWriter(path, all_names, max_file_bytes)
    attempt, is_writer = _Attempt(), comm.rank == 0
    if is_writer:
        attempt.run(writer.begin)
    for piece, whole in whole_params(engine._stage, wanted=is_writer):
        attempt.run(writer.add, piece.names, whole)
    if is_writer:
        for names, buffer in buffers:
            attempt.run(writer.add_buffer, names, buffer)
        attempt.run(writer.finish)
        writer.discard()
    attempt.raise_together(comm, f"could not export to {os.fspath(path)}")

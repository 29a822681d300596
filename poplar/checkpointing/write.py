"""What rank 0 writes: a checkpoint, or the model alone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poplar.checkpointing.files import RANDOM, FolderInTheMaking, TensorWriter
from poplar.checkpointing.values import dtype_name, encode
from poplar.zero.flat import Piece
from poplar.zero.optimizer import ParamState, is_elementwise_state

EXPORT_FILE_BYTES = 5_000_000_000
"""Size at which an exported model is cut into several files, as in the Hugging Face libraries."""


class CheckpointWriter:
    """Writes a checkpoint tensor by tensor. Making one touches no file."""

    def __init__(self, path: str | os.PathLike[str], max_file_bytes: int):
        self._folder = FolderInTheMaking(path)
        self._model = TensorWriter(self._folder.partial, "model", max_file_bytes)
        self._optimizer = TensorWriter(self._folder.partial, "optimizer", max_file_bytes)
        self._params: dict[str, dict[str, Any]] = {}
        self._buffers: list[dict[str, Any]] = []

    def begin(self) -> None:
        self._folder.begin()

    def add_param(self, piece: Piece, whole: Tensor) -> None:
        self._model.add(piece.names[0], whole)
        self._params[piece.names[0]] = {**_facts(piece.names, whole), "group": piece.group, "state": None}

    def add_state(self, piece: Piece, state: ParamState) -> None:
        """Take the optimizer's state of a parameter that was added."""
        name = piece.names[0]
        stored = self._params[name]["state"] = {}
        for entry, value in state.items():
            if is_elementwise_state(entry, value, piece.shape):
                self._optimizer.add(f"{name}/{entry}", value)
                stored[entry] = {"dtype": dtype_name(value.dtype)}
            else:
                stored[entry] = {"value": encode(value, f"{entry!r} of the optimizer's state of {name}")}

    def add_buffer(self, names: tuple[str, ...], buffer: Tensor) -> None:
        self._model.add(names[0], _on_host(buffer))
        self._buffers.append(_facts(names, buffer))

    def finish(self, manifest: dict[str, Any], random_by_rank: list[Any]) -> None:
        """Write what is left, and put the checkpoint into its place."""
        self._model.flush()
        self._optimizer.flush()
        for facts in (*self._params.values(), *self._buffers):
            facts["file"] = self._model.file_of[facts["names"][0]]
        for name, facts in self._params.items():
            for entry, value in (facts["state"] or {}).items():
                if "dtype" in value:
                    value["file"] = self._optimizer.file_of[f"{name}/{entry}"]
        (self._folder.partial / RANDOM).write_text(json.dumps(random_by_rank), encoding="utf-8")
        self._folder.commit({**manifest, "parameters": list(self._params.values()), "buffers": self._buffers})

    def discard(self) -> None:
        """Remove what an unfinished checkpoint has left."""
        shutil.rmtree(self._folder.partial, ignore_errors=True)


class ExportWriter:
    """Writes the model alone, in the layout of the Hugging Face libraries. Making one touches no file.

    Args:
        path: a folder, or a file that ends in ".safetensors".
        all_names: of every tensor that will be added; those after the first go into the files' metadata.
    """

    def __init__(self, path: str | os.PathLike[str], all_names: Iterable[tuple[str, ...]], max_file_bytes: int):
        target = Path(os.path.realpath(path))
        self._file_name = target.name if target.suffix == ".safetensors" else None
        self._folder = target.parent if self._file_name else target
        self._partial = self._folder / f".{self._file_name or 'model'}.partial"
        metadata = {"format": "pt", **{other: names[0] for names in all_names for other in names[1:]}}
        limit = 1 << 62 if self._file_name else max_file_bytes
        self._tensors = TensorWriter(self._partial, "model", limit, metadata)

    def begin(self) -> None:
        self.discard()
        self._partial.mkdir(parents=True)

    def add(self, names: tuple[str, ...], whole: Tensor) -> None:
        self._tensors.add(names[0], whole)

    def add_buffer(self, names: tuple[str, ...], buffer: Tensor) -> None:
        self._tensors.add(names[0], _on_host(buffer))

    def finish(self) -> None:
        """Write what is left, put the files into their places, and remove those of an earlier export."""
        self._tensors.flush()
        written = self._tensors.files
        if len(written) == 1:
            new_names = {written[0]: self._file_name or "model.safetensors"}
        else:
            count = len(written)
            new_names = {old: f"model-{i:05d}-of-{count:05d}.safetensors" for i, old in enumerate(written, start=1)}
            weights = {name: new_names[file] for name, file in self._tensors.file_of.items()}
            index = {"metadata": {"total_size": self._tensors.total_bytes}, "weight_map": weights}
            new_names["index"] = "model.safetensors.index.json"
            (self._partial / "index").write_text(json.dumps(index, indent=1), encoding="utf-8")
        for old, new in new_names.items():
            os.replace(self._partial / old, self._folder / new)
        if self._file_name is None:
            for pattern in ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"):
                for file in self._folder.glob(pattern):
                    if file.name not in new_names.values():
                        file.unlink()

    def discard(self) -> None:
        """Remove what an unfinished export has left."""
        shutil.rmtree(self._partial, ignore_errors=True)


def _facts(names: tuple[str, ...], tensor: Tensor) -> dict[str, Any]:
    return {"names": list(names), "shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)}


def _on_host(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU with memory of its own."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())

"""The files of a checkpoint: written beside, renamed into place when complete, checked before anything is read.

path/
  manifest.json              every name, shape and dtype, the settings, and size and SHA-256 of all other files
  random.json                random state of each rank
  model-00001.safetensors    parameters and module buffers by name; then -00002, ...
  optimizer-00001.safetensors    "<parameter>/<entry>"
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from poplar.errors import CheckpointError

FORMAT = "poplar-checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
RANDOM = "random.json"

MAX_FILE_BYTES = 1 << 30
"""Tensors collected before they are written: what the writing rank holds on the host, beside one flat buffer."""


class TensorWriter:
    """Write tensors into files of bounded size, in the order in which they come.

    Attributes:
        file_of: name of the file that holds each tensor; complete after ``flush``.
    """

    def __init__(self, folder: Path, stem: str, max_file_bytes: int, metadata: dict[str, str] | None = None):
        self.folder, self.stem, self.max_file_bytes = folder, stem, max_file_bytes
        self.metadata = metadata
        self.file_of: dict[str, str] = {}
        self.total_bytes = 0
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor on the CPU, contiguous, with memory of its own."""
        assert name not in self.file_of and name not in self._waiting, f"{name} comes twice"
        if self._waiting and self._waiting_bytes + tensor.nbytes > self.max_file_bytes:
            self.flush()
        self._waiting[name] = tensor
        self._waiting_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def flush(self) -> None:
        """Write what waits."""
        if self._waiting:
            name = f"{self.stem}-{len(self.files) + 1:05d}.safetensors"
            save_file(self._waiting, self.folder / name, metadata=self.metadata)
            self.file_of.update(dict.fromkeys(self._waiting, name))
            self._waiting, self._waiting_bytes = {}, 0

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(self.file_of.values()))


class TensorReader:
    """Read tensors of a checkpoint by file and name."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: dict[str, Any] = {}

    def read_into(self, target: Tensor, file: str, name: str) -> None:
        """Overwrite ``target`` (any strides, device and dtype) with a stored tensor of the same shape."""
        if file not in self._open:
            self._open = {file: safe_open(self.folder / file, framework="pt")}
        target.copy_(self._open[file].get_tensor(name))


class FolderInTheMaking:
    """A folder that appears at ``path`` only once it is complete, in the place of an older checkpoint."""

    def __init__(self, path: str | os.PathLike[str]):
        self.target = Path(os.path.realpath(path))
        self.partial = self.target.with_name(f".{self.target.name}.partial")
        self.previous = previous_of(self.target)

    def begin(self) -> None:
        """Make the temporary folder; what a save that was killed has left there goes.

        Raises:
            CheckpointError: there is something at ``path`` that is not a checkpoint.
        """
        if self.target.exists() and not (self.target / MANIFEST).exists() and not _is_empty_folder(self.target):
            raise CheckpointError(
                f"{self.target} exists and is not a checkpoint; it is left alone, choose another path"
            )
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.discard()
        self.partial.mkdir()

    def commit(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, with size and checksum of every file, and put the folder into its place."""
        files = {}
        for file in sorted(self.partial.iterdir()):
            files[file.name] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
            _to_disk(file)
        manifest = {"format": FORMAT, "version": FORMAT_VERSION, **manifest, "files": files}
        manifest["checksum"] = _checksum(manifest)
        (self.partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        _to_disk(self.partial / MANIFEST)
        replaces = self.target.exists()
        if replaces:
            # Between the two renames there is nothing at the path; the older checkpoint is then at ``previous``.
            shutil.rmtree(self.previous, ignore_errors=True)
            self.target.rename(self.previous)
        try:
            self.partial.rename(self.target)
        except OSError:
            if replaces:
                self.previous.rename(self.target)
            raise
        shutil.rmtree(self.previous, ignore_errors=True)
        _to_disk(self.target.parent)

    def discard(self) -> None:
        if self.partial.exists():
            shutil.rmtree(self.partial)


def previous_of(target: Path) -> Path:
    """Return where an older checkpoint waits while a new one takes its place."""
    return target.with_name(f".{target.name}.previous")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest, and make sure that it and every file it lists are whole.

    Raises:
        CheckpointError: names the file that is missing, too short or changed.
    """
    if not (folder / MANIFEST).is_file():
        previous = previous_of(Path(os.path.realpath(folder)))
        hint = f"; a save was interrupted, the checkpoint before it is {previous}" if previous.exists() else ""
        raise CheckpointError(f"there is no checkpoint at {folder}: {MANIFEST} is missing{hint}")
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder / MANIFEST} is not the manifest of a Poplar checkpoint")
    if manifest.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has format version {manifest.get('version')!r}, this Poplar reads {FORMAT_VERSION}; use the "
            f"Poplar that wrote it ({manifest.get('poplar_version', 'unknown')})"
        )
    if manifest.pop("checksum", None) != _checksum(manifest):
        raise CheckpointError(f"{folder / MANIFEST} is damaged or was edited: its checksum does not fit")
    for name, facts in manifest["files"].items():
        _check_file(folder / name, facts)
    return manifest


def _check_file(file: Path, facts: Mapping[str, Any]) -> None:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; copy the whole folder, or use an older checkpoint")
    size = file.stat().st_size
    if size != facts["bytes"]:
        raise CheckpointError(f"{file} is damaged: {size:,} bytes, {facts['bytes']:,} were written")
    if _sha256(file) != facts["sha256"]:
        raise CheckpointError(f"{file} is damaged: its SHA-256 is not that of the file that was written")


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _to_disk(path: Path) -> None:
    """Have the system write a file or folder out; some file systems cannot, and some systems not for folders."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

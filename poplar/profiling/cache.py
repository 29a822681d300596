"""Earlier profiles in a folder, found by what determines them.

One JSON file a cluster and stage, written and read by rank 0. Its name comes from what every rank says of itself (card,
driver, versions, its place) and of the recipe (parameters, optimizer, loss, batch), from stage, precision and settings.
Which of two equal cards it was does not matter. Memory that has become less since is looked at when reading.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from poplar.device import Device, query_driver
from poplar.plan import ClusterProfile, write_text_atomically
from poplar.profiling.state import RecipeFacts, digest
from poplar.zero.comm import Communicator

if TYPE_CHECKING:
    from poplar.profiling.session import ProfileSettings

CACHE_VERSION = 6
"""Goes up when profiles are measured in another way."""
_OTHER_MEMORY = 1.1
"""A profile that memory limited is made anew where there is so much more of it now."""


class ProfileCache:
    """The profiles of one recipe on one cluster.

    Args:
        facts: of the recipe.
        precision: as resolved.
        reference: a profile at whose speed those here are, so that they do not hold beside another.
    """

    def __init__(
        self,
        settings: ProfileSettings,
        comm: Communicator,
        device: Device,
        facts: RecipeFacts,
        precision: str,
        reference: ClusterProfile | None = None,
    ):
        self._folder = None if settings.cache_dir is None else Path(settings.cache_dir)
        self._refresh = settings.refresh
        self._comm = comm
        self._device = device
        self._largest_wanted = settings.effort(device, comm.world_size).largest_wanted
        self._key = {
            "version": CACHE_VERSION,
            "recipe": facts.fingerprint,
            "precision": precision,
            "world_size": comm.world_size,
            "rank": comm.rank,
            "shards": comm.shard_world_size,
            "shard_ratios": settings.shard_ratios,
            "units": repr(settings.units),
            "clips": settings.max_grad_norm is not None,
            "largest": self._largest_wanted,
            # What the ranks do together are steps of a plan for it.
            "global_batch_size": settings.global_batch_size,
            "reference": None if reference is None else reference.to_json(),
            "memory_margin": settings.memory_margin,
            "memory_fraction": device.memory_fraction,
            "device": _describe(device),
            "transport": getattr(comm, "transport_name", ""),
        }

    def read(self, zero_stage: int) -> ClusterProfile | None:
        """Return an earlier profile that still holds; None: there is none, or not to be taken.

        Collective.
        """
        if self._folder is None or self._refresh:
            return None
        path = self._path(zero_stage)
        found = self._comm.broadcast_object(_read(path) if self._comm.rank == 0 else None, 0)
        if found is None:
            return None
        if any(row[0] for row in self._comm.gather_floats([float(self._has_other_memory(found))])):
            return None
        ids = self._comm.gather_objects(self._device.device_id)
        return replace(
            found, ranks=tuple(replace(row, device_id=own) for row, own in zip(found.ranks, ids, strict=True))
        )

    def write(self, profile: ClusterProfile) -> None:
        """Keep a profile for later. Collective."""
        if self._folder is None:
            return
        path = self._path(profile.zero_stage)
        if self._comm.rank == 0:
            write_text_atomically(path, profile.to_json())

    def _path(self, zero_stage: int) -> Path:
        """Return the file of a stage, the same on every rank. Collective."""
        assert self._folder is not None
        keys = self._comm.gather_objects(digest({**self._key, "zero_stage": zero_stage}))
        return self._folder / f"profile-z{zero_stage}-{digest(keys)}.json"

    def _has_other_memory(self, found: ClusterProfile) -> bool:
        """Return whether this rank has less memory than the profile needs, or more than limited it."""
        limit = self._device.memory_limit_bytes
        if limit is None:
            return False
        row = found.ranks[self._comm.rank]
        usable_bytes = limit - self._device.allocated_bytes()
        needed_bytes = max((peak for _, peak in row.memory_points), default=0)
        known_bytes = row.memory_limit_bytes if row.memory_limit_bytes is not None else usable_bytes
        could_grow = row.max_micro_batch_size < self._largest_wanted
        return needed_bytes > usable_bytes or (could_grow and usable_bytes > known_bytes * _OTHER_MEMORY)


def _read(path: Path) -> ClusterProfile | None:
    try:
        return ClusterProfile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # ValueError: also a ConfigError, or not UTF-8
        return None  # none yet, or of another release, or damaged: measured anew


def _describe(device: Device) -> dict[str, Any]:
    report = query_driver(device.device_id) if device.torch_device.type == "cuda" and device.device_id else None
    return {
        "name": device.name,
        "driver": report.driver_version if report is not None else None,
        "torch": torch.__version__,
        "runtime": torch.version.cuda or torch.version.hip,
        "threads": torch.get_num_threads() if device.torch_device.type == "cpu" else None,
        "cores": os.cpu_count() if device.torch_device.type == "cpu" else None,
        # An emulated card's pace depends on how many ranks share the machine.
        "stretch": getattr(device, "stretch", None),
    }

"""The machine a rank runs on, as the launcher, the system and its cgroup tell: place, processor cores, free memory."""

from __future__ import annotations

import os
import re
from pathlib import Path


def local_rank() -> int:
    """Return this process's place among the ranks of its machine."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)


def local_world_size() -> int:
    """Return the number of ranks on this machine."""
    given = os.environ.get("LOCAL_WORLD_SIZE")
    if given is None and "SLURM_NTASKS_PER_NODE" in os.environ:
        given = os.environ["SLURM_NTASKS_PER_NODE"].split("(")[0]
    return int(given or 1)


def usable_cores() -> float:
    """Return the processor cores that this process may use: its affinity, or its cgroup's quota if that is less."""
    cores = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    limits = [_read_quota(Path(folder, "cpu.max")) for folder in _cgroup_folders()]
    return min([cores, *(limit for limit in limits if limit is not None)])


def free_host_bytes() -> int | None:
    """Return the bytes of main memory that this process could still take, cgroup limits included; None: unknown."""
    found = []
    try:
        text = Path("/proc/meminfo").read_text()
        found.append(int(re.search(r"MemAvailable:\s+(\d+) kB", text).group(1)) * 1024)  # type: ignore[union-attr]
    except (OSError, AttributeError):
        if "SC_PHYS_PAGES" in os.sysconf_names:
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for folder in _cgroup_folders():
        limit, used = _read_int(folder / "memory.max"), _read_int(folder / "memory.current")
        if limit is not None and used is not None:
            found.append(max(0, limit - used))
    return min(found, default=None)


def _cgroup_folders() -> list[Path]:
    """Return the folders of this process's cgroup (version 2) and of those above it: any of them may set a limit."""
    try:
        line = next(row for row in Path("/proc/self/cgroup").read_text().splitlines() if row.startswith("0::"))
    except (OSError, StopIteration):
        return []
    root = Path("/sys/fs/cgroup")
    own = root / line[3:].lstrip("/")
    return [folder for folder in (own, *own.parents) if folder == root or root in folder.parents]


def _read_quota(path: Path) -> float | None:
    try:
        quota, period = path.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None  # no such file, or "max"


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None

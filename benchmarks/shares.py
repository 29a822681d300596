"""Ranks made truly unlike by the kernel: each gets a share of a core.

    with cpu_shares((1.0, 0.3)) as shares:
        run_ranks(function, 2, admit=shares.admit)

[Note: two ways]
A CPU quota (cgroup v1 or v2) lets all threads of a rank together run for so many milliseconds of every period: a core's
worth is 1.0. Setting one needs write access to the cgroup folder, as root has. Where that is refused, a slow rank is
pinned to a core beside a busy process, and the scheduler's weights (nice values) give it about its share. Groups and
busy processes are removed at the end, whatever happens.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PERIOD_US = 20_000
"""A short period, so that a slow rank is slow all the time rather than stopped for long."""
_NICE_STEP = 1.25
"""Ratio of the scheduler's weights of neighbouring nice values (Linux, sched(7))."""


def fit_to_cores(shares: Sequence[float], cores: float) -> tuple[float, ...]:
    """Scale the shares down, all alike, if together they are more than the machine has."""
    factor = min(1.0, cores / sum(shares))
    return tuple(share * factor for share in shares)


class CpuQuota:
    """A cgroup for each rank, with a quota."""

    is_exact = True

    def __init__(self, shares: Sequence[float], period_us: int = PERIOD_US):
        """Make the groups.

        Raises:
            OSError: this process may not, or there is no cgroup with CPU quotas.
        """
        self.how = f"CPU quota (cgroup), period {period_us / 1000:g} ms"
        self._folders: list[Path] = []
        parent, version = _find_cgroup()
        _remove_leftovers(parent)
        try:
            for rank, share in enumerate(shares):
                folder = parent / f"poplar-benchmark-{os.getpid()}-{rank}"
                folder.mkdir()
                self._folders.append(folder)
                quota_us = round(share * period_us)
                if version == 2:
                    (folder / "cpu.max").write_text(f"{quota_us} {period_us}")
                else:
                    (folder / "cpu.cfs_period_us").write_text(str(period_us))
                    (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        except OSError:
            self.close()
            raise

    def admit(self, rank: int, pid: int) -> None:
        """Put a rank's process, with all its threads, under its quota."""
        (self._folders[rank] / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove the groups; their processes must have ended."""
        for folder in self._folders:
            for _ in range(50):
                try:
                    folder.rmdir()
                    break
                except OSError:
                    time.sleep(0.1)  # a process that has just ended stays in its group for a moment
        self._folders = []


def _remove_leftovers(parent: Path) -> None:
    """Remove the groups of earlier runs that were killed before they could."""
    for folder in parent.glob("poplar-benchmark-*"):
        if not Path("/proc", folder.name.split("-")[2]).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _find_cgroup() -> tuple[Path, int]:
    """Return the folder in which groups with CPU quotas can be made, and the cgroup version.

    Raises:
        OSError: there is none.
    """
    for line in Path("/proc/mounts").read_text().splitlines():
        _, folder, kind, options, *_ = line.split()
        root = Path(folder)
        if kind == "cgroup" and "cpu" in options.split(",") and (root / "cpu.cfs_quota_us").exists():
            return root, 1
        if kind == "cgroup2" and "cpu" in (root / "cgroup.subtree_control").read_text().split():
            return root, 2
    raise OSError("no cgroup with CPU quotas is mounted")


class BusyNeighbours:
    """Every slow rank shares a core with a process that never rests; cores without a slow rank take the others."""

    is_exact = False

    def __init__(self, shares: Sequence[float]):
        """Start the busy processes.

        Raises:
            ValueError: a share of more than a core, or fewer cores than ranks.
        """
        self.how = "pinned beside a busy process (no right to set a CPU quota here)"
        self._busy: list[subprocess.Popen] = []
        self._shares = list(shares)
        self._cores = sorted(os.sched_getaffinity(0))
        if len(self._cores) < len(shares):
            raise ValueError(f"{len(shares)} unlike ranks need a core each, this machine has {len(self._cores)}")
        try:
            for core, share in zip(self._cores, shares, strict=False):
                if share < 0.95:
                    self._busy.append(self._start_busy(core, max(0, -nice_difference(share))))
        except OSError:
            self.close()
            raise

    def _start_busy(self, core: int, nice: int) -> subprocess.Popen:
        code = f"import os\nos.nice({nice})\nwhile True: pass"
        process = subprocess.Popen([sys.executable, "-c", code])
        os.sched_setaffinity(process.pid, {core})
        return process

    def admit(self, rank: int, pid: int) -> None:
        os.sched_setaffinity(pid, {self._cores[rank]})
        share = self._shares[rank]
        if share < 0.95:
            os.setpriority(os.PRIO_PROCESS, pid, max(0, nice_difference(share)))

    def close(self) -> None:
        for process in self._busy:
            process.kill()
            process.wait()
        self._busy = []


def nice_difference(share: float) -> int:
    """Return by how much nicer than its busy neighbour a process must be to get ``share`` of their core."""
    return round(math.log((1 - share) / share) / math.log(_NICE_STEP))


@contextlib.contextmanager
def cpu_shares(shares: Sequence[float], use_quota: bool = True) -> Iterator[CpuQuota | BusyNeighbours]:
    """Give each rank its share of a core; ``how`` of what is yielded says by what means, ``admit`` takes the ranks in.

    Args:
        use_quota: try a CPU quota first.
    """
    limiter: CpuQuota | BusyNeighbours
    try:
        if not use_quota:
            raise OSError("not asked for")
        limiter = CpuQuota(shares)
    except OSError:
        limiter = BusyNeighbours(shares)
    # Ended from outside, clean up all the same.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield limiter
    finally:
        limiter.close()
        signal.signal(signal.SIGTERM, before)


def received_share(seconds: float = 1.0) -> float:
    """Return the share of a core that this process gets when it computes without a pause."""
    began, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        pass
    return (time.process_time() - used) / (time.perf_counter() - began)

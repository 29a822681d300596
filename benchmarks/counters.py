"""Bytes on the wire, as the kernel counts them, and bytes of memory, as PyTorch's allocator does."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def bytes_sent() -> int | None:
    """Return the bytes that this process has sent over its TCP connections, as the kernel counts them; None: unknown.

    Payload without headers, each byte once even if it had to be sent again.
    """
    if not os.path.isdir("/proc/self/fd"):
        return None
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                    continue
                # struct tcp_info: tcpi_bytes_sent and tcpi_bytes_retrans lie at byte 200 (Linux 4.19 and later).
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
        except OSError:
            continue  # closed meanwhile
        if len(info) < 216:
            return None
        sent, sent_again = struct.unpack_from("QQ", info, 200)
        total += sent - sent_again
    return total


@dataclass(frozen=True, kw_only=True)
class MemoryReading:
    """Bytes of tensors, counted from before a system was built."""

    peak_bytes: int
    """The most during the last of the steps."""
    state_bytes: int
    """What was left after it."""


def metered(
    make: Callable[[], Any], use: Callable[[Any], None], times: int = 3, device: torch.device | None = None
) -> tuple[Any, MemoryReading]:
    """Return ``make()`` and the memory that it takes while ``use`` is called on it for the last of ``times`` times."""
    if device is not None and device.type == "cuda":
        return _metered_on_card(make, use, times)
    return _metered_on_cpu(make, use, times)


def _metered_on_card(make: Callable[[], Any], use: Callable[[Any], None], times: int) -> tuple[Any, MemoryReading]:
    before = torch.cuda.memory_allocated()
    made = make()
    for _ in range(times):
        torch.cuda.reset_peak_memory_stats()
        use(made)
    peak, left = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    return made, MemoryReading(peak_bytes=peak - before, state_bytes=left - before)


def _metered_on_cpu(make: Callable[[], Any], use: Callable[[Any], None], times: int) -> tuple[Any, MemoryReading]:
    """Listen to PyTorch's profiler.

    It hears of every allocation of the CPU allocator in this thread, also of those that C++ makes. Memory that gloo
    allocates for itself is not seen, whoever calls it.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        made = make()
        for index in range(times):
            with record_function(f"benchmark use {index}"):
                use(made)
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    began_ns = max(event.start_ns() for event in events if event.name() == f"benchmark use {times - 1}")
    live_bytes = peak_bytes = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live_bytes += event.nbytes()
        if event.start_ns() >= began_ns:
            peak_bytes = max(peak_bytes, live_bytes)
    return made, MemoryReading(peak_bytes=peak_bytes, state_bytes=live_bytes)

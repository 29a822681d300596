"""What this rank runs on: the card or the CPU, its free memory, its identity, its clock. The only importer of pynvml.

Device        a CPU rank; also the interface that engine, profiler and command line use
`-- CudaDevice      a CUDA or ROCm card
`-- EmulatedDevice  a CPU rank that stands for a named card (emulation.py)
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from poplar.catalog import match_device_name
from poplar.errors import ConfigError
from poplar.host import free_host_bytes, local_rank, local_world_size
from poplar.memory_meter import MemoryMeter

_NATIVE_BF16_CAPABILITY = (8, 0)
_NATIVE_BF16_ARCHITECTURES = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
_OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "cudaErrorMemoryAllocation",
)


_LARGE_BYTES = 31 * 2**20


def _keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next step.

    [Note: page faults] What is free at the top of glibc's heap goes back to the kernel once it is more than twice the
    largest chunk that was ever freed, chunks above 32 MiB not counted (mallopt(3), M_MMAP_THRESHOLD). A small model has
    no large chunks, so its gradients go back in every step, and come again page by page, for 4% of a step's time. One
    large chunk, freed without having been touched, teaches it to keep 62 MiB at the top, and to take all chunks below
    31 MiB from the heap, where they stay when freed.
    """
    np.empty(_LARGE_BYTES, dtype=np.uint8)  # not torch: no meter is to count it


class Device:
    """What one rank runs on; this class itself is a CPU rank, whose memory is metered (see memory_meter.py).

    Args:
        memory_fraction: share of the free memory that this rank may use. None: all of it.

    Raises:
        ConfigError: ``memory_fraction`` is not above 0 and at most 1.
    """

    vendor = "cpu"
    """ "nvidia", "amd" or "cpu": cards of two vendors share no collective library but gloo."""
    is_emulated = False
    computes_on_host = True

    def __init__(self, memory_fraction: float | None = None):
        self.torch_device = torch.device("cpu")
        self.name = "cpu"
        """Catalogue name of the card; where the catalogue lacks it, what the driver calls it."""
        self.device_id: str | None = None
        """The card's UUID as this process sees it, so that another numbering of the cards cannot mislead."""
        self.memory_fraction = check_share("memory_fraction", 1.0 if memory_fraction is None else memory_fraction)
        self.memory_limit_bytes = self._read_memory_limit()
        """Bytes that this rank may use, model state included: those free at the start, not all. None: unknown."""
        self._meter = MemoryMeter(self.memory_limit_bytes, owner="this rank")
        if self.computes_on_host:
            _keep_freed_memory()

    def _read_memory_limit(self) -> int | None:
        free_bytes = free_host_bytes()
        if free_bytes is None:
            return None
        return int(free_bytes * self.memory_fraction / local_world_size())

    def free_bytes(self) -> int | None:
        """Return the bytes of ``memory_limit_bytes`` that are not in use."""
        return None if self.memory_limit_bytes is None else self.memory_limit_bytes - self.allocated_bytes()

    def allocated_bytes(self) -> int:
        """Return the bytes of live tensors; on CPU, of those that ``metered`` has seen."""
        return self._meter.live_bytes

    def peak_bytes(self) -> int:
        """Return the most bytes allocated since ``reset_peak``; on CPU, of what ``metered`` has seen."""
        return self._meter.peak_bytes

    def reset_peak(self) -> None:
        self._meter.reset_peak()

    def empty_cache(self) -> None:
        """Give unused cached memory back to the system."""

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""

    def clock_s(self) -> float:
        """Return the seconds of a clock, all work so far included: waits for the device."""
        self.synchronize()
        return time.perf_counter()

    def native_dtypes(self) -> tuple[str, ...]:
        """Return which of "fp32", "fp16" and "bf16" the device computes in by its own hardware."""
        # Absent where torch runs on a processor of another family.
        has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
        return ("fp32", "bf16") if has_bf16() else ("fp32",)

    def mark(self) -> None:
        """Start the stretch of compute that the next ``pace`` closes; what came before is not paced."""

    def pace(self) -> None:
        """Close a stretch of compute: emulation sleeps here; a real device does nothing."""

    def hurried(self) -> AbstractContextManager[None]:
        """Return a context in which ``pace`` sleeps but briefly; ``clock_s`` runs ahead by the rest."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def metered(self, *tracked: Any) -> Any:
        """Count tensor memory inside, and hold it to ``memory_limit_bytes``. On a card the allocator always does.

        May be entered again inside itself.

        Args:
            tracked: modules, optimizers or tensors that were there before, to be counted too.
        """
        self._meter.track(*tracked)
        with contextlib.nullcontext() if self._meter.is_running else self._meter:
            yield

    def track(self, *objects: Any) -> None:
        """Count memory of modules, optimizers or tensors that were there before ``metered``."""
        self._meter.track(*objects)

    def uncounted(self) -> AbstractContextManager[None]:
        """Return a context whose tensors stand for memory of the host, as a state dict on its way to disk."""
        return self._meter.uncounted()


class CudaDevice(Device):
    """A CUDA or ROCm card, chosen as the current one of this process.

    Args:
        index: of the card among those that this process sees.
        memory_fraction: share of the card's free memory that this rank may use. None: all of it.
    """

    computes_on_host = False

    def __init__(self, index: int, memory_fraction: float | None = None):
        torch.cuda.set_device(index)
        self._index = index
        properties = torch.cuda.get_device_properties(index)
        super().__init__(memory_fraction)
        self.torch_device = torch.device("cuda", index)
        self.name = card_name(properties.name)
        self.vendor = "amd" if torch.version.hip else "nvidia"
        self.device_id = f"GPU-{properties.uuid}"
        self._architecture = str(getattr(properties, "gcnArchName", ""))
        if self.memory_fraction < 1 and self.memory_limit_bytes is not None:
            # Held to it by the allocator, so that the profiler meets a real out-of-memory.
            torch.cuda.set_per_process_memory_fraction(self.memory_limit_bytes / properties.total_memory, index)

    def _read_memory_limit(self) -> int | None:
        # Free, not total: a display or another job may hold a part. What this process has reserved is its own to use.
        free_bytes, _ = torch.cuda.mem_get_info(self._index)
        return int((free_bytes + torch.cuda.memory_reserved(self._index)) * self.memory_fraction)

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._index)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._index)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._index)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._index)

    def native_dtypes(self) -> tuple[str, ...]:
        # Not torch.cuda.is_bf16_supported(): it says yes to cards that emulate bfloat16 (pytorch/pytorch PR#148322).
        if self.vendor == "amd":
            native = self._architecture.startswith(_NATIVE_BF16_ARCHITECTURES)
        else:
            native = torch.cuda.get_device_capability(self._index) >= _NATIVE_BF16_CAPABILITY
        return ("fp32", "fp16", "bf16") if native else ("fp32", "fp16")

    @contextlib.contextmanager
    def metered(self, *tracked: Any) -> Any:
        yield

    def track(self, *objects: Any) -> None:
        pass

    def uncounted(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


def current_device(memory_fraction: float | None = None) -> Device:
    """Return what this rank runs on: the card that its local rank picks, or the CPU where there is none.

    Raises:
        ConfigError: more ranks on this machine than cards, or a wrong ``memory_fraction``.
    """
    if not torch.cuda.is_available():
        return Device(memory_fraction)
    num_cards, rank = torch.cuda.device_count(), local_rank()
    if num_cards == 1 and local_world_size() > 1 and os.environ.get("SLURM_LOCALID") is not None:
        return CudaDevice(0, memory_fraction)  # Slurm may show each task its own card alone
    if rank >= num_cards:
        raise ConfigError(
            f"local rank {rank} needs a card of its own, this process sees {num_cards}; start {num_cards} ranks on "
            'this machine, or set CUDA_VISIBLE_DEVICES="" to run on the CPU'
        )
    return CudaDevice(rank, memory_fraction)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that memory ran out, and not that something is wrong with the model."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # Libraries that allocate on their own raise plain RuntimeErrors; only those are judged by their text.
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)


def check_share(name: str, share: float) -> float:
    """Return ``share``.

    Raises:
        ConfigError: it is not a number above 0 and at most 1.
    """
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ConfigError(f"{name} must be a number above 0 and at most 1; got {share!r}")
    return share


def card_name(device_name: str) -> str:
    """Return the catalogue's name of what the driver calls ``device_name``, or that in the catalogue's spelling."""
    card = match_device_name(device_name)
    return card.name if card is not None else re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


@dataclass(frozen=True, kw_only=True)
class CardReport:
    """What the driver says of a card, for ``poplar doctor``."""

    driver_version: str
    pci_bus_id: str
    total_bytes: int
    used_bytes: int
    """By all processes together."""
    temperature_c: int | None
    power_limit_w: float | None


def query_driver(device_id: str) -> CardReport | None:
    """Ask the NVIDIA driver about the card of a UUID; None where there is no such driver or card."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, no driver, or one that this library cannot talk to
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(device_id)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return CardReport(
            driver_version=str(pynvml.nvmlSystemGetDriverVersion()),
            pci_bus_id=str(pynvml.nvmlDeviceGetPciInfo(handle).busId),
            total_bytes=int(memory.total),
            used_bytes=int(memory.used),
            temperature_c=_ask(pynvml, pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
            power_limit_w=_milli(_ask(pynvml, pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        )
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _ask(pynvml: Any, question: Any, *args: Any) -> Any:
    try:
        return question(*args)
    except pynvml.NVMLError:
        return None  # laptops and passive cards answer only some


def _milli(value: float | None) -> float | None:
    return None if value is None else value / 1000

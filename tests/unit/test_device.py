"""What a rank runs on: CPU ranks for real, cards through a stand-in for torch.cuda."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from poplar import device as device_module
from poplar import host
from poplar.device import (
    CudaDevice,
    Device,
    card_name,
    current_device,
    is_out_of_memory,
    query_driver,
)
from poplar.errors import ConfigError
from poplar.host import free_host_bytes, local_rank, local_world_size, usable_cores

GIB = 2**30


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)


def test_cpu_rank():
    device = Device()
    assert (device.torch_device.type, device.name, device.device_id, device.vendor) == ("cpu", "cpu", None, "cpu")
    assert not device.is_emulated
    assert "fp32" in device.native_dtypes()
    assert device.memory_limit_bytes is None or device.memory_limit_bytes > 1 << 20
    first = device.clock_s()
    device.mark()
    device.pace()
    device.empty_cache()
    assert device.clock_s() >= first


def test_cpu_rank_meters_memory_where_asked(monkeypatch):
    monkeypatch.setattr(device_module, "free_host_bytes", lambda: 4096)
    device = Device(memory_fraction=0.5)
    assert device.memory_limit_bytes == 2048
    before = torch.zeros(100)
    with device.metered(before):
        with device.metered():  # entering again changes nothing
            made = torch.zeros(256)
        assert device.allocated_bytes() == 1424
        assert device.free_bytes() == 2048 - 1424
        with device.uncounted():
            torch.zeros(10_000)
        with pytest.raises(torch.OutOfMemoryError, match="this rank is out of memory"):
            torch.zeros(256)
        del made
        device.track(torch.zeros(1))
    assert device.peak_bytes() == 1424
    device.reset_peak()
    assert device.peak_bytes() == device.allocated_bytes() == 400


def test_ranks_of_one_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(device_module, "free_host_bytes", lambda: 1000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert Device().memory_limit_bytes == 250
    monkeypatch.setattr(device_module, "free_host_bytes", lambda: None)
    assert Device().memory_limit_bytes is None
    assert Device().free_bytes() is None


@pytest.mark.parametrize("share", [0, -0.5, 1.5, float("nan"), "0.5", True])
def test_wrong_memory_fraction(share):
    with pytest.raises(ConfigError, match="memory_fraction must be a number above 0 and at most 1"):
        current_device(share)


class _Cards:
    """Stands for ``torch.cuda`` with cards of 16 GiB."""

    def __init__(self, num_cards=2, name="Tesla T4", capability=(7, 5), free_gib=12, reserved_gib=0, arch=""):
        self.num_cards, self.capability, self.free_gib, self.reserved_gib = (
            num_cards,
            capability,
            free_gib,
            reserved_gib,
        )
        self.properties = SimpleNamespace(name=name, uuid="aaaa-1", total_memory=16 * GIB, gcnArchName=arch)
        self.current = self.limited_to = None
        self.synchronized = 0

    def install(self, monkeypatch):
        stand_ins = {
            "is_available": lambda: True,
            "device_count": lambda: self.num_cards,
            "set_device": lambda index: setattr(self, "current", index),
            "get_device_properties": lambda index: self.properties,
            "get_device_capability": lambda index: self.capability,
            "mem_get_info": lambda index: (self.free_gib * GIB, 16 * GIB),
            "memory_reserved": lambda index: self.reserved_gib * GIB,
            "memory_allocated": lambda index: 1 * GIB,
            "max_memory_allocated": lambda index: 2 * GIB,
            "set_per_process_memory_fraction": lambda share, index: setattr(self, "limited_to", share),
            "synchronize": lambda index: setattr(self, "synchronized", self.synchronized + 1),
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        return self


def test_card_is_picked_by_local_rank_and_named_as_in_the_catalogue(monkeypatch):
    cards = _Cards().install(monkeypatch)
    monkeypatch.setenv("LOCAL_RANK", "1")
    device = current_device()
    assert isinstance(device, CudaDevice)
    assert cards.current == 1 and device.torch_device == torch.device("cuda", 1)
    assert (device.name, device.vendor, device.device_id) == ("t4-16g", "nvidia", "GPU-aaaa-1")
    assert (device.allocated_bytes(), device.peak_bytes()) == (GIB, 2 * GIB)
    device.clock_s()
    assert cards.synchronized == 1
    with device.metered(torch.zeros(1)), device.uncounted():
        device.track(torch.zeros(1))
    assert device.allocated_bytes() == GIB


def test_memory_limit_is_what_is_free_not_what_the_card_has(monkeypatch):
    # H10: another process holds a part of the card. What this process has reserved is its own.
    cards = _Cards(free_gib=6, reserved_gib=2).install(monkeypatch)
    assert current_device().memory_limit_bytes == 8 * GIB
    assert cards.limited_to is None


def test_memory_fraction_is_enforced_by_the_allocator(monkeypatch):
    # H09
    cards = _Cards(free_gib=12).install(monkeypatch)
    assert current_device(0.5).memory_limit_bytes == 6 * GIB
    assert cards.limited_to == 6 / 16


def test_bf16_is_native_by_capability_alone(monkeypatch):
    # X14: torch.cuda.is_bf16_supported() is true on a T4, which only emulates it.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args: True)
    _Cards(capability=(7, 5)).install(monkeypatch)
    assert current_device().native_dtypes() == ("fp32", "fp16")
    _Cards(capability=(8, 0)).install(monkeypatch)
    assert current_device().native_dtypes() == ("fp32", "fp16", "bf16")


@pytest.mark.parametrize(("arch", "native"), [("gfx90a:sramecc+:xnack-", True), ("gfx906", False), ("gfx1100", True)])
def test_amd_cards_tell_their_vendor_and_dtypes(monkeypatch, arch, native):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    _Cards(name="AMD Instinct MI999", capability=(9, 0), arch=arch).install(monkeypatch)
    device = current_device()
    assert device.vendor == "amd" and device.name == "amd-instinct-mi999"
    assert ("bf16" in device.native_dtypes()) == native


def test_more_ranks_than_cards(monkeypatch):
    _Cards(num_cards=2).install(monkeypatch)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="local rank 2 .* sees 2; start 2 ranks"):
        current_device()


def test_slurm_shows_each_task_its_own_card(monkeypatch):
    cards = _Cards(num_cards=1).install(monkeypatch)
    monkeypatch.setenv("SLURM_LOCALID", "3")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4(x2)")
    assert (local_rank(), local_world_size()) == (3, 4)
    current_device()
    assert cards.current == 0


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB"),
    ],
)
def test_out_of_memory_is_told(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        # P05: what else goes wrong at a large batch is not swallowed.
        RuntimeError(
            "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input"
        ),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
        RuntimeError("CUDA error: invalid configuration argument"),
        ValueError("the shop is out of memory"),
        KeyboardInterrupt(),
    ],
)
def test_real_faults_are_not_out_of_memory(error):
    assert not is_out_of_memory(error)


def test_a_real_allocation_failure_is_told():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55)
    assert is_out_of_memory(caught.value)


def test_names_beyond_the_catalogue():
    assert card_name("NVIDIA Some New Card (2030)") == "nvidia-some-new-card-2030"


def test_cgroup_limits_count(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "_cgroup_folders", lambda: [tmp_path])
    whole, cores = free_host_bytes(), usable_cores()
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    (tmp_path / "cpu.max").write_text("30000 100000\n")
    assert free_host_bytes() == 2_000_000
    assert usable_cores() == 0.3
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores() == cores >= 1
    assert whole is None or abs(free_host_bytes() - whole) < GIB


class _Driver:
    """Stands for pynvml."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self, has_card: bool):
        self.has_card, self.is_open = has_card, 0

    def nvmlInit(self):
        self.is_open += 1

    def nvmlShutdown(self):
        self.is_open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if not self.has_card:
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=16 * GIB, used=3 * GIB)

    def nvmlSystemGetDriverVersion(self):
        return "550.54"

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(busId="0000:65:00.0")

    def nvmlDeviceGetTemperature(self, handle, sensor):
        raise self.NVMLError("not supported")

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 70_000


def test_driver_report(monkeypatch):
    driver = _Driver(has_card=True)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    report = query_driver("GPU-aaaa-1")
    assert (report.driver_version, report.pci_bus_id) == ("550.54", "0000:65:00.0")
    assert (report.used_bytes, report.temperature_c, report.power_limit_w) == (3 * GIB, None, 70.0)
    missing = _Driver(has_card=False)
    monkeypatch.setitem(sys.modules, "pynvml", missing)
    assert query_driver("GPU-aaaa-1") is None
    assert driver.is_open == missing.is_open == 0


def test_without_a_driver_there_is_no_report(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert query_driver("GPU-aaaa-1") is None

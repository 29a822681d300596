"""CPU ranks that stand for named GPUs: their pace, their memory, and the same numbers as without them."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import nn

from poplar import device as device_module
from poplar import emulation
from poplar.catalog import find_card
from poplar.emulation import HEADROOM, EmulatedDevice, start_device, stretches
from poplar.errors import ConfigError
from poplar.recipes import bytes_gpt

T4, V100 = find_card("t4-16g"), find_card("v100-16g")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "SLURM_PROCID", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


class _Clock:
    """Stands for the module ``time``: processor time, wall time, and a system that wakes sleepers late."""

    def __init__(self, late_s: float = 0.0):
        self.processor_s, self.wall_s, self.late_s = 5.0, 100.0, late_s
        self.slept_s: list[float] = []

    def thread_time(self) -> float:
        return self.processor_s

    def perf_counter(self) -> float:
        return self.wall_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.wall_s += seconds + self.late_s

    def compute(self, seconds: float) -> None:
        self.processor_s += seconds
        self.wall_s += seconds

    def wait(self, seconds: float) -> None:
        self.wall_s += seconds


@pytest.fixture
def make_paced(monkeypatch):
    def make(stretch: float, late_s: float = 0.0) -> tuple[EmulatedDevice, _Clock]:
        device = EmulatedDevice(T4, 0, stretch)
        clock = _Clock(late_s)
        monkeypatch.setattr(emulation, "time", clock)
        monkeypatch.setattr(device, "_queue_clock", _NoQueue())
        device._meter_cost_s = 0.0
        device.mark()
        return device, clock

    return make


class _NoQueue:
    def __init__(self) -> None:
        self.waited_s = 0.0

    def read_s(self) -> float:
        return self.waited_s


def test_pace_stretches_processor_time(make_paced):
    device, clock = make_paced(stretch=4.0)
    clock.compute(0.010)
    device.pace()
    assert clock.wall_s - 100.0 == pytest.approx(0.040)
    device.pace()
    assert len(clock.slept_s) == 1  # sleeping is not charged


def test_waiting_for_others_is_not_stretched(make_paced):
    device, clock = make_paced(stretch=4.0)
    clock.compute(0.010)
    clock.wait(0.500)
    device.pace()
    assert clock.wall_s - 100.0 == pytest.approx(0.540)


def test_what_came_before_the_mark_is_not_stretched(make_paced):
    device, clock = make_paced(stretch=4.0)
    clock.compute(0.300)  # loading data, say
    device.mark()
    clock.compute(0.010)
    device.pace()
    assert clock.slept_s == [pytest.approx(0.030)]


def test_short_debts_add_up_and_late_waking_is_made_good(make_paced):
    device, clock = make_paced(stretch=3.0, late_s=0.0001)
    for _ in range(1000):
        clock.compute(0.0001)
        device.pace()
    assert len(clock.slept_s) < 500
    assert clock.wall_s - 100.0 == pytest.approx(0.300, abs=0.001)


def test_waiting_for_a_core_is_taken_off_the_sleep(make_paced):
    device, clock = make_paced(stretch=3.0)
    clock.compute(0.010)
    clock.wait(0.012)
    device._queue_clock.waited_s += 0.012
    device.pace()
    assert clock.wall_s - 100.0 == pytest.approx(0.030)


def test_a_long_stall_is_not_made_good_for_ever(make_paced):
    device, clock = make_paced(stretch=2.0)
    device._queue_clock.waited_s += 10.0
    device.pace()
    clock.compute(0.3)
    device.pace()
    assert clock.slept_s == [pytest.approx(0.2)]


def test_the_meters_own_time_is_not_the_cards(make_paced):
    device, clock = make_paced(stretch=4.0)
    device._meter_cost_s = 0.001
    with device.metered():
        torch.zeros(8)
        torch.zeros(8)
    clock.compute(0.012)
    device.pace()
    # 10 ms of compute become 40 ms of wall time; the meter's 2 ms are hidden in the sleep.
    assert clock.wall_s - 100.0 == pytest.approx(0.040)


def test_a_hurried_rank_sleeps_briefly_and_its_clock_runs_ahead_by_the_rest(make_paced, monkeypatch):
    device, clock = make_paced(stretch=4.0)
    monkeypatch.setattr(device_module, "time", clock)
    began_s = device.clock_s()
    with device.hurried():
        clock.compute(0.002)
        device.pace()
        assert clock.slept_s == [pytest.approx(0.006)]
        clock.compute(0.010)
        device.pace()
        assert clock.slept_s[1:] == [pytest.approx(0.010)]
    assert device.clock_s() - began_s == pytest.approx(0.048)
    clock.compute(0.010)
    device.pace()
    assert clock.slept_s[2:] == [pytest.approx(0.030)]
    assert device.clock_s() - began_s == pytest.approx(0.088)


def test_pace_on_the_real_clock():
    device = EmulatedDevice(T4, 0, stretch=3.0)
    x = torch.ones(128, 128)
    began_s, began_processor_s = time.perf_counter(), time.thread_time()
    for _ in range(10):
        for _ in range(20):
            x @ x
        device.pace()
    processor_s = time.thread_time() - began_processor_s
    # A crowded machine makes it longer; nothing makes it shorter by more than a debt not yet slept.
    assert time.perf_counter() - began_s > 3.0 * processor_s * 0.9 - 0.001


def test_the_meters_cost_is_measured():
    assert 1e-7 < emulation._measure_meter_cost_s() < 1e-3


def test_stretches_follow_speed_and_leave_room(monkeypatch):
    monkeypatch.setattr(emulation, "usable_cores", lambda: 2.0)
    ratio = V100.relative_speed / T4.relative_speed
    assert ratio > 1.5
    assert stretches([V100, T4]) == pytest.approx([HEADROOM, HEADROOM * ratio])
    assert stretches([T4, V100, T4, V100]) == pytest.approx([2.5 * ratio, 2.5, 2.5 * ratio, 2.5])
    assert stretches([T4]) == [HEADROOM]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")  # ranks on this machine
    assert stretches([T4] * 12) == pytest.approx([HEADROOM * 3] * 12)


def test_a_cluster_gives_one_card_a_rank(monkeypatch):
    monkeypatch.setattr(emulation, "usable_cores", lambda: 2.0)
    devices = [start_device("v100-16g:2,t4-16g", rank) for rank in range(3)]
    assert [device.name for device in devices] == ["v100-16g", "v100-16g", "t4-16g"]
    assert [device.device_id for device in devices] == [
        "emulated:v100-16g:0",
        "emulated:v100-16g:1",
        "emulated:t4-16g:2",
    ]
    assert all(device.is_emulated and device.torch_device.type == "cpu" for device in devices)
    assert devices[2].stretch == pytest.approx(devices[0].stretch * V100.relative_speed / T4.relative_speed)
    assert devices[2].native_dtypes() == ("fp32", "fp16")
    assert "bf16" in start_device("a100-40g", 0).native_dtypes()
    assert torch.get_num_threads() == 1


def test_the_rank_comes_from_the_launcher(monkeypatch):
    monkeypatch.setitem(os.environ, "RANK", "1")
    assert start_device("v100-16g,t4-16g").name == "t4-16g"


def test_without_emulation_it_is_what_is_there():
    device = start_device(None, 0, 0.5)
    assert not device.is_emulated and device.memory_fraction == 0.5


def test_memory_is_scaled_and_shared(monkeypatch):
    whole = start_device("t4-16g", 0)
    assert whole.memory_limit_bytes == int(T4.usable_memory_bytes * emulation.MEMORY_SCALE)
    assert start_device("t4-16g", 0, memory_fraction=0.15).memory_limit_bytes == int(
        T4.usable_memory_bytes * emulation.MEMORY_SCALE * 0.15
    )
    assert start_device("t4-16g", 0, memory_scale=0.5).memory_limit_bytes == T4.usable_memory_bytes // 2
    with whole.metered(), pytest.raises(torch.OutOfMemoryError, match=r"rank 0 \(emulated t4-16g\) is out of memory"):
        torch.empty(whole.memory_limit_bytes + 1, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("t5-16g", 0), "unknown card 't5-16g'"),
        (("t4-16g:2", 2), "names 2 cards, there is none for rank 2"),
        (("t4-16g", 0, 1.5), "memory_fraction must be"),
        (("t4-16g", 0, None, 0.0), "memory_scale must be"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        start_device(*arguments)


def test_a_rank_cannot_be_sped_up():
    with pytest.raises(ConfigError, match="stretch must be 1 or more"):
        EmulatedDevice(T4, 0, 0.5)


def _train(device: EmulatedDevice | None, num_steps: int = 3) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    recipe = bytes_gpt.bytes_gpt(bytes_gpt.BytesGptConfig(num_layers=1, width=32, seq_len=16))
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = recipe.loss(model, nn.functional.dropout(recipe.probe(4).float(), 0.1).long().clamp(max=255))
        loss.backward()
        if device is not None:
            device.pace()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def test_emulation_changes_no_number():
    torch.set_num_threads(1)
    plain = _train(None)
    device = EmulatedDevice(T4, 0, stretch=1.5)
    with device.metered():
        emulated = _train(device)
    assert emulated[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(emulated[1], plain[1], strict=True))


def test_default_scale_makes_memory_matter_to_the_default_recipe():
    device = start_device("t4-16g", 0)
    recipe = bytes_gpt.recipe
    with device.metered():
        model = recipe.model()
        optimizer = recipe.optimizer(model)
        for _ in range(2):  # the second step has optimizer state from the start
            recipe.loss(model, recipe.probe(4)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert device.peak_bytes() < device.memory_limit_bytes
        with pytest.raises(torch.OutOfMemoryError):
            recipe.loss(model, recipe.probe(17)).backward()

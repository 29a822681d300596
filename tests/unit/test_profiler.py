"""Measuring one rank: the search for the largest batch, times, memory, errors, no trace, the cache; planning on top."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset

import poplar
from poplar.config import ZERO_STAGES
from poplar.errors import ConfigError, InfeasiblePlanError
from poplar.plan import ClusterProfile, Plan, RankProfile
from poplar.profiling.cache import ProfileCache
from poplar.profiling.collectives import balanced_sizes, calibrate
from poplar.profiling.parts import EngineSettings, ProbeBatches
from poplar.profiling.probe import RankProbe
from poplar.profiling.search import LargestSearch
from poplar.profiling.session import ProfileSettings
from poplar.profiling.state import learn_facts
from poplar.profiling.timing import MAX_REPEATS, sizes_to_time, summarize
from poplar.zero.comm import LoopbackComm
from poplar.zero.precision import resolve_precision
from tests.helpers.profiling import (
    STATE_PARAMETERS,
    WIDTH,
    EchoComm,
    FakeDevice,
    ScriptedClock,
    build_model,
    make_recipe,
    mean_square,
    out_of_memory_from,
)

_P = 4 * STATE_PARAMETERS
_QUICK: dict[str, Any] = {"point_budget_s": 0.0, "memory_margin": 0.0, "max_micro_batch_size": 16}


@pytest.fixture(autouse=True, scope="module")
def _quickly() -> Iterator[None]:
    torch.set_num_threads(1)
    poplar.profile(make_recipe(), zero_stage=3, device=FakeDevice(), comm=EchoComm(0, 2), **_QUICK)
    gc.collect()
    gc.freeze()  # so that collecting garbage, which the profiler does often, need not look through all of torch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("poplar.profiling.rehearsal.NUM_VISITS", 1)
        yield
    gc.unfreeze()


def _batch(recipe: Any, size: int) -> Any:
    return ProbeBatches(recipe, FakeDevice()).make(size)


def _search(peak_of: Any, allowed_bytes: int | None, largest_wanted: int) -> tuple[int, list[int]]:
    search, tried = LargestSearch(allowed_bytes, largest_wanted), []
    while (size := search.next_size()) is not None:
        assert size not in tried and 1 <= size <= largest_wanted
        tried.append(size)
        search.record(size, peak_of(size))
    return search.largest, tried


# The search.


@settings(max_examples=200, deadline=None)
@given(
    fixed=st.integers(0, 1000), per_sample=st.integers(1, 50), largest=st.integers(0, 400), wanted=st.integers(1, 500)
)
def test_linear_memory_takes_six_trials(fixed: int, per_sample: int, largest: int, wanted: int) -> None:
    """P20."""
    allowed = fixed + per_sample * largest + per_sample // 2
    found, tried = _search(lambda n: fixed + per_sample * n, allowed, wanted)
    assert found == min(largest, wanted)
    assert len(tried) <= 6


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(st.integers(0, 30), min_size=1, max_size=80), limit=st.integers(0, 1200), hard=st.booleans())
def test_any_growing_memory_ends_with_a_size_that_fits(steps: list[int], limit: int, hard: bool) -> None:
    peaks = np.cumsum(steps).tolist()

    def peak_of(size: int) -> int | None:
        return None if hard and peaks[size - 1] > limit else peaks[size - 1]

    found, tried = _search(peak_of, limit, len(peaks))
    assert found == 0 or (found in tried and peaks[found - 1] <= limit)
    assert len(tried) <= 2 * len(peaks).bit_length() + 4


def test_fragmentation_below_the_line_is_met_by_halving() -> None:
    found, tried = _search(lambda n: 10 * n if n <= 21 else None, 1000, 1000)
    assert found == 21 and len(tried) <= 12


def test_without_a_known_limit_only_running_out_of_memory_ends_growth() -> None:
    assert _search(lambda n: n if n < 11 else None, None, 1000)[0] == 10
    assert _search(lambda n: n, None, 1000)[0] == 1000


def test_a_size_that_fails_later_is_taken_back() -> None:
    search = LargestSearch(100, 100)
    for size in (1, 2, 10):
        search.record(size, 10 * size)
    assert search.largest == 10 and search.next_size() is None
    search.record(10, None)
    assert search.largest == 2 and search.next_size() in range(3, 10)


# Times.


def test_warm_up_finds_its_own_length() -> None:
    """P12."""
    for warm_up in ([], [100.0], [100.0, 30.0], [1000.0, 400.0, 90.0, 20.0, 3.0]):
        timing = summarize([*warm_up, 1.0, 1.02, 0.99, 1.0, 1.02, 0.99])
        assert timing.seconds == 1.0 and timing.is_warm and timing.num_repeats == 6 and timing.is_settled


def test_times_that_disagree_ask_for_more_and_say_so() -> None:
    timing = summarize([1.0, 1.3, 0.9, 1.25])
    assert not timing.is_settled and timing.spread > 0.1
    generator = random.Random(0)
    noisy = summarize([generator.uniform(0.7, 1.3) for _ in range(60)])
    assert noisy.seconds == pytest.approx(1.0, abs=0.1) and noisy.num_repeats >= MAX_REPEATS and noisy.is_settled
    assert summarize([2.0]).seconds == 2.0 and not summarize([2.0]).is_settled


def test_sizes_to_time_are_few_and_end_with_the_largest() -> None:
    assert [sizes_to_time(n) for n in (0, 1, 3, 8, 13)] == [[], [1], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 13]]
    assert all(len(sizes_to_time(n)) <= 13 and sizes_to_time(n)[-1] == n for n in range(1, 4097))


def test_the_undisturbed_quarter_is_what_nothing_slowed_down() -> None:
    disturbed = [1.0, 1.0, 1.4, 1.0, 1.4, 1.4, 1.4]
    assert summarize(disturbed).seconds == 1.4
    assert summarize(disturbed, undisturbed=True).seconds == 1.0
    assert summarize([2.0], undisturbed=True).seconds == 2.0


def _scripted(seconds_of: Any, world_size: int = 1, zero_stage: int = 0, **settings: Any) -> ClusterProfile:
    clock = ScriptedClock(seconds_of)
    recipe = make_recipe(before_loss=clock.pass_time)
    arguments = {**_QUICK, "comm": EchoComm(0, world_size), "device": FakeDevice(clock=clock), **settings}
    return poplar.profile(recipe, zero_stage=zero_stage, **arguments)


@pytest.mark.parametrize("zero_stage", ZERO_STAGES)
def test_points_are_the_seconds_of_a_micro_step(zero_stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_on_cards(taker: Any, profiles: Any, global_batch_size: Any, reference: Any) -> list[ClusterProfile]:
        return [calibrate(taker, one, global_batch_size) for one in profiles]

    monkeypatch.setattr("poplar.profiling.session.rehearse", as_on_cards)
    result = _scripted(lambda size, number: 0.01 + 0.002 * size, world_size=2, zero_stage=zero_stage)
    assert [size for size, _ in result.ranks[0].points] == [1, 2, 4, 8, 16]
    for size, seconds in result.ranks[0].points:
        assert seconds == pytest.approx(0.01 + 0.002 * size)
    assert result.ranks[0].optimizer_step_s == pytest.approx(0, abs=1e-9)
    assert (result.micro_step_collective_s, result.step_collective_s) == pytest.approx((0, 0), abs=1e-9)


def test_slow_first_calls_do_not_colour_the_curve() -> None:
    """P12: every size compiles anew, a hundred times slower."""
    slow = _scripted(lambda size, number: 0.01 * size * (100.0 if number < 2 else 1.0), point_budget_s=1.0)
    assert dict(slow.ranks[0].points) == pytest.approx({size: 0.01 * size for size in (1, 2, 4, 8, 16)})


def test_clock_noise_keeps_plans_sane_and_is_told() -> None:
    generator = random.Random(0)
    result = _scripted(lambda size, number: 0.01 * size * generator.uniform(0.7, 1.3), point_budget_s=1.0)
    for size, seconds in result.ranks[0].points:
        assert seconds == pytest.approx(0.01 * size, rel=0.2)
    assert any("disagree" in note for note in result.notes)
    assert max(spread for _, spread in result.ranks[0].point_spreads) > 0.1
    assert sum(poplar.allocate(result, 24).ranks[0].micro_batch_sizes) == 24


def test_larger_batches_are_not_tried_when_they_would_take_too_long() -> None:
    result = poplar.profile(make_recipe(), zero_stage=0, device=FakeDevice(), stage_budget_s=0.0, comm=EchoComm())
    assert result.ranks[0].max_micro_batch_size == 1 and "stage_budget_s" in result.notes[0]


# Memory.


def _largest(device: FakeDevice, zero_stage: int = 0, **settings: Any) -> RankProfile:
    settings = {**_QUICK, "max_micro_batch_size": 64, **settings}
    return poplar.profile(make_recipe(), zero_stage=zero_stage, device=device, comm=EchoComm(0, 2), **settings).ranks[0]


def _peaks(zero_stage: int, sizes: Iterable[int]) -> dict[int, int]:
    """Return the peak bytes by size where memory is plenty."""
    recipe, device = make_recipe(), FakeDevice()
    settings = EngineSettings(recipe=recipe, precision="fp32")
    probe = RankProbe(settings, ProbeBatches(recipe, device), zero_stage, (0, 2), device)
    peaks = {size: probe.trial(size) for size in sizes}
    probe.close()
    return {size: peak for size, peak in peaks.items() if peak is not None}


def test_the_largest_that_fits_is_that_of_trying_every_size() -> None:
    peaks = _peaks(0, range(1, 65))
    distinct = [size for size in range(1, 64) if peaks[size + 1] - peaks[size] > 200]
    for largest in (distinct[0], distinct[len(distinct) // 2], distinct[-1]):
        limit = (peaks[largest] + peaks[largest + 1]) // 2
        found = _largest(FakeDevice(limit))
        assert found.max_micro_batch_size == largest and found.memory_limit_bytes == limit
        assert all(peaks[size] == peak for size, peak in found.memory_points)
    margin = _largest(FakeDevice(peaks[64]), memory_margin=0.02)
    assert margin.max_micro_batch_size == max(size for size, peak in peaks.items() if peak <= int(0.98 * peaks[64]))


def test_where_memory_is_no_question_sizes_are_timed_and_not_tried() -> None:
    found = _largest(FakeDevice())
    assert found.max_micro_batch_size == 64 and [size for size, _ in found.memory_points] == [1, 2]
    assert [size for size, _ in found.points] == [1, 2, 4, 8, 16, 32, 64]
    # Running out of memory against all expectation is met there too.
    recipe = make_recipe(before_loss=out_of_memory_from(11))
    bounded = poplar.profile(recipe, zero_stage=0, device=FakeDevice(), comm=EchoComm(0, 2), **_QUICK)
    assert bounded.ranks[0].max_micro_batch_size == 10


@pytest.mark.parametrize("zero_stage", ZERO_STAGES)
def test_state_by_arithmetic_is_the_state_that_is_held(zero_stage: int) -> None:
    recipe = make_recipe()
    precision = resolve_precision("fp32", [])
    facts = learn_facts(recipe, precision, None)
    expected = {0: 4 * _P, 1: 3 * _P, 2: 2.5 * _P, 3: 2 * _P}[zero_stage]
    assert facts.least_state_bytes(zero_stage, 0.5) == pytest.approx(expected, abs=64)
    measured = _largest(FakeDevice(), zero_stage).state_bytes
    assert measured is not None and expected <= measured <= expected + 1024
    sgd = make_recipe(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert learn_facts(sgd, precision, None).optimizer_bytes == 0
    half = learn_facts(recipe, resolve_precision("bf16", []), None)
    assert (half.param_bytes, half.master_bytes, half.gradient_bytes) == (_P // 2, _P, _P)


def test_memory_share_and_ballast_shrink_the_largest_batch() -> None:
    """H09: a share of the memory; H10: memory that something else in this process holds."""
    memory_bytes = _peaks(0, [64])[64] + 64  # longer steps keep a few more losses
    whole = _largest(FakeDevice(memory_bytes)).max_micro_batch_size
    assert whole == 64
    assert 0 < _largest(FakeDevice(memory_bytes, memory_fraction=0.95)).max_micro_batch_size < whole
    device = FakeDevice(memory_bytes)
    ballast = torch.empty(1 << 14)
    device.track(ballast)
    pressed = _largest(device)
    assert 0 < pressed.max_micro_batch_size < whole
    assert pressed.memory_limit_bytes == memory_bytes - 4 * ballast.numel()
    assert device.allocated_bytes() == 4 * ballast.numel()


@pytest.mark.parametrize("zero_stage", ZERO_STAGES)
def test_the_size_found_trains(zero_stage: int) -> None:
    """P02: with clipping, accumulation and evaluation, in the very memory that it was found in."""
    memory_bytes = _peaks(zero_stage, [64])[64]
    recipe = make_recipe(eval_dataset=lambda: None)
    arguments: dict[str, Any] = {"zero_stage": zero_stage, "comm": EchoComm(0, 2), "max_grad_norm": 1.0}
    device = FakeDevice(memory_bytes)
    found = poplar.profile(recipe, device=device, **_QUICK | {"max_micro_batch_size": 200}, **arguments)
    largest = found.ranks[0].max_micro_batch_size
    assert 48 < largest < 80
    with device.metered():
        with device.uncounted():
            model = recipe.model()
        engine = poplar.initialize(model, recipe.optimizer(model), recipe.loss, device=device, **arguments)
        batch = _batch(recipe, largest)
        for _ in range(5):
            engine.step([batch, batch])
            engine.evaluate([batch])
        with pytest.raises(torch.OutOfMemoryError):
            engine.step([_batch(recipe, 2 * largest)])


# Out of memory, and other errors.


class _FullOptimizer(torch.optim.SGD):
    """Runs out of memory in its step, at a size that the test sets."""

    sizes: list[int] = []

    def step(self, closure: Any = None) -> Any:
        size = max(self.sizes, default=0)
        self.sizes.clear()
        out_of_memory_from(5)(size)
        return super().step(closure)


@pytest.mark.parametrize("zero_stage", ZERO_STAGES)
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_out_of_memory_anywhere_bounds_the_batch_and_leaves_nothing(where: str, zero_stage: int) -> None:
    """P01, P10: a good step afterwards is as good as any."""
    fail, sizes = out_of_memory_from(5), _FullOptimizer.sizes
    held: list[weakref.ref[Any]] = []

    def model() -> nn.Module:
        built = build_model()
        held.append(weakref.ref(built))
        return built

    recipe = {
        "forward": lambda: make_recipe(before_loss=fail, model=model),
        "backward": lambda: make_recipe(in_backward=fail, model=model),
        "optimizer": lambda: make_recipe(
            before_loss=sizes.append,
            optimizer=lambda m: _FullOptimizer(m.parameters(), lr=0.1, momentum=0.9),
            model=model,
        ),
    }[where]()
    device = FakeDevice()
    result = poplar.profile(recipe, zero_stage=zero_stage, device=device, comm=EchoComm(0, 2), **_QUICK)
    assert result.ranks[0].max_micro_batch_size == 4
    assert [size for size, _ in result.ranks[0].points] == [1, 2, 3, 4]
    gc.collect()
    assert device.allocated_bytes() == 0 and not any(reference() for reference in held)
    plain = make_recipe()
    losses = []
    for comm_device in (device, FakeDevice()):
        torch.manual_seed(0)
        module = build_model()
        engine = poplar.initialize(
            module, plain.optimizer(module), mean_square, zero_stage=zero_stage, comm=LoopbackComm(), device=comm_device
        )
        losses.append([engine.step([_batch(plain, 4)]).loss for _ in range(2)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
@pytest.mark.parametrize("smallest", [1, 4])
def test_a_bug_is_not_taken_for_out_of_memory(kind: type[Exception], smallest: int) -> None:
    """P05: nor does it leave anything behind, be it in the first step or in a later one."""

    def fail(size: int) -> None:
        if size >= smallest:
            raise kind("CUDA error: an illegal memory access")

    def text_of_error() -> str:
        try:
            poplar.profile(make_recipe(before_loss=fail), zero_stage=3, device=device, comm=EchoComm(0, 2), **_QUICK)
        except kind as error:
            return str(error)
        return ""

    device = FakeDevice()
    assert text_of_error() == "CUDA error: an illegal memory access"
    gc.collect()
    assert device.allocated_bytes() == 0


@pytest.mark.parametrize("zero_stage", ZERO_STAGES)
def test_running_out_anywhere_in_the_first_step_leaves_nothing(zero_stage: int) -> None:
    """P01: while building, in forward, in backward, in the optimizer's step, wherever the memory ends."""
    recipe = make_recipe()
    settings = EngineSettings(recipe=recipe, precision="fp32")
    told = set()
    for tenths in range(1, 40, 3):
        device = FakeDevice(tenths * _P // 10)
        probe = RankProbe(settings, ProbeBatches(recipe, device), zero_stage, (0, 2), device)
        told.add(probe.prepare())
        assert ("out of memory" in probe.last_out_of_memory) != (True in told)
        probe.close()
        assert device.allocated_bytes() == 0
    assert False in told


def test_a_card_where_no_sample_fits_is_told_with_figures() -> None:
    """P07."""
    recipe = make_recipe(before_loss=out_of_memory_from(1))
    result = poplar.profile(recipe, zero_stage=1, device=FakeDevice(), comm=EchoComm(0, 2), **_QUICK)
    assert result.ranks[0].max_micro_batch_size == 0 and result.ranks[0].points == ()
    assert "rank 0 (fake-1g), stage 1: not one sample fits: tried to allocate 1 too many" in result.notes
    tight = FakeDevice(4 * _P + 10_000)
    small = poplar.profile(make_recipe(), zero_stage=0, device=tight, comm=EchoComm(0, 2), **_QUICK)
    assert "MiB" in small.notes[0] and "not one sample fits" in small.notes[0]
    with pytest.raises(InfeasiblePlanError, match="not one sample fits on any card at stage 0") as caught:
        poplar.allocate(small, 8)
    assert small.notes[0] in str(caught.value)


def test_state_that_cannot_fit_is_ruled_out_before_anything_is_allocated() -> None:
    calls: list[int] = []
    device = FakeDevice(3 * _P)
    recipe = make_recipe(before_loss=calls.append)
    result = poplar.profile(recipe, zero_stage=0, device=device, comm=EchoComm(0, 2), **_QUICK)
    assert not calls and device.peak_bytes() == 0
    assert result.ranks[0].state_bytes == 4 * _P and "misses" in result.notes[0]
    with pytest.raises(InfeasiblePlanError, match=f"{_P} bytes are missing on rank 0"):
        poplar.allocate(result, 8)


class _Overflows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * torch.inf


@pytest.mark.parametrize("zero_stage", ZERO_STAGES)
def test_losses_that_are_not_finite_do_not_keep_the_optimizer_from_stepping(zero_stage: int) -> None:
    steps: list[int] = []

    class Counting(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            steps.append(1)
            return super().step(closure)

    recipe = make_recipe(model=_Overflows, optimizer=lambda model: Counting(model.parameters()))
    result = poplar.profile(recipe, zero_stage=zero_stage, device=FakeDevice(), comm=LoopbackComm(), **_QUICK)
    expected = 4 * 4 * 3 * (WIDTH * WIDTH + WIDTH)
    assert result.ranks[0].state_bytes == pytest.approx(expected, rel=0.01) and len(steps) > 10


def test_a_model_on_meta_has_sane_values_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poplar.profiling.session.rehearse", lambda taker, profiles, *more: list(profiles))

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return build_model()

    seen: list[float] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = mean_square(model, batch)
        if device.alone:
            seen.append(value.item())
        return value

    device = FakeDevice()
    recipe = make_recipe(model=on_meta, loss=loss)
    poplar.profile(recipe, zero_stage=3, device=device, comm=EchoComm(1, 2), **_QUICK)
    assert len(seen) > 10 and all(0 < value < 1 for value in seen)


# No trace.


@pytest.mark.parametrize("zero_stage", ZERO_STAGES)
def test_profiling_leaves_no_trace(zero_stage: int) -> None:
    """Random state of Python, numpy and torch, models and optimizers made before, memory, gradient mode."""
    recipe = make_recipe(before_loss=lambda size: (random.random(), np.random.rand(), torch.rand(1)) and None)
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    frozen = gc.get_freeze_count()
    before = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())
    device = FakeDevice()
    poplar.profile(recipe, zero_stage=zero_stage, device=device, comm=EchoComm(0, 2), **_QUICK)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1]) and random.getstate() == before[2]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.01
    assert device.allocated_bytes() == 0 and torch.is_grad_enabled() and not device.alone
    assert gc.get_freeze_count() == frozen


def test_repeated_calls_start_afresh() -> None:
    """P08."""
    recipe, device = make_recipe(), FakeDevice()
    first = poplar.profile(recipe, zero_stage=1, device=device, comm=EchoComm(0, 2), **_QUICK)
    bounded = poplar.profile(
        recipe, zero_stage=1, device=device, comm=EchoComm(0, 2), **_QUICK | {"max_micro_batch_size": 3}
    )
    again = poplar.profile(recipe, zero_stage=1, device=device, comm=EchoComm(0, 2), **_QUICK)
    found = [result.ranks[0].max_micro_batch_size for result in (first, bounded, again)]
    assert found == [16, 3, 16]
    assert first.ranks[0].memory_points == again.ranks[0].memory_points


# Batches.


class _RareLong(Dataset[Tensor]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(512 if index == 999 else 8, 4)


def test_batches_are_of_the_largest_samples_seen_and_wrap_around() -> None:
    """P18: a rare long sample at the end of a sorted data set."""
    recipe = make_recipe(dataset=_RareLong, collate=torch.stack)
    assert _batch(recipe, 3).shape == (3, 512, 4)
    assert len(_batch(make_recipe(), 100)[0]) == 100
    probed = make_recipe(probe=lambda size: [torch.zeros(size, WIDTH)])
    assert len(_batch(probed, 7)[0]) == 7


# The steps together.


def _rank(per_sample_s: float, largest: int) -> RankProfile:
    points = tuple((size, per_sample_s * size) for size in range(1, largest + 1))
    return RankProfile(device="x", points=points, max_micro_batch_size=largest)


def test_balanced_sizes_take_all_ranks_about_as_long() -> None:
    fast, slow, holder = _rank(0.01, 12), _rank(0.03, 12), RankProfile(device="x", points=(), max_micro_batch_size=0)
    assert balanced_sizes([fast, slow], None) == [12, 4]
    assert balanced_sizes([fast, slow, holder], 12) == [9, 3, 0]
    assert balanced_sizes([fast, slow], 1) == [1, 0]
    assert balanced_sizes([_rank(1.5, 12), slow], None) == [0, 12]
    assert balanced_sizes([_rank(0.5, 12), _rank(0.25, 12)], None) == [4, 8]
    assert balanced_sizes([holder, holder], None) == [0, 0]


def _masked_recipe(masked: Iterable[int], **fields: Any) -> Any:
    """Return a recipe whose weight is a count of samples that are not masked; sample n begins with n."""
    masked = set(masked)

    def weight(batch: Any) -> float:
        return float(sum(int(value) not in masked for value in batch[0][:, 0]))

    def dataset() -> Dataset:
        samples = torch.ones(40, WIDTH)
        samples[:, 0] = torch.arange(40)
        return torch.utils.data.TensorDataset(samples)

    return make_recipe(weight=weight, dataset=dataset, **fields)


def test_samples_whose_labels_are_all_masked_are_not_profiled_with() -> None:
    found = poplar.profile(_masked_recipe({0, 1, 39}), zero_stage=0, device=FakeDevice(), comm=LoopbackComm(), **_QUICK)
    assert found.ranks[0].max_micro_batch_size == 16
    with pytest.raises(ConfigError, match="weight 0.*Recipe.probe"):
        poplar.profile(_masked_recipe(range(40)), zero_stage=0, device=FakeDevice(), comm=LoopbackComm(), **_QUICK)


# The cache.


def _cached(recipe: Any, folder: Path, device: FakeDevice | None = None, **settings: Any) -> ClusterProfile:
    arguments = {**_QUICK, "cache_dir": folder, "comm": EchoComm(0, 2), **settings}
    return poplar.profile(recipe, zero_stage=2, device=device or FakeDevice(), **arguments)


def test_an_earlier_profile_is_taken_until_something_that_matters_changes(tmp_path: Path) -> None:
    calls: list[int] = []
    recipe = make_recipe(before_loss=calls.append)

    def is_measured(*args: Any, **settings: Any) -> bool:
        calls.clear()
        _cached(*args, **settings)
        return bool(calls)

    first = _cached(recipe, tmp_path)
    calls.clear()
    assert _cached(recipe, tmp_path) == first and not calls
    renumbered = FakeDevice()
    renumbered.device_id = "another card of the same kind"
    found = _cached(recipe, tmp_path, renumbered)
    assert not calls and [rank.device_id for rank in found.ranks] == [renumbered.device_id] * 2  # I01
    assert is_measured(recipe, tmp_path, refresh=True)
    assert is_measured(recipe, tmp_path, precision="bf16")
    assert is_measured(recipe, tmp_path, FakeDevice(name="other-1g"))
    assert is_measured(recipe, tmp_path, max_grad_norm=1.0)
    assert is_measured(recipe, tmp_path, max_micro_batch_size=8)
    assert is_measured(recipe, tmp_path, global_batch_size=64)
    assert is_measured(recipe, tmp_path, comm=EchoComm(0, 3))
    assert is_measured(make_recipe(before_loss=calls.append, model=_Overflows), tmp_path)
    assert is_measured(recipe, tmp_path, FakeDevice(first.ranks[0].memory_points[-1][1] - 1))
    assert is_measured(recipe, tmp_path, FakeDevice(memory_fraction=0.5))
    assert is_measured(recipe, tmp_path / "elsewhere")
    assert not is_measured(recipe, tmp_path, max_micro_batch_size=8)


def test_a_profile_that_memory_limited_is_made_anew_where_there_is_more(tmp_path: Path) -> None:
    memory_bytes = _peaks(2, [4])[4] + 64
    small = _cached(make_recipe(), tmp_path, FakeDevice(memory_bytes))
    assert small.ranks[0].max_micro_batch_size < 16
    assert _cached(make_recipe(), tmp_path, FakeDevice(int(memory_bytes * 1.05))) == small
    assert _cached(make_recipe(), tmp_path, FakeDevice(10 * memory_bytes)).ranks[0].max_micro_batch_size == 16


def test_an_earlier_profile_is_kept_as_it_was_corrected_among_new_ones(tmp_path: Path) -> None:
    """Or the next time it would be compared with them at the speed of another day."""

    def found(*zero_stages: int) -> tuple[ClusterProfile, ...]:
        arguments = {**_QUICK, "cache_dir": tmp_path, "comm": EchoComm(0, 2), "device": FakeDevice()}
        return poplar.profile(make_recipe(), zero_stage=zero_stages, **arguments)

    (alone,) = found(2)
    among_others = found(2, 3)
    assert among_others[0] != alone and among_others[0].ranks[0].memory_points == alone.ranks[0].memory_points
    assert found(2, 3) == among_others and found(2) == among_others[:1]


def test_uneven_shards_hold_beside_the_profile_that_they_were_compared_with(tmp_path: Path) -> None:
    facts = learn_facts(make_recipe(), resolve_precision("fp32", []), None)
    settings = ProfileSettings(cache_dir=tmp_path)
    reference = _scripted(lambda size, number: 0.01 * size, world_size=2)

    def cache(reference: ClusterProfile | None) -> ProfileCache:
        return ProfileCache(settings, EchoComm(0, 2), FakeDevice(), facts, "fp32", reference)

    cache(reference).write(reference)
    assert cache(reference).read(0) is not None
    assert cache(reference.scaled(1.1)).read(0) is None and cache(None).read(0) is None


def test_a_damaged_cache_file_is_measured_anew(tmp_path: Path) -> None:
    first = _cached(make_recipe(), tmp_path)
    (path,) = tmp_path.iterdir()
    assert ClusterProfile.from_json(path.read_text()) == first
    path.write_text(path.read_text()[:100])
    assert _cached(make_recipe(), tmp_path).ranks[0].memory_points == first.ranks[0].memory_points
    assert ClusterProfile.from_json(path.read_text()).zero_stage == 2


# Planning.


def test_a_single_rank_has_no_stages_to_choose_from() -> None:
    plan = poplar.make_plan(make_recipe(), 12, comm=LoopbackComm(), point_budget_s=0.0)
    assert plan.zero_stage == 0 and not any("stage 1" in note for note in plan.notes)


def test_make_plan_takes_a_stage_that_fits_and_says_how_the_others_fared() -> None:
    deep = make_recipe(model=lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(16))))
    param_bytes = 4 * 16 * (WIDTH * WIDTH + WIDTH)
    device = FakeDevice(int(2.9 * param_bytes))
    plan = poplar.make_plan(deep, 24, device=device, comm=EchoComm(0, 2), **_QUICK)
    assert isinstance(plan, Plan) and plan.zero_stage in (2, 3) and plan.global_batch_size == 24
    for stage in (0, 1):
        assert any(f"stage {stage}: does not fit" in note and "missing on rank 0" in note for note in plan.notes)
    with pytest.raises(InfeasiblePlanError, match="bytes are missing on rank 0"):
        poplar.make_plan(deep, 24, 1, device=device, comm=EchoComm(0, 2), **_QUICK)
    with pytest.raises(InfeasiblePlanError, match="no stage fits"):
        poplar.make_plan(make_recipe(), 24, device=FakeDevice(1000), comm=EchoComm(0, 2), **_QUICK)


def test_make_plan_works_alone_on_a_plain_cpu_rank() -> None:
    recipe = make_recipe()
    plan = poplar.make_plan(recipe, 12, 1, "equal", comm=LoopbackComm(), point_budget_s=0.0)
    assert plan.strategy == "equal" and sum(plan.ranks[0].micro_batch_sizes) == 12
    model = recipe.model()
    engine = poplar.initialize(model, recipe.optimizer(model), recipe.loss, plan=plan, comm=LoopbackComm())
    batches = [_batch(recipe, size) for size in plan.ranks[0].micro_batch_sizes]
    assert [engine.step(batches).skipped for _ in range(5)] == [False] * 5


@pytest.mark.parametrize(
    "arguments",
    [
        {"zero_stage": 4},
        {"zero_stage": "most"},
        {"zero_stage": ()},
        {"zero_stage": True},
        {"precision": "fp8"},
        {"max_micro_batch_size": 0},
        {"memory_margin": 1.0},
        {"stage_budget_s": -1.0},
        {"refresh": True},
        {"shard_ratios": (0.0, 0.0)},
        {"memory_fraction": 0.5},
        {"no_such_setting": 1},
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        poplar.profile(make_recipe(), device=FakeDevice(), comm=EchoComm(0, 2), **arguments)


def test_make_plan_refuses_wrong_arguments() -> None:
    device, comm = FakeDevice(), EchoComm(0, 2)
    for arguments, name in (((0,), "global_batch_size"), ((8, 7), "zero_stage"), ((8, 0, "best"), "strategy")):
        with pytest.raises(ConfigError, match=name):
            poplar.make_plan(make_recipe(), *arguments, device=device, comm=comm)

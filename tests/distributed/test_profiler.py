"""Measuring on several ranks at once: what happens to one rank neither hangs nor colours the others."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import poplar
from poplar.errors import InfeasiblePlanError, ProfileError
from poplar.plan import ClusterProfile
from poplar.profiling import rehearsal
from poplar.profiling.parts import EngineSettings, ProbeBatches
from poplar.profiling.probe import RankProbe
from poplar.zero.comm import ProcessGroupComm
from tests.helpers.profiling import (
    STATE_PARAMETERS,
    FakeDevice,
    ScriptedClock,
    build_model,
    make_recipe,
    out_of_memory_from,
)
from tests.helpers.spawn import run_ranks

_P = 4 * STATE_PARAMETERS
_SETTINGS: dict[str, Any] = {"point_budget_s": 0.0, "max_micro_batch_size": 16}


def _communicator() -> ProcessGroupComm:
    """Return the ranks' communicator; their steps together are few here, since nobody reads how long they take."""
    rehearsal.NUM_VISITS = 1
    return ProcessGroupComm()


def _by_rank(callbacks: dict[int, Any], rank: int, **more: Any) -> Any:
    return make_recipe(before_loss=callbacks.get(rank), **more)


def _profile_with_trouble_on_one_rank(rank: int, world_size: int) -> dict[str, Any]:
    comm, results = _communicator(), {}

    # P09, P10: out of memory on rank 1 alone from size 4 on, at every stage, in forward and in backward.
    fails = out_of_memory_from(4)
    for where, stages in (("before_loss", (0, 2)), ("in_backward", (1, 3))):
        recipe = make_recipe(**{where: fails}) if rank == 1 else make_recipe()
        results[where] = poplar.profile(recipe, zero_stage=stages, comm=comm, device=FakeDevice(), **_SETTINGS)

    # P13: rank 1 takes 30 ms for a sample that takes the others well under a millisecond.
    slow = _by_rank({1: lambda size: time.sleep(0.03 * size)}, rank)
    results["slow"] = poplar.profile(slow, zero_stage=3, comm=comm, device=FakeDevice(), **_SETTINGS)

    # H09, H10: a share of the memory on rank 0, a ballast on rank 1.
    memory_bytes = 8 * _P
    device = FakeDevice(memory_bytes, memory_fraction=0.95 if rank == 0 else None)
    ballast = torch.empty(int(0.05 * memory_bytes) // 4)
    if rank == 1:
        device.track(ballast)
    results["memory"] = poplar.profile(
        make_recipe(), zero_stage=0, comm=comm, device=device, **_SETTINGS | {"max_micro_batch_size": 400}
    )
    return results


def test_trouble_on_one_rank_stays_there() -> None:
    """P09, P10, P13, H09, H10."""
    by_rank = run_ranks(_profile_with_trouble_on_one_rank, 3, timeout_s=120)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    results = by_rank[0]
    for where, stages in (("before_loss", [0, 2]), ("in_backward", [1, 3])):
        assert [profile.zero_stage for profile in results[where]] == stages
        for profile in results[where]:
            assert [rank.max_micro_batch_size for rank in profile.ranks] == [16, 3, 16]
    quick, slow, other = (dict(rank.points) for rank in results["slow"].ranks)
    # Not its 0.48 s: it has no samples in the steps together, so that its curve is scaled as the others' are.
    assert quick[16] < 0.2 > other[16] and slow[16] > 3 * max(quick[16], other[16])
    limited, pressed, free = (rank.max_micro_batch_size for rank in results["memory"].ranks)
    assert 0 < limited < free and 0 < pressed < free
    assert abs(limited - pressed) <= 2


def _plan_with_a_small_card(rank: int, world_size: int) -> tuple[str, str, list[bool]]:
    """Return plans with shards as they come out and with equal ones, and whether steps of the former were skipped."""
    comm, roomy = _communicator(), FakeDevice()
    # Fixed costs of a micro-step, so that a card gains from larger micro-batches.
    recipe = make_recipe(before_loss=lambda size: time.sleep(0.02 + 0.005 * size))
    probe = RankProbe(EngineSettings(recipe=recipe, precision="fp32"), ProbeBatches(recipe, roomy), 3, (0, 2), roomy)
    peak_bytes = probe.trial(3)
    probe.close()
    assert peak_bytes is not None
    device = FakeDevice(int(peak_bytes / 0.95) if rank == 0 else 1 << 30)
    plans, skipped = [], []
    for ratios in (None, (1.0, 1.0)):
        arguments = _SETTINGS | {"shard_ratios": ratios, "comm": comm, "device": device}
        plans.append(poplar.make_plan(recipe, 24, 3, **arguments))
    model = build_model()
    with device.metered():
        engine = poplar.initialize(model, recipe.optimizer(model), recipe.loss, plan=plans[0], comm=comm, device=device)
        batches = ProbeBatches(recipe, device)
        row = [batches.make(size) if size else None for size in plans[0].ranks[rank].micro_batch_sizes]
        skipped = [engine.step(row).skipped for _ in range(3)]
    return plans[0].to_json(), plans[1].to_json(), skipped


def test_a_card_with_room_holds_the_state_of_a_small_one() -> None:
    """Batches and shards are planned together, measured again, and train within the small card's memory."""
    first, second = run_ranks(_plan_with_a_small_card, 2, timeout_s=90)
    assert first == second
    joint, even = (poplar.Plan.from_json(text) for text in first[:2])
    assert first[2] == [False] * 3
    assert joint.shard_ratios is not None and joint.shard_ratios[0] < 0.5
    assert even.shard_ratios == (0.5, 0.5)
    assert max(joint.ranks[0].micro_batch_sizes) > max(even.ranks[0].micro_batch_sizes)
    assert joint.predicted is not None and even.predicted is not None
    assert joint.predicted.step_s < 0.98 * even.predicted.step_s
    assert any("uneven shards" in note and note.startswith("taken") for note in joint.notes)


def _fail_on_one_rank(rank: int, world_size: int) -> list[tuple[str, str]]:
    device = FakeDevice()

    def fail(size: int) -> None:
        if size >= 2:
            raise ValueError("a bug of the recipe")

    def fail_among_others(size: int) -> None:
        if not device.alone:
            raise ValueError("a bug among others")

    built_alone: list[bool] = []

    def build() -> nn.Module:
        if rank == 1 and any(built_alone) and not device.alone:
            raise ValueError("a bug of the model")
        built_alone.append(device.alone)
        return build_model()

    def build_and_note() -> nn.Module:
        built_alone.append(device.alone)
        return build_model()

    class Fails(torch.optim.AdamW):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += self.param_groups[0]["params"][0].numel() > 1000  # not in a trial of the optimizer
            if rank == 1 and self.steps > 2 and not device.alone:
                raise ValueError("a bug of the optimizer")
            return super().step(closure)

    def collate(samples: list[Any]) -> Any:
        if rank == 1 and any(built_alone) and not device.alone:
            raise ValueError("a bug of the batches")
        return torch.utils.data.default_collate(samples)

    told = []
    for recipe in (
        _by_rank({1: fail}, rank),
        _by_rank({1: fail_among_others}, rank),
        make_recipe(optimizer=lambda model: Fails(model.parameters())),
        make_recipe(model=build),
        make_recipe(model=build_and_note, collate=collate),
    ):
        built_alone.clear()
        try:
            poplar.profile(recipe, comm=_communicator(), device=device, **_SETTINGS)
        except Exception as error:
            told.append((type(error).__name__, str(error)))
    return told


def test_a_bug_on_one_rank_ends_all_and_is_named() -> None:
    """P05, P09: the rank itself raises its own error. Alone; among others, in a late optimizer's step, in building."""
    other, own, third = run_ranks(_fail_on_one_rank, 3, timeout_s=90)
    bugs = ["a bug of the recipe", "a bug among others", "a bug of the optimizer", "a bug of the model"]
    bugs.append("a bug of the batches")
    assert own == [("ValueError", bug) for bug in bugs]
    assert other == third
    where = [
        "failed while being profiled at stage 0",
        "failed in (a step|its first micro-step)",  # the latter where stage 3 is the first that gives it samples
        "failed in a step of all ranks together",
        "could not build the recipe's model and optimizer",
        "failed around the steps of all ranks together",
    ]
    for (error, text), what, bug in zip(other, where, bugs, strict=True):
        assert error == ProfileError.__name__ and re.fullmatch(f"rank 1 {what}: ValueError: {bug}", text)


def _profile_with_other_arguments(rank: int, world_size: int) -> list[str]:
    comm, told = _communicator(), []
    for arguments in (
        [{"zero_stage": (0, 1)}, {"zero_stage": (0, 1, 2, 3)}],
        [{"precision": "fp32"}, {"precision": "auto"}],
        [{"precision": "fp32"}, {"precision": "fp99"}],
    ):
        try:
            poplar.profile(make_recipe(), comm=comm, device=FakeDevice(), **_SETTINGS | arguments[rank])
        except poplar.PoplarError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_arguments_that_differ_by_rank_are_refused_on_all() -> None:
    """What the ranks do together depends on them, so that some would wait for ever."""
    first, second = run_ranks(_profile_with_other_arguments, 2)
    assert first[:2] == second[:2]
    for text in first[:2]:
        assert text.startswith("CommunicationError: the arguments of profiling must be the same on every rank")
    assert first[2].startswith("StepError: rank 1 was given arguments of profiling that are wrong")
    assert second[2].startswith("ConfigError: precision must be one of")


def _plan_and_train(rank: int, world_size: int) -> tuple[list[str], list[bool], str, list[ClusterProfile]]:
    device = FakeDevice(name=f"fake{rank}-1g")
    slow = _by_rank({1: lambda size: time.sleep(0.03 * size)}, rank)
    recipe = replace(slow, scheduler=None)
    plans, skipped = [], []
    rehearsal.NUM_VISITS = 1
    for zero_stage in ("auto", 2):
        # Joins the launcher's group, which is here already.
        plan = poplar.make_plan(recipe, 24, zero_stage, device=device, **_SETTINGS)
        plans.append(plan.to_json())
        model = build_model()
        engine = poplar.initialize(model, recipe.optimizer(model), recipe.loss, plan=plan, device=device)
        batches = ProbeBatches(recipe, device)
        row = [batches.make(size) if size else None for size in plan.ranks[rank].micro_batch_sizes]
        skipped += [engine.step(row).skipped for _ in range(5)]
        engine.close()
    infeasible = ""
    try:
        tight = FakeDevice(3 * _P if rank == 1 else 1 << 30, name="small")
        poplar.make_plan(recipe, 24, 0, device=tight, **_SETTINGS)
    except InfeasiblePlanError as error:
        infeasible = str(error)
    profiles = poplar.profile(recipe, zero_stage=(1, 3), shard_ratios=(0.75, 0.25), device=device, **_SETTINGS)
    return plans, skipped, infeasible, list(profiles)


def test_make_plan_is_the_same_everywhere_and_trains() -> None:
    first, second = run_ranks(_plan_and_train, 2, timeout_s=90)
    assert first == second
    plans, skipped, infeasible, profiles = first
    auto, fixed = (poplar.Plan.from_json(text) for text in plans)
    assert skipped == [False] * 10
    assert fixed.zero_stage == 2 and auto.global_batch_size == 24
    assert [rank.device_id for rank in auto.ranks] == ["fake0-1g:0", "fake1-1g:0"]
    assert auto.ranks[0].num_samples > auto.ranks[1].num_samples
    assert fixed.predicted is not None and fixed.predicted.collective_s > 0
    assert f"{_P} bytes are missing on rank 1 (small)" in infeasible
    for profile, whole in zip(profiles, (2 * _P, 0), strict=True):
        states = [rank.state_bytes - whole for rank in profile.ranks if rank.state_bytes is not None]
        assert states[0] == pytest.approx(3 * states[1], rel=0.01)
        assert profile.shard_ratios == (0.75, 0.25)


def _outgrow_among_others(rank: int, world_size: int) -> ClusterProfile:
    """Rank 1 runs out of memory above 5 samples, but only once it does not run alone."""
    clock = ScriptedClock(lambda size, number: 0.01 * size)
    device = FakeDevice(clock=clock)

    def fail(size: int) -> None:
        clock.pass_time(size)
        if rank == 1 and not device.alone and size > 5:
            raise torch.OutOfMemoryError("buffers of the collectives")

    recipe = make_recipe(before_loss=fail)
    return poplar.profile(recipe, zero_stage=2, comm=_communicator(), device=device, **_SETTINGS)


def test_a_batch_that_fits_alone_but_not_among_others_is_taken_back() -> None:
    first, second = run_ranks(_outgrow_among_others, 2)
    assert first == second
    assert first.ranks[0].max_micro_batch_size == 16 and first.ranks[1].max_micro_batch_size == 5
    assert first.ranks[1].points[-1][0] <= 5 and first.step_collective_s >= 0
    (note,) = (note for note in first.notes if "ran out of memory" in note)
    assert note.startswith("rank 1 (fake-1g), stage 2:") and note.endswith("it gets 5 at most")

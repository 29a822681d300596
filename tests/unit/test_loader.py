"""The planned loader: which samples every rank gets, where it resumes, and what it leaves alone."""

from __future__ import annotations

import random
import traceback
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from poplar.errors import CheckpointError, ConfigError, PlanMismatchError, PoplarError
from poplar.loader import PlannedLoader, cut_global_batch, eval_batches, split_batch
from poplar.plan import Plan

quick = settings(max_examples=60, deadline=None)
# From 3.12 on Python warns of any fork in a process with threads; torch's workers are forked.
with_workers = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")

micro_batch_rows = st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=4).filter(
    lambda rows: sum(map(sum, rows)) > 0
)


@st.composite
def plans(draw, global_batch_size: int | None = None) -> Plan:
    """Any plan; with a size, that global batch split at random over ranks and micro-steps."""
    zero_stage = draw(st.sampled_from([0, 3]))
    if global_batch_size is None:
        return Plan.manual(draw(micro_batch_rows), zero_stage=zero_stage)
    world_size, micro_steps = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    slots = world_size * micro_steps
    cuts = sorted(draw(st.lists(st.integers(0, global_batch_size), min_size=slots - 1, max_size=slots - 1)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, global_batch_size], strict=True)]
    rows = [sizes[i : i + micro_steps] for i in range(0, slots, micro_steps)]
    return Plan.manual(rows, zero_stage=zero_stage)


class Numbers(Dataset):
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> int:
        return i


class FailsAt(Numbers):
    def __init__(self, length: int, bad: int) -> None:
        super().__init__(length)
        self.bad = bad

    def __getitem__(self, i: int) -> int:
        if i == self.bad:
            raise OSError(f"sample {i} cannot be read")
        return i


class Draws(Numbers):
    """Sample i is what its worker's random state gives."""

    def __getitem__(self, i: int) -> float:
        return float(torch.rand(()))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def loaders(length: int, plan: Plan, **settings) -> list[PlannedLoader]:
    return [PlannedLoader(Numbers(length), plan, rank, collate=list, **settings) for rank in range(plan.world_size)]


def one_epoch(ranks: list[PlannedLoader]) -> list[list[list[list[int] | None]]]:
    """Return the steps of an epoch, each as one row of micro-batches by rank; fails if ranks differ in steps."""
    return [list(step) for step in zip(*ranks, strict=True)]


def flat(step: list[list[list[int] | None]]) -> list[int]:
    return [i for row in step for micro_batch in row for i in micro_batch or ()]


def sizes_of(step: list[list[list[int] | None]]) -> list[list[int]]:
    return [[len(micro_batch or ()) for micro_batch in row] for row in step]


# --- the split of a smaller global batch


@quick
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_split_batch_is_the_proportional_share_rounded(sizes, data):
    total = sum(sizes)
    num_samples = data.draw(st.integers(0, total))
    shares = split_batch(sizes, num_samples)
    assert sum(shares) == num_samples
    for size, share in zip(sizes, shares, strict=True):
        quota = Fraction(size * num_samples, total) if total else Fraction(0)
        assert 0 <= share <= size
        assert abs(share - quota) < 1
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i], -i))
    assert [shares[i] for i in order] == sorted(shares), "a larger size never gets less; ties go to the earlier entry"


def test_split_batch_refuses_what_does_not_fit():
    assert split_batch([3, 5], 8) == [3, 5]
    assert split_batch([3, 3, 2], 4) == [2, 1, 1]
    for num_samples in (-1, 9):
        with pytest.raises(ConfigError, match=f"cannot split {num_samples} samples over sizes that hold 0 to 8"):
            split_batch([3, 5], num_samples)


@quick
@given(plans(), st.data())
def test_cut_global_batch_keeps_the_shape_and_the_ranks_proportions(plan, data):
    num_samples = data.draw(st.integers(0, plan.global_batch_size))
    rows = cut_global_batch(plan, num_samples)
    assert [sum(row) for row in rows] == split_batch([rank.num_samples for rank in plan.ranks], num_samples)
    for row, rank in zip(rows, plan.ranks, strict=True):
        assert len(row) == len(rank.micro_batch_sizes)
        assert all(0 <= size <= planned for size, planned in zip(row, rank.micro_batch_sizes, strict=True))


def test_many_small_micro_steps_keep_their_part_beside_one_large():
    # Rounded micro-step by micro-step, rank 0 would get nothing: each of its quotas is the smallest.
    plan = Plan.manual([[1] * 8, [4, 4]])
    assert cut_global_batch(plan, 2) == [(1,) + (0,) * 7, (1, 0)]


# --- which samples


@quick
@given(st.data(), st.integers(1, 12), st.integers(1, 40), st.booleans(), st.booleans())
def test_h11_l01_l09_l10_global_batches_do_not_depend_on_the_plan(data, size, length, shuffle, drop_last):
    """The k-th global batch is the same sequence for any plan; an epoch is every sample once."""
    assume(length >= size or not drop_last)
    settings = {"shuffle": shuffle, "drop_last": drop_last, "seed": 3}
    (alone,) = loaders(length, Plan.manual([size]), **settings)
    plan = data.draw(plans(global_batch_size=size))
    ranks = loaders(length, plan, **settings)
    for _ in range(2):
        expected = [flat([step]) for step in alone]
        steps = one_epoch(ranks)
        assert [flat(step) for step in steps] == expected
        assert len(steps) == len(ranks[0]) == len(alone)
        seen = [i for batch in expected for i in batch]
        assert len(set(seen)) == len(seen) == (length - length % size if drop_last else length)
        for step in steps:
            for row, planned in zip(sizes_of(step), plan.ranks, strict=True):
                assert len(row) == len(planned.micro_batch_sizes)
                assert all(a <= b for a, b in zip(row, planned.micro_batch_sizes, strict=True))
        assert all(micro_batch != [] for step in steps for row in step for micro_batch in row), "idle is None"


@pytest.mark.parametrize("rows", [[[3], [2]], [[5]], [[3], [1], [1]], [[2, 1], [1, 1]], [[5], [0]]])
def test_h25_h23_101_samples_are_21_steps_for_any_split(rows):
    """Steps, and with them a learning-rate schedule, follow from the global batch size alone."""
    steps = one_epoch(loaders(101, Plan.manual(rows)))
    assert len(steps) == 21
    assert sizes_of(steps[0]) == rows
    assert sorted(i for step in steps for i in flat(step)) == list(range(101))


@pytest.mark.parametrize("by_hand", [[24, 12, 16, 24], {3: 24, 1: 12, 2: 16, 0: 24}])
def test_h05_batches_given_by_hand_are_the_batches_of_the_ranks(by_hand):
    plan = Plan.manual(by_hand)
    step = one_epoch(loaders(76, plan))[0]
    assert sizes_of(step) == [[24], [12], [16], [24]]
    assert sum(Fraction(rank.num_samples, plan.global_batch_size) for rank in plan.ranks) == 1


def test_l02_l10_the_last_step_is_short_and_keeps_its_micro_steps():
    plan = Plan.manual([[2, 2], [1, 1]], zero_stage=3)
    assert sizes_of(one_epoch(loaders(14, plan))[-1]) == [[1, 0], [1, 0]]
    assert one_epoch(loaders(13, plan, shuffle=False))[-1] == [[[12], None], [None, None]]


def test_l04_drop_last_drops_the_end_of_the_whole_sequence():
    plan = Plan.manual([2, 2, 2, 2])
    for shuffle in (False, True):
        whole = [i for step in one_epoch(loaders(9, plan, shuffle=shuffle)) for i in flat(step)]
        kept = [i for step in one_epoch(loaders(9, plan, shuffle=shuffle, drop_last=True)) for i in flat(step)]
        assert kept == whole[:8]
        assert sorted(whole) == list(range(9))


def test_l01_fewer_samples_than_a_global_batch_are_one_short_step():
    steps = one_epoch(loaders(3, Plan.manual([[4], [4]])))
    assert len(steps) == 1
    assert sorted(flat(steps[0])) == [0, 1, 2]
    with pytest.raises(PlanMismatchError, match="3 samples, fewer than one global batch of 8") as caught:
        loaders(3, Plan.manual([[4], [4]]), drop_last=True)
    assert "\n" not in str(caught.value)


def test_every_epoch_and_every_seed_has_its_own_order():
    plan = Plan.manual([50])
    orders = set()
    for seed in (0, 1, 2**40):
        (loader,) = loaders(50, plan, seed=seed)
        orders |= {tuple(flat([step])) for _ in range(3) for step in loader}
    assert len(orders) == 9
    (unshuffled,) = loaders(50, plan, shuffle=False)
    assert [flat([step]) for _ in range(2) for step in unshuffled] == [list(range(50))] * 2


def test_an_empty_row_gives_empty_steps():
    assert list(loaders(5, Plan.manual([[2], []]))[1]) == [[], [], []]


# --- random states


def global_random_states() -> tuple:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


@with_workers
@pytest.mark.parametrize("num_workers", [0, 1])
def test_c17_global_random_states_are_neither_read_nor_changed(num_workers):
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = global_random_states()
        (loader,) = loaders(20, Plan.manual([8]), num_workers=num_workers)
        orders.append([flat([step]) for step in loader])
        assert global_random_states() == before
    assert orders[0] == orders[1]


@with_workers
def test_z41_workers_draw_by_seed_epoch_and_rank():
    plan = Plan.manual([2, 2])

    def draws(rank: int, seed: int = 0) -> list[tuple[float, ...]]:
        loader = PlannedLoader(Draws(4), plan, rank, collate=tuple, seed=seed, num_workers=1)
        return [step[0] for _ in range(2) for step in loader]

    assert draws(0) == draws(0)
    assert len({*draws(0), *draws(1), *draws(0, seed=1)}) == 6


# --- the position


@quick
@given(st.data(), st.integers(1, 30), st.integers(0, 40))
def test_l12_any_loader_goes_on_at_the_next_sample(data, length, steps_before):
    """The state of any rank resumes every rank of another plan, world size and global batch size."""
    plan, other = data.draw(plans()), data.draw(plans())
    ranks = loaders(length, plan, seed=1)
    done = 0
    while done < steps_before:
        for _ in zip(range(steps_before - done), ranks[0], strict=False):
            done += 1
    for loader in ranks[1:]:
        loader.load_state_dict(ranks[0].state_dict())
    state = ranks[0].state_dict()
    assert all(loader.state_dict() == state for loader in ranks)
    resumed = loaders(length, other, seed=1)
    for loader in resumed:
        loader.load_state_dict(state)
    expected = [i for step in one_epoch(ranks) for i in flat(step)]
    assert [i for step in one_epoch(resumed) for i in flat(step)] == expected
    after = [i for step in one_epoch(ranks) for i in flat(step)]
    assert [i for step in one_epoch(resumed) for i in flat(step)] == after
    assert sorted(after) == list(range(length))


def test_l12_the_state_is_global_and_plain():
    ranks = loaders(10, Plan.manual([3, 1]), seed=7)
    for loader in ranks:
        next(iter(loader))
    expected = {"version": 1, "seed": 7, "shuffle": True, "dataset_length": 10, "epoch": 0, "num_samples": 4}
    assert [loader.state_dict() for loader in ranks] == [expected] * 2


def test_the_position_in_a_loop_and_after_it():
    (loader,) = loaders(5, Plan.manual([2]))
    positions = [(loader.state_dict()["epoch"], loader.state_dict()["num_samples"]) for _ in loader]
    assert positions == [(0, 2), (0, 4), (0, 5)]
    assert (loader.epoch, loader.state_dict()["num_samples"]) == (1, 0)


def test_a_break_is_continued_and_the_end_begins_the_next_epoch():
    (loader,) = loaders(6, Plan.manual([2]), shuffle=False)
    for _ in loader:
        break
    assert [flat([step]) for step in loader] == [[2, 3], [4, 5]]
    assert loader.epoch == 1
    for step in loader:
        if flat([step]) == [4, 5]:
            break
    assert loader.epoch == 2
    assert len(list(loader)) == 3, "nothing was left of epoch 1: a whole epoch 2"
    assert loader.epoch == 3


def test_a_state_saved_at_the_last_step_resumes_at_the_next_epoch():
    plan = Plan.manual([2])
    (loader,) = loaders(5, plan)
    for _ in loader:
        state = loader.state_dict()
    (resumed,) = loaders(5, plan)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert resumed.epoch == 1
    assert list(resumed) == list(loader)


def test_set_epoch_goes_to_its_beginning_and_keeps_a_resumed_middle():
    plan = Plan.manual([2])
    (loader,), (fresh,) = loaders(6, plan), loaders(6, plan)
    epochs = [list(fresh) for _ in range(3)]
    loader.set_epoch(2)
    assert list(loader) == epochs[2]
    loader.set_epoch(1)
    next(iter(loader))
    loader.set_epoch(1)
    assert list(loader) == epochs[1][1:]
    loader.set_epoch(0)
    for _ in zip(range(3), loader, strict=False):
        pass
    loader.set_epoch(0)
    assert list(loader) == epochs[0], "asked for again behind its last step, it is begun again"
    for bad in (-1, 1.0, True):
        with pytest.raises(ConfigError, match="epoch must be an integer, 0 or more"):
            loader.set_epoch(bad)


def test_p11_a_new_plan_in_the_loop_cuts_from_the_next_sample_on():
    ranks = loaders(20, Plan.manual([4, 2]), shuffle=False)
    seen = []
    for number, step in enumerate(zip(*ranks, strict=True)):
        seen.append(flat(list(step)))
        if number == 1:
            for loader in ranks:
                loader.set_plan(Plan.manual([1, 4]))
    assert seen == [[*range(6)], [*range(6, 12)], [*range(12, 17)], [17, 18, 19]]
    assert sizes_of(one_epoch(ranks)[0]) == [[1], [4]]


def test_a_new_plan_that_leaves_less_than_a_global_batch_ends_a_dropping_epoch():
    (loader,) = loaders(10, Plan.manual([4]), drop_last=True)
    for number, _ in enumerate(loader):
        if number == 0:
            loader.set_plan(Plan.manual([8]))
    assert number == 0
    assert loader.epoch == 1
    with pytest.raises(PlanMismatchError, match="fewer than one global batch of 11"):
        loader.set_plan(Plan.manual([11]))
    assert loader.plan.global_batch_size == 8


def test_a_loaded_position_in_the_loop_counts_from_the_next_step_on():
    (loader,) = loaders(6, Plan.manual([2]), shuffle=False)
    state = loader.state_dict()
    seen = []
    for step in loader:
        seen += flat([step])
        if len(seen) == 6:
            loader.load_state_dict(state)
    assert seen == [*range(6), *range(6)]


@with_workers
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_workers_give_the_same_and_count_only_what_was_yielded(persistent_workers):
    plan = Plan.manual([[3, 0, 1], [2, 2, 0]], zero_stage=3)
    settings = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": persistent_workers, "seed": 5}
    (loader, _), (plain, _) = loaders(30, plan, **settings), loaders(30, plan, seed=5)
    for rest in (loader, plain):
        next(iter(rest))
    assert loader.state_dict() == plain.state_dict()
    for _ in range(2):
        assert list(loader) == list(plain)
    next(iter(loader))
    for rest in (loader, plain):
        rest.set_plan(Plan.manual([[1, 2], [3, 0]]))
    next(iter(plain))
    plain.load_state_dict(loader.state_dict())
    assert list(loader) == list(plain), "prefetched for the old plan, cut anew for the new one"


@with_workers
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_unreadable_sample_raises_and_the_position_stays_before_it(num_workers):
    dataset = FailsAt(8, bad=5)
    loader = PlannedLoader(dataset, Plan.manual([[1, 1]]), 0, list, shuffle=False, num_workers=num_workers)
    seen = []
    for _ in range(2):
        with pytest.raises(OSError, match="sample 5 cannot be read") as caught:
            for step in loader:
                seen += flat([step])
        assert loader.state_dict()["num_samples"] == 4
        # The exception that torch raises refers to itself. Left to the cycle collector, the workers take 5 s to end.
        traceback.clear_frames(caught.tb)
    assert seen == [0, 1, 2, 3], "tried again, it fails at the same step and skips nothing"


# --- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed 1, this loader has 0"),
        ({"shuffle": False}, "shuffle False, this loader has True"),
        ({"dataset_length": 11}, "dataset_length 11, this loader has 10"),
        ({"version": 2}, "version 2, this loader has 1"),
        ({"num_samples": 11}, "0 to 10 samples, got epoch 0 and 11 samples"),
        ({"num_samples": -1}, "damaged"),
        ({"epoch": "0"}, "damaged"),
    ],
)
def test_a_state_of_another_loader_is_refused(change, message):
    (loader,) = loaders(10, Plan.manual([4]))
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(CheckpointError, match=message):
        loader.load_state_dict({**state, **change})
    del state["epoch"]
    with pytest.raises(CheckpointError, match="lacks 'epoch'"):
        loader.load_state_dict(state)
    assert loader.state_dict()["num_samples"] == 4, "a refused state changes nothing"


@pytest.mark.parametrize(
    ("dataset", "settings", "error", "message"),
    [
        (Stream(), {}, ConfigError, "dataset must be map-style.*got Stream"),
        (Numbers, {}, ConfigError, "dataset must be map-style.*got Numbers"),
        (lambda: Numbers(4), {}, ConfigError, "dataset must be map-style.*got function"),
        (Numbers(0), {}, ConfigError, "the data set is empty"),
        (Numbers(4), {"seed": -1}, ConfigError, "seed must be an integer"),
        (Numbers(4), {"rank": "0"}, ConfigError, "rank must be an integer"),
        (Numbers(4), {"rank": 2}, PlanMismatchError, "rank 2 has no row in the plan, which is for 2 ranks"),
        (Numbers(4), {"plan": [2, 2]}, ConfigError, "plan must be a poplar.Plan, got list"),
        (Numbers(4), {"batch_size": 2}, ConfigError, "no option 'batch_size'"),
        (Numbers(4), {"persistent_workers": True}, ConfigError, "needs num_workers > 0"),
    ],
)
def test_wrong_arguments_are_one_clear_line(dataset, settings, error, message):
    with pytest.raises(error, match=message) as caught:
        PlannedLoader(**{"dataset": dataset, "plan": Plan.manual([2, 2]), "rank": 0, **settings})
    assert isinstance(caught.value, PoplarError)
    assert "\n" not in str(caught.value)


def test_the_rank_is_the_process_groups_else_the_environments_else_0(monkeypatch):
    plan = Plan.manual([1, 2, 3])
    monkeypatch.delenv("RANK", raising=False)

    def own_size(loader: PlannedLoader) -> int:
        return sizes_of([next(iter(loader))])[0][0]

    built_before = PlannedLoader(Numbers(12), plan, collate=list)
    assert own_size(PlannedLoader(Numbers(12), plan, collate=list)) == 1
    monkeypatch.setenv("RANK", "1")
    assert own_size(PlannedLoader(Numbers(12), plan, collate=list)) == 2
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="RANK must be an integer; got 'first'"):
        PlannedLoader(Numbers(12), plan)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    assert own_size(built_before) == 3, "the group was joined after the loader was built"
    assert own_size(PlannedLoader(Numbers(12), plan, 0, list)) == 1
    with pytest.raises(PlanMismatchError, match="the plan is for 2 ranks, this run has 3"):
        PlannedLoader(Numbers(12), Plan.manual([1, 2]))


# --- evaluation


@quick
@given(plans(), st.integers(1, 40))
def test_l06_l08_evaluation_meets_every_sample_once_in_aligned_micro_steps(plan, length):
    ranks = [list(eval_batches(Numbers(length), plan, rank, list)) for rank in range(plan.world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    for batches, rank in zip(ranks, plan.ranks, strict=True):
        assert all(len(batch) <= max(rank.micro_batch_sizes) for batch in batches if batch is not None)
    assert sorted(i for batches in ranks for batch in batches for i in batch or ()) == list(range(length))
    assert all(any(micro_step) for micro_step in zip(*ranks, strict=True)), "no micro-step is idle on all ranks"


def test_l08_one_held_out_sample_on_two_ranks_is_one_micro_step_on_both():
    plan = Plan.manual([[4, 4], [2, 2]], zero_stage=3)
    assert [list(eval_batches(Numbers(1), plan, rank, list)) for rank in (0, 1)] == [[[0]], [None]]
    with pytest.raises(ConfigError, match="the data set is empty"):
        eval_batches(Numbers(0), plan, 0)


def test_default_collate_makes_tensors():
    loader = PlannedLoader(Numbers(4), Plan.manual([4]), 0, shuffle=False)
    assert next(iter(loader))[0].tolist() == [0, 1, 2, 3]

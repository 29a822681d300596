"""Communicators without peers: what fits, what loopback answers, who is matched with whom."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from poplar.errors import CommunicationError, ConfigError, ShapeError, StepError
from poplar.zero.comm import (
    LoopbackComm,
    ProcessGroupComm,
    check_fits,
    check_same,
    launcher_environment,
    raise_together,
)
from poplar.zero.debug import CheckedComm
from poplar.zero.flat import shard_offsets
from poplar.zero.transport import Messages

quick = settings(max_examples=60, deadline=None)
RATIOS = st.lists(st.sampled_from([0.0, 1.0, 3.5]), min_size=1, max_size=5).filter(any)


# Shapes and offsets.


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [((6,), [0, 3]), ((6,), [0, 3, 5]), ((6,), [1, 3, 6]), ((2, 3), [0, 3, 6]), ((6,), [0, 2, 4, 6])],
)
def test_offsets_that_do_not_fit_are_told_with_both_lengths(shape: tuple[int, ...], offsets: list[int]) -> None:
    """Z45: a size that differs from the plan is an error before anything is sent."""
    comm = LoopbackComm(0, 2)
    for call in (comm.all_gather, comm.reduce_scatter):
        with pytest.raises(ShapeError, match=r"expected a 1D buffer .* got shape .* and offsets"):
            call(torch.zeros(shape), offsets)


def test_offsets_that_fit_pass() -> None:
    check_fits(torch.zeros(6), [0, 0, 6], 2)
    check_fits(torch.zeros(0), [0, 0, 0], 2)


# Loopback: the buffers and the answers of a group, without one.


@quick
@given(numel=st.integers(0, 40), ratios=RATIOS, data=st.data())
def test_loopback_fills_the_others_parts_with_finite_values_and_leaves_its_own(
    numel: int, ratios: list[float], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, len(ratios) - 1))
    offsets = shard_offsets(numel, ratios)
    full = torch.full((offsets[-1],), float("nan"))
    own = slice(offsets[rank], offsets[rank + 1])
    full[own] = torch.arange(1.0, own.stop - own.start + 1)
    LoopbackComm(rank, len(ratios)).all_gather(full, offsets).wait()
    assert torch.equal(full[own], torch.arange(1.0, own.stop - own.start + 1))
    assert torch.isfinite(full).all()
    if own.stop > own.start:
        assert full.min() >= 1 and full.max() <= own.stop - own.start, "copies of the own shard"


def test_loopback_holds_what_would_arrive_until_it_is_waited_for() -> None:
    """The profiler's memory is that of a real reduction: (world_size - 1) shards while it is under way."""
    from poplar.memory_meter import MemoryMeter

    full = torch.ones(30)
    meter = MemoryMeter()
    with meter:
        work = LoopbackComm(1, 3).reduce_scatter(full, [0, 10, 20, 30])
        assert meter.live_bytes == 2 * 10 * 4
        work.wait()
        assert meter.live_bytes == 0
    assert torch.equal(full, torch.ones(30))


def test_loopback_votes_alone() -> None:
    comm = LoopbackComm(1, 3)
    assert comm.gather_floats([2.0, 5.0]) == [[0.0, 0.0], [2.0, 5.0], [0.0, 0.0]]
    assert comm.gather_objects("mine") == [None, "mine", None]
    assert comm.broadcast_object("mine", src=0) == "mine"
    value = torch.ones(3)
    comm.broadcast(value, src=0)
    comm.all_reduce(value).wait()
    comm.barrier()
    assert torch.equal(value, torch.ones(3))
    for rank, world_size in ((2, 2), (-1, 1), (0, 0)):
        with pytest.raises(ConfigError, match=r"rank must be in \[0, "):
            LoopbackComm(rank, world_size)


def test_messages_are_waited_for_once_and_then_acted_on() -> None:
    class Request:
        waits = 0

        def wait(self) -> None:
            self.waits += 1

    requests, acted = [Request(), Request()], []
    work = Messages(requests, lambda: acted.append([request.waits for request in requests]))
    work.wait()
    work.wait()
    assert acted == [[1, 1]] and [request.waits for request in requests] == [1, 1]


# Agreement.


class _Others(LoopbackComm):
    """Rank 0 of two; the other answers what the test says."""

    def __init__(self, failed: float, other: object):
        super().__init__(0, 2)
        self.failed, self.other = failed, other

    def gather_floats(self, values):  # type: ignore[no-untyped-def]
        return [list(values), [self.failed]]

    def gather_objects(self, value):  # type: ignore[no-untyped-def]
        return [value, self.other]


def test_one_ranks_error_is_raised_by_all() -> None:
    raise_together(_Others(0.0, None), None, "could not start")
    with pytest.raises(StepError, match="rank 1 could not start: ValueError: seven"):
        raise_together(_Others(1.0, "ValueError: seven"), None, "could not start")
    with pytest.raises(KeyError, match="own"):
        raise_together(_Others(1.0, "ValueError: seven"), KeyError("own"), "could not start")


def test_values_that_must_be_the_same_name_the_rank_that_differs() -> None:
    check_same(_Others(0.0, [1, 2]), [1, 2], "the plan")
    check_same(LoopbackComm(0, 3), [1, 2], "the plan")
    with pytest.raises(CommunicationError, match=r"the plan must be the same on every rank: rank 0 has 3, rank 1 4"):
        check_same(_Others(0.0, 4), 3, "the plan")


def test_debug_mode_tells_what_each_rank_is_about_to_do() -> None:
    """Z45: another size, dtype, name or order is an error that shows both."""

    class Other(LoopbackComm):
        meant: tuple[object, ...] = ()

        def gather_objects(self, value):  # type: ignore[no-untyped-def]
            return [value, self.meant]

    inner = Other(0, 2)
    comm = CheckedComm(inner)
    full = torch.zeros(4)
    own = ("reduce_scatter", "gradients of a", "torch.float32", (4,), (0, 2, 4))
    inner.meant = own
    comm.reduce_scatter(full, [0, 2, 4], name="gradients of a").wait()
    for place, other in enumerate(("all_gather", "gradients of b", "torch.float64", (6,), (0, 3, 4))):
        inner.meant = (*own[:place], other, *own[place + 1 :])
        with pytest.raises(
            CommunicationError, match=rf"collective {place + 2}: rank 0 is at reduce_scatter.*rank 1 at"
        ):
            comm.reduce_scatter(full, [0, 2, 4], name="gradients of a")
    inner.meant = ("barrier", "", None, (), ())
    comm.barrier()
    with pytest.raises(CommunicationError, match="rank 0 is at gather_floats of a vote"):
        comm.gather_floats([1.0])


# Who starts whom.


def test_launchers_are_told_by_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    slurm = ("PROCID", "NTASKS", "LOCALID", "JOB_ID", "LAUNCH_NODE_IPADDR")
    for name in (*names, *(f"SLURM_{part}" for part in slurm)):
        monkeypatch.delenv(name, raising=False)
    assert launcher_environment() is None
    for part, value in zip(slurm, ("3", "4", "1", "123456", "node7"), strict=True):
        monkeypatch.setenv(f"SLURM_{part}", value)
    found = launcher_environment()
    assert found == dict(zip(names, ("3", "4", "1", "node7", str(20000 + 123456 % 20000)), strict=True))
    monkeypatch.delenv("SLURM_LAUNCH_NODE_IPADDR")
    with pytest.raises(ConfigError, match="MASTER_ADDR must name the host of task 0"):
        launcher_environment()
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert launcher_environment() is None
    for name, value in zip(names, ("0", "2", "0", "host", "1234"), strict=True):
        monkeypatch.setenv(name, value)
    found = launcher_environment()
    assert found is not None and found["MASTER_ADDR"] == "host" and found["WORLD_SIZE"] == "2"


def test_without_a_group_there_is_no_communicator() -> None:
    with pytest.raises(ConfigError, match="there is no process group; start under torchrun"):
        ProcessGroupComm()

"""Shared memory between ranks, which are threads here: any collectives, any sizes, any order of waiting, any end."""

from __future__ import annotations

import gc
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from poplar.errors import CommunicationError
from poplar.zero import shared_memory
from poplar.zero.shared_memory import SharedMemoryTransport, connect

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory is shared so on Linux alone")

SLOT_BYTES = 64
TIMEOUT_S = 20.0


class _Meeting:
    """``gather_objects`` between threads."""

    def __init__(self, world_size: int):
        self._barrier = threading.Barrier(world_size, timeout=TIMEOUT_S)
        self._values: list[Any] = [None] * world_size

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


def _on_ranks(world_size: int, body: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(world_size) as pool:
        return [future.result(timeout=TIMEOUT_S) for future in [pool.submit(body, rank) for rank in range(world_size)]]


def _connected(world_size: int, timeout_s: float = TIMEOUT_S) -> list[SharedMemoryTransport | None]:
    meeting = _Meeting(world_size)
    return _on_ranks(
        world_size, lambda rank: connect(rank, world_size, lambda value: meeting.gather(rank, value), timeout_s)
    )


@contextmanager
def _transports(world_size: int, timeout_s: float = TIMEOUT_S) -> Iterator[list[SharedMemoryTransport]]:
    made = [transport for transport in _connected(world_size, timeout_s) if transport is not None]
    assert len(made) == world_size
    try:
        yield made
    finally:
        for transport in made:
            _end(transport)


def _end(transport: SharedMemoryTransport) -> None:
    for link in transport.links.values():
        link.close()


@pytest.fixture(autouse=True, params=[1, 3])
def _small_outboxes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", SLOT_BYTES)
    monkeypatch.setattr(shared_memory, "NUM_SLOTS", request.param)


_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
_PARTS = st.lists(st.integers(0, 70), min_size=5, max_size=5)
_CALLS = st.lists(st.tuples(st.sampled_from(_KINDS), _PARTS, st.booleans()), min_size=1, max_size=12)


def _offsets(sizes: list[int], world_size: int) -> list[int]:
    return list(accumulate(sizes[:world_size], initial=0))


def _values(rank: int, call: int, numel: int, dtype: torch.dtype) -> Tensor:
    return ((torch.arange(numel) * 7 + call * 3 + rank * 11) % 17).to(dtype)


def _play(transport: SharedMemoryTransport, calls: list[Any], seed: int) -> list[Tensor]:
    """Issue all calls, wait for them in an order of this rank's own, and return what each is to leave."""
    rank, world_size = transport.rank, transport.world_size
    works, results = [], []
    for number, (kind, sizes, is_double) in enumerate(calls):
        offsets = _offsets(sizes, world_size)
        own = slice(offsets[rank], offsets[rank + 1])
        full = _values(rank, number, offsets[-1], torch.float64 if is_double else torch.bfloat16)
        if kind == "broadcast":
            transport.broadcast(full, src=number % world_size)
        elif kind == "all_reduce":
            works.append(transport.all_reduce(full))
        else:
            works.append(getattr(transport, kind)(full, offsets))
        results.append(full[own] if kind == "reduce_scatter" else full)
    random.Random(seed + rank).shuffle(works)
    for work in works:
        work.wait()
        work.wait()  # a second time is nothing
    return results


def _expected(rank: int, world_size: int, calls: list[Any]) -> list[Tensor]:
    expected = []
    for number, (kind, sizes, is_double) in enumerate(calls):
        offsets = _offsets(sizes, world_size)
        dtype = torch.float64 if is_double else torch.bfloat16
        values = [_values(other, number, offsets[-1], dtype) for other in range(world_size)]
        if kind == "broadcast":
            expected.append(values[number % world_size])
        elif kind == "all_gather":
            pieces = [values[r][offsets[r] : offsets[r + 1]] for r in range(world_size)]
            expected.append(torch.cat(pieces))
        else:
            total = torch.stack(values).sum(0)
            expected.append(total if kind == "all_reduce" else total[offsets[rank] : offsets[rank + 1]])
    return expected


@settings(max_examples=60, deadline=None)
@given(world_size=st.integers(2, 5), calls=_CALLS, seed=st.integers(0, 99))
def test_any_collectives_in_flight_give_the_right_values(world_size: int, calls: list[Any], seed: int) -> None:
    with _transports(world_size) as transports:
        results = _on_ranks(world_size, lambda rank: _play(transports[rank], calls, seed))
        for rank, (transport, found) in enumerate(zip(transports, results, strict=True)):
            for value, expected in zip(found, _expected(rank, world_size, calls), strict=True):
                assert torch.equal(value, expected)
            assert not transport._posts and not transport._takes


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bytes_sent_are_those_of_zeros_formulas(world_size: int) -> None:
    numel = 1000 * world_size
    full_bytes = 4 * numel
    offsets = [1000 * rank for rank in range(world_size + 1)]
    share = (world_size - 1) / world_size

    def sent(rank: int) -> list[float]:
        transport, full = transports[rank], torch.zeros(numel)
        counts = []
        for work in (transport.all_gather, transport.reduce_scatter):
            before = transport.sent_bytes
            work(full, offsets).wait()
            counts.append(transport.sent_bytes - before)
        before = transport.sent_bytes
        transport.all_reduce(full).wait()
        return [*counts, transport.sent_bytes - before]

    with _transports(world_size) as transports:
        for counts in _on_ranks(world_size, sent):
            assert counts == [full_bytes * share, full_bytes * share, 2 * full_bytes * share]


def test_sums_are_bitwise_the_same_each_time() -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(999, generator=generator) * 10.0**rank for rank in range(4)]

    def total(rank: int) -> Tensor:
        full = values[rank].clone()
        transports[rank].all_reduce(full).wait()
        return full

    with _transports(4) as transports:
        first, *others = [one for _ in range(5) for one in _on_ranks(4, total)]
        assert all(torch.equal(first, other) for other in others)


def test_a_rank_that_has_ended_is_named_to_those_who_wait_for_it_and_to_nobody_else() -> None:
    with _transports(3) as transports:
        _on_ranks(3, lambda rank: transports[rank].all_gather(torch.zeros(6), [0, 2, 4, 6]).wait())
        _end(transports[2])

        def gather(rank: int) -> None:
            with pytest.raises(CommunicationError, match=f"rank {rank} waits for rank 2 of its group, which has ended"):
                transports[rank].all_gather(torch.zeros(6), [0, 2, 4, 6]).wait()

        _on_ranks(2, gather)
    with _transports(3) as transports:
        # Rank 2 has nothing more to do with the others when it ends.
        _on_ranks(3, lambda rank: transports[rank].reduce_scatter(torch.zeros(4), [0, 2, 4, 4]).wait())
        _end(transports[2])
        transports[0].broadcast(torch.zeros(0), src=1)


def test_what_a_rank_said_before_it_ended_is_heard() -> None:
    with _transports(2) as transports:
        transports[1].all_gather(torch.ones(4), [0, 2, 4])
        _end(transports[1])
        full = torch.zeros(4)
        transports[0].all_gather(full, [0, 2, 4]).wait()
        assert full.tolist() == [0, 0, 1, 1]


def test_a_closed_transport_stays_closed_to_later_works() -> None:
    with _transports(2) as transports:
        _end(transports[1])
        for _ in range(2):
            with pytest.raises(CommunicationError, match="rank 0 waits for rank 1 of its group, which has ended"):
                transports[0].all_gather(torch.zeros(4), [0, 2, 4]).wait()


def test_ranks_at_different_collectives_are_told() -> None:
    with _transports(2) as transports:
        transports[1].all_gather(torch.zeros(6), [0, 2, 6])
        with pytest.raises(CommunicationError, match="rank 0 expected 8 bytes .* from rank 1 .* which sent 16"):
            transports[0].all_gather(torch.zeros(4), [0, 2, 4]).wait()


def test_a_forked_process_does_not_keep_the_sockets_open() -> None:
    with _transports(2) as transports:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)  # until the parent lets go of the other end
            os._exit(0)
        os.close(reader)
        try:
            _end(transports[1])
            with pytest.raises(CommunicationError, match="which has ended"):
                transports[0].all_gather(torch.zeros(4), [0, 2, 4]).wait()
        finally:
            os.close(writer)
            os.waitpid(child, 0)


def test_silence_is_an_error_after_the_timeout() -> None:
    with (
        _transports(2, timeout_s=0.05) as transports,
        pytest.raises(CommunicationError, match=r"rank 0 has waited 0.05 s for ranks \[1\]"),
    ):
        transports[0].all_gather(torch.zeros(4), [0, 2, 4]).wait()


def test_without_room_a_rank_waits_for_its_readers() -> None:
    with (
        _transports(2, timeout_s=0.05) as transports,
        pytest.raises(CommunicationError, match=r"rank 1 has waited 0.05 s for ranks \[0\]"),
    ):
        transports[1].broadcast(torch.zeros(3 * SLOT_BYTES), src=1)


def test_all_ranks_take_another_way_where_one_cannot_take_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shared_memory.DISABLED_BY, "1")
    assert _connected(3) == [None] * 3
    monkeypatch.setenv(shared_memory.DISABLED_BY, "0")
    places = iter([("one host",), ("one host",), ("another",)])
    monkeypatch.setattr(shared_memory, "_place", lambda: next(places))
    assert _connected(3) == [None] * 3

    def hidden() -> tuple[str, ...]:
        raise PermissionError("/proc/sys is not to be read here")

    monkeypatch.setattr(shared_memory, "_place", hidden)
    assert _connected(3) == [None] * 3


def test_a_rank_that_fails_to_connect_hangs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_CONNECT_S", 0.2)
    plain, calls = os.memfd_create, iter(range(99))

    def scarce(name: str) -> int:
        if next(calls) == 1:
            raise OSError("too many open files")
        return plain(name)

    monkeypatch.setattr(os, "memfd_create", scarce)
    before = _num_files()
    assert _connected(3) == [None] * 3
    assert _num_files() == before


def _num_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_connecting_leaves_no_file_open_but_sockets_and_outboxes() -> None:
    before = _num_files()
    for _ in range(3):
        with _transports(3):
            assert _num_files() == before + 3 * (2 + 3)
    assert _num_files() == before


def test_strangers_are_turned_away_and_the_others_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    listening = shared_memory._listen

    def with_stranger(stack: Any) -> Any:
        listener, place = listening(stack)
        stranger = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        stranger.connect(listener.getsockname())  # before anybody else
        return listener, place

    plain, strangers = struct.unpack, []

    def unpack(layout: str, value: bytes) -> Any:
        # What the kernel says of the first to come: rank 1 lets nobody in, so that it is rank 0's stranger.
        if layout == "3i" and not strangers:
            strangers.append(value)
            return 0, os.getuid() + 1, 0
        return plain(layout, value)

    monkeypatch.setattr(shared_memory, "_listen", with_stranger)
    monkeypatch.setattr(shared_memory.struct, "unpack", unpack)
    made = _connected(2)
    assert all(transport is not None for transport in made) and strangers
    for transport in made:
        _end(transport)

"""Messages between the ranks of one host, through memory that they share.

    rank 0                                         rank 1
    outbox 0  [slot][slot] ... [slot]  -------->   reads
    reads                              <--------   outbox 1  [slot][slot] ... [slot]
    socket    <-------------------------------->   socket    a byte for every slot: "posted" there, "taken" back

Every rank writes its own outbox alone, and reads the others'. A message costs one copy in and one copy (or sum) out, by
the thread that asks for it; gloo's way through the loopback device costs several times as much (docs/performance.md).

[Note: streams of chunks]
All ranks issue the same collectives with the same sizes, so each knows, without being told, which chunk of which
message lies in which slot of which outbox: the chunks of a rank's messages, in order, take its slots in turn. A rank
may write a slot again when all readers have taken what was in it. Chunks that find no free slot are posted later: in
any later call, and while the rank waits. Beside every slot stand the number and the size of its chunk, so that ranks
that do not agree after all are told so.

[Note: nobody waits in a circle]
Chunks go out and are taken in one order: by collective, then by chunk, then by rank. Take the first chunk in that order
that is still to be taken. All before it have been taken, so its owner's outbox is empty, and one slot would do.
But nothing moves while a rank is elsewhere: it must not block in another channel (a vote, another group) with a work of
this one not waited for, unless the ranks it blocks for need nothing of that work. Stages wait for all works before they
vote; ``CheckedComm``, which asks between works, and ``HybridComm``, which has two groups, see to it themselves.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poplar.errors import CommunicationError

SLOT_BYTES = 2**20
"""Large enough that bookkeeping is little, small enough to be in the processor's cache when it is read."""
NUM_SLOTS = 8
_LABEL_BYTES = 16
"""Beside every slot: two integers, the number of the chunk in its owner's stream, and its bytes."""
DISABLED_BY = "POPLAR_DISABLE_SHARED_MEMORY"
"""Environment variable: set to 1, ranks of one host talk through gloo, as ranks of several do."""
_CONNECT_S = 20.0
_LONGEST_POLL_MS = 2**31 - 1
_POSTED, _TAKEN = b"p", b"t"

GatherObjects = Callable[[Any], list[Any]]
Message = tuple[int, tuple[int, ...], int]
"""The rank that posts, those that take, and the part of the whole buffer that it is about."""


class SharedWork:
    """A collective on its way; done when this rank has posted and taken all that it has to."""

    def __init__(self, transport: SharedMemoryTransport):
        self._transport = transport
        self.num_left = 0

    def wait(self) -> None:
        """Return when the result is in place.

        Raises:
            CommunicationError: a rank that this one waits for has ended, or nothing came for too long.
        """
        self._transport.complete(self)


@dataclass(slots=True)
class _Post:
    work: SharedWork
    source: Tensor
    readers: tuple[int, ...]
    number: int
    """Of the chunk in its owner's stream."""
    after: int
    """So many takes must have come first, since they make what is posted."""


@dataclass(slots=True)
class _Take:
    work: SharedWork
    target: Tensor
    owner: int
    number: int
    adds: bool


class Outbox:
    """What one rank writes and the others read.

    Attributes:
        slots: (NUM_SLOTS, SLOT_BYTES), uint8.
        labels: (NUM_SLOTS, 2), int64: number and bytes of the chunk that lies in each slot.
    """

    def __init__(self, descriptor: int):
        memory = mmap.mmap(descriptor, outbox_bytes())
        self.slots = torch.frombuffer(memory, dtype=torch.uint8, count=NUM_SLOTS * SLOT_BYTES)
        self.slots = self.slots.view(NUM_SLOTS, SLOT_BYTES)
        self.labels: NDArray[np.int64] = np.frombuffer(memory, np.int64, offset=NUM_SLOTS * SLOT_BYTES).reshape(-1, 2)

    def chunk(self, number: int, like: Tensor) -> Tensor:
        """Return the place of a chunk, as a tensor of the shape and dtype of ``like`` (1D)."""
        return self.slots[number % NUM_SLOTS, : like.nbytes].view(like.dtype)


def outbox_bytes() -> int:
    return NUM_SLOTS * (SLOT_BYTES + _LABEL_BYTES)


_transports: weakref.WeakSet[SharedMemoryTransport] = weakref.WeakSet()


def _close_links() -> None:
    for transport in _transports:
        for link in transport.links.values():
            link.close()


# Processes forked to load data would keep the sockets of a rank that has ended open, and nobody would notice its end.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_links)


class SharedMemoryTransport:
    """Collectives between ranks that are connected by ``connect``.

    Sums are made in one order of ranks, so that a repeated run is bitwise the same.

    Args:
        rank: this one.
        outboxes: by rank.
        links: a socket to every other rank.
        timeout_s: longest silence while this rank waits.

    Attributes:
        sent_bytes: bytes of the messages posted so far, for each reader once.
    """

    name = "shared memory"

    def __init__(self, rank: int, outboxes: Sequence[Outbox], links: dict[int, socket.socket], timeout_s: float):
        self.rank = rank
        self.world_size = len(outboxes)
        self.sent_bytes = 0
        self.links = links
        self._outboxes = outboxes
        self._timeout_s = timeout_s
        self._failure: Exception | None = None
        self._gone: set[int] = set()
        self._poll = select.poll()
        for link in links.values():
            link.setblocking(False)
            self._poll.register(link, select.POLLIN)
            weakref.finalize(self, link.close)
        _transports.add(self)
        self._num_planned = [0] * self.world_size  # chunks of each rank's stream, posted or to be posted
        self._num_takes_planned = self._num_taken = 0
        self._posts: deque[_Post] = deque()
        self._takes: deque[_Take] = deque()
        self._num_arrived = dict.fromkeys(links, 0)  # posted to this rank and not yet taken
        self._num_unread = [0] * NUM_SLOTS  # readers that have not yet taken what lies in the own slot
        self._in_reading: dict[int, deque[int]] = {peer: deque() for peer in links}  # own slots that a peer is to take
        ranks = range(self.world_size)
        # Every rank begins with its right neighbour, so that no rank is everybody's first target.
        others = [tuple((owner + step) % self.world_size for step in range(1, self.world_size)) for owner in ranks]
        self._others = others
        self._gather_messages: list[Message] = [(owner, others[owner], owner) for owner in ranks]
        self._reduce_messages: list[Message] = [(owner, (peer,), peer) for owner in ranks for peer in others[owner]]

    def all_gather(self, full: Tensor, offsets: Sequence[int]) -> SharedWork:
        work = SharedWork(self)
        self._plan(work, full, offsets, self._gather_messages)
        self._progress()
        return work

    def reduce_scatter(self, full: Tensor, offsets: Sequence[int]) -> SharedWork:
        work = SharedWork(self)
        self._plan(work, full, offsets, self._reduce_messages, adds=True)
        self._progress()
        return work

    def all_reduce(self, full: Tensor) -> SharedWork:
        """Sum by parts, one for each rank, and gather the sums."""
        work = SharedWork(self)
        full = full.view(-1)
        offsets = [full.numel() * rank // self.world_size for rank in range(self.world_size + 1)]
        self._plan(work, full, offsets, self._reduce_messages, adds=True)
        self._plan(work, full, offsets, self._gather_messages, after=self._num_takes_planned)
        self._progress()
        return work

    def broadcast(self, tensor: Tensor, src: int) -> None:
        work = SharedWork(self)
        self._plan(work, tensor.view(-1), [0, tensor.numel()], [(src, self._others[src], 0)])
        work.wait()

    def complete(self, work: SharedWork) -> None:
        """Return when ``work`` is done; meanwhile, go on with everything that is under way.

        Raises:
            CommunicationError: now, or in an earlier call: the ranks' streams have come apart for good.
        """
        if self._failure is not None and work.num_left:
            raise self._failure
        try:
            self._progress()
            while work.num_left:
                self._sleep()
                self._progress()
        except Exception as error:
            self._failure = error
            raise

    # See [Note: streams of chunks].

    def _plan(
        self,
        work: SharedWork,
        full: Tensor,
        offsets: Sequence[int],
        messages: Sequence[Message],
        adds: bool = False,
        after: int = 0,
    ) -> None:
        numel = SLOT_BYTES // full.element_size()
        longest = max(stop - start for start, stop in zip(offsets, offsets[1:], strict=False))
        for begin in range(0, longest, numel):
            for owner, readers, part in messages:
                start = offsets[part] + begin
                stop = min(start + numel, offsets[part + 1])
                if start >= stop:
                    continue
                number = self._num_planned[owner]
                self._num_planned[owner] += 1
                if owner == self.rank:
                    self._posts.append(_Post(work, full[start:stop], readers, number, after))
                    work.num_left += 1
                elif self.rank in readers:
                    self._takes.append(_Take(work, full[start:stop], owner, number, adds))
                    self._num_takes_planned += 1
                    work.num_left += 1

    def _progress(self) -> None:
        """Post and take what can be without waiting."""
        for peer, link in self.links.items():
            if peer not in self._gone:
                self._hear(peer, link)
        is_moving = True
        while is_moving:
            is_moving = False
            while self._posts and self._may_post(self._posts[0]):
                self._post(self._posts.popleft())
                is_moving = True
            while self._takes and self._num_arrived[self._takes[0].owner]:
                self._take(self._takes.popleft())
                is_moving = True

    def _may_post(self, post: _Post) -> bool:
        return self._num_unread[post.number % NUM_SLOTS] == 0 and self._num_taken >= post.after

    def _post(self, post: _Post) -> None:
        outbox, slot = self._outboxes[self.rank], post.number % NUM_SLOTS
        outbox.chunk(post.number, post.source).copy_(post.source)
        outbox.labels[slot] = post.number, post.source.nbytes
        self._num_unread[slot] = len(post.readers)
        for reader in post.readers:
            self._in_reading[reader].append(slot)
            self._tell(reader, _POSTED)
        self.sent_bytes += post.source.nbytes * len(post.readers)
        post.work.num_left -= 1

    def _take(self, take: _Take) -> None:
        outbox = self._outboxes[take.owner]
        number, num_bytes = outbox.labels[take.number % NUM_SLOTS].tolist()
        if (number, num_bytes) != (take.number, take.target.nbytes):
            raise CommunicationError(
                f"rank {self.rank} expected {take.target.nbytes} bytes (chunk {take.number}) from rank {take.owner} of "
                f"its group, which sent {num_bytes} (chunk {number}): they are at different collectives; "
                "initialize(debug=True) tells which"
            )
        arrived = outbox.chunk(take.number, take.target)
        if take.adds:
            take.target.add_(arrived)
        else:
            take.target.copy_(arrived)
        self._num_arrived[take.owner] -= 1
        self._num_taken += 1
        self._tell(take.owner, _TAKEN)
        take.work.num_left -= 1

    # Sockets. They carry no data; but what was written before a byte was sent is seen by whoever has received it.

    def _tell(self, peer: int, what: bytes) -> None:
        # Never more bytes under way than twice the slots, so that a socket always has room for one.
        with contextlib.suppress(ConnectionError):  # whether it is missed is for the next wait to tell
            self.links[peer].send(what)

    def _hear(self, peer: int, link: socket.socket) -> None:
        try:
            heard = link.recv(4096)
        except BlockingIOError:
            return
        except ConnectionError:
            heard = b""
        if not heard:
            self._gone.add(peer)
            self._poll.unregister(link)
            return
        self._num_arrived[peer] += heard.count(_POSTED)
        for _ in range(heard.count(_TAKEN)):
            self._num_unread[self._in_reading[peer].popleft()] -= 1

    def _sleep(self) -> None:
        """Wait until another rank says something."""
        awaited = self._awaited()
        if awaited & self._gone:
            raise CommunicationError(
                f"rank {self.rank} waits for rank {min(awaited & self._gone)} of its group, which has ended or closed "
                "its engine; see what it printed"
            )
        if not self._poll.poll(min(1000 * self._timeout_s, _LONGEST_POLL_MS)):
            raise CommunicationError(
                f"rank {self.rank} has waited {self._timeout_s:g} s for ranks {sorted(awaited)} of its group; if they "
                "are only slow, give the process group a longer timeout"
            )

    def _awaited(self) -> set[int]:
        """Return the ranks without which this one cannot go on."""
        if self._takes and not self._num_arrived[self._takes[0].owner]:
            return {self._takes[0].owner}
        slot = self._posts[0].number % NUM_SLOTS
        return {peer for peer, slots in self._in_reading.items() if slot in slots}


# Connecting.


def connect(
    rank: int, world_size: int, gather_objects: GatherObjects, timeout_s: float
) -> SharedMemoryTransport | None:
    """Connect ranks that are all on one host; return None on every rank if they are not, or it does not work.

    Args:
        gather_objects: returns every rank's object, by rank.
        timeout_s: of the transport.
    Collective.
    """
    with contextlib.ExitStack() as stack:
        listener, own_place = _listen(stack)
        places = gather_objects(own_place)
        if listener is None or any(place is None or place[0] != places[0][0] for place in places):
            return None
        opened: list[socket.socket] = []
        links: dict[int, socket.socket] = {}
        try:
            own = os.memfd_create("poplar-outbox")
            stack.callback(os.close, own)
            os.ftruncate(own, outbox_bytes())
            descriptors = {rank: own}
            for link in _meet(rank, own, listener, [address for _, address in places], opened):
                peer, descriptor = _introduction(link)
                stack.callback(os.close, descriptor)
                links[peer], descriptors[peer] = link, descriptor
            outboxes = [Outbox(descriptors[peer]) for peer in range(world_size)]
        except Exception:  # whatever it is, the others are about to ask
            outboxes = []
        if all(gather_objects(bool(outboxes))):
            return SharedMemoryTransport(rank, outboxes, links, timeout_s)
        for link in opened:
            link.close()
        return None


def _listen(stack: contextlib.ExitStack) -> tuple[socket.socket | None, tuple[Any, str] | None]:
    """Return a listening socket, with where it is and its address; None and None where this way is not open."""
    if os.environ.get(DISABLED_BY, "0") not in ("", "0") or not hasattr(os, "memfd_create"):
        return None, None
    try:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(f"\0poplar-{secrets.token_hex(16)}")  # the leading zero: no file
        listener.listen()
        return listener, (_place(), listener.getsockname())
    except OSError:
        return None, None


def _place() -> tuple[Any, ...]:
    """Return what is the same for all processes that can reach, and let in, each other without files."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip(), os.readlink("/proc/self/ns/net"), os.getuid()


def _meet(
    rank: int, own: int, listener: socket.socket, addresses: Sequence[Any], opened: list[socket.socket]
) -> Iterator[socket.socket]:
    """Connect to all lower ranks, then let all higher ones connect; yield sockets on which each has been told of us.

    Args:
        own: descriptor of the own outbox.
        opened: gets every socket, for the caller to close.
    """
    introduction = [struct.pack("i", rank)], [own]
    for address in addresses[:rank]:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        opened.append(link)
        link.settimeout(_CONNECT_S)
        link.connect(address)
        socket.send_fds(link, *introduction)
        yield link
    listener.settimeout(_CONNECT_S)
    num_met = rank
    while num_met < len(addresses) - 1:
        link, _ = listener.accept()
        opened.append(link)
        link.settimeout(_CONNECT_S)
        _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():  # they can only have guessed the address
            link.close()
            continue
        socket.send_fds(link, *introduction)
        num_met += 1
        yield link


def _introduction(link: socket.socket) -> tuple[int, int]:
    """Return the rank and the outbox that the other end sends."""
    said, descriptors, _, _ = socket.recv_fds(link, 4, 1)
    if len(said) != 4 or len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError("the other end did not introduce itself")
    return struct.unpack("i", said)[0], descriptors[0]

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
any later call, and while the rank waits.

[Note: nobody waits in a circle]
Chunks go out and are taken in one order: by collective, then by chunk, then by rank. Take the first chunk in that order
that somebody still waits for. All chunks before it have been taken, so its owner's outbox holds none but chunks of the
same place in other messages, fewer than there are ranks: with as many slots, it has room. No rank stops inside a call
that only issues, so each comes to post what the others wait for.
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

import torch
from torch import Tensor

from poplar.errors import CommunicationError

SLOT_BYTES = 2**20
"""Large enough that bookkeeping is little, small enough to be in the processor's cache when it is read."""
MIN_SLOTS = 8
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
    slot: int
    after: int
    """So many takes must have come first, since they make what is posted."""


@dataclass(slots=True)
class _Take:
    work: SharedWork
    target: Tensor
    owner: int
    slot: int
    adds: bool


class SharedMemoryTransport:
    """Collectives between ranks that are connected by ``connect``.

    Sums are made in one order of ranks, so that a repeated run is bitwise the same.

    Args:
        rank: this one.
        outboxes: one for every rank, (slots, bytes of a slot), uint8; at least as many slots as ranks.
        links: a socket to every other rank.
        timeout_s: longest silence while this rank waits.

    Attributes:
        sent_bytes: bytes of the messages posted so far, for each reader once.
    """

    def __init__(self, rank: int, outboxes: Sequence[Tensor], links: dict[int, socket.socket], timeout_s: float):
        self.rank = rank
        self.world_size = len(outboxes)
        self.sent_bytes = 0
        self._outboxes = outboxes
        self._links = links
        self._timeout_s = timeout_s
        self._gone: set[int] = set()
        self._poll = select.poll()
        for link in links.values():
            link.setblocking(False)
            self._poll.register(link, select.POLLIN)
            weakref.finalize(self, link.close)
        num_slots, self._slot_bytes = outboxes[rank].shape
        self._num_planned = [0] * self.world_size  # chunks of each rank's stream, posted or to be posted
        self._num_takes_planned = self._num_taken = 0
        self._posts: deque[_Post] = deque()
        self._takes: deque[_Take] = deque()
        self._num_arrived = dict.fromkeys(links, 0)  # posted to this rank and not yet taken
        self._num_unread = [0] * num_slots  # readers that have not yet taken what lies in the own slot
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
        """Return when ``work`` is done; meanwhile, go on with everything that is under way."""
        self._progress()
        while work.num_left:
            self._sleep()
            self._progress()

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
        numel = self._slot_bytes // full.element_size()
        longest = max(stop - start for start, stop in zip(offsets, offsets[1:], strict=False))
        for begin in range(0, longest, numel):
            for owner, readers, part in messages:
                start = offsets[part] + begin
                stop = min(start + numel, offsets[part + 1])
                if start >= stop:
                    continue
                slot = self._num_planned[owner] % len(self._num_unread)
                self._num_planned[owner] += 1
                if owner == self.rank:
                    self._posts.append(_Post(work, full[start:stop], readers, slot, after))
                    work.num_left += 1
                elif self.rank in readers:
                    self._takes.append(_Take(work, full[start:stop], owner, slot, adds))
                    self._num_takes_planned += 1
                    work.num_left += 1

    def _progress(self) -> None:
        """Post and take what can be without waiting."""
        for peer, link in self._links.items():
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
        return self._num_unread[post.slot] == 0 and self._num_taken >= post.after

    def _post(self, post: _Post) -> None:
        _slot_of(self._outboxes[self.rank], post.slot, post.source).copy_(post.source)
        self._num_unread[post.slot] = len(post.readers)
        for reader in post.readers:
            self._in_reading[reader].append(post.slot)
            self._tell(reader, _POSTED)
        self.sent_bytes += post.source.nbytes * len(post.readers)
        post.work.num_left -= 1

    def _take(self, take: _Take) -> None:
        arrived = _slot_of(self._outboxes[take.owner], take.slot, take.target)
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
        # Never more bytes under way than twice the slots, so that there is always room for one.
        with contextlib.suppress(ConnectionError):  # whether it is missed is for the next wait to tell
            self._links[peer].send(what)

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
                f"rank {self.rank} waits for rank {min(awaited & self._gone)} of its group, whose process has ended"
            )
        if not self._poll.poll(min(1000 * self._timeout_s, _LONGEST_POLL_MS)):
            raise CommunicationError(
                f"rank {self.rank} has waited {self._timeout_s:g} s for ranks {sorted(awaited)} of its group"
            )

    def _awaited(self) -> set[int]:
        """Return the ranks without which this one cannot go on."""
        if self._takes and not self._num_arrived[self._takes[0].owner]:
            return {self._takes[0].owner}
        slot = self._posts[0].slot
        return {peer for peer, slots in self._in_reading.items() if slot in slots}


def _slot_of(outbox: Tensor, slot: int, like: Tensor) -> Tensor:
    return outbox[slot, : like.nbytes].view(like.dtype)


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
        listener = _listen(stack)
        places = gather_objects(None if listener is None else (_place(), listener.getsockname()))
        if any(place is None or place[0] != places[0][0] for place in places):
            return None
        assert listener is not None
        opened: list[socket.socket] = []
        links: dict[int, socket.socket] = {}
        try:
            own = os.memfd_create("poplar-outbox")
            stack.callback(os.close, own)
            num_slots = max(MIN_SLOTS, world_size)
            os.ftruncate(own, num_slots * SLOT_BYTES)
            descriptors = {rank: own}
            for link in _meet(rank, own, listener, [address for _, address in places], opened):
                peer, descriptor = _introduction(link)
                stack.callback(os.close, descriptor)
                links[peer], descriptors[peer] = link, descriptor
            outboxes = [_map(descriptors[peer], num_slots) for peer in range(world_size)]
        except OSError:
            outboxes = []
        if all(gather_objects(bool(outboxes))):
            return SharedMemoryTransport(rank, outboxes, links, timeout_s)
        for link in opened:
            link.close()
        return None


def _listen(stack: contextlib.ExitStack) -> socket.socket | None:
    """Return a listening socket; None where this way is not open."""
    if os.environ.get(DISABLED_BY, "0") not in ("", "0") or not hasattr(os, "memfd_create"):
        return None
    listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        listener.bind(f"\0poplar-{secrets.token_hex(16)}")  # the leading zero: no file
        listener.listen()
    except OSError:
        return None
    return listener


def _place() -> tuple[str, ...]:
    """Return what is the same for all processes that can reach each other's sockets without files."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip(), os.readlink("/proc/self/ns/net")


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
        if user == os.getuid():  # others could only have guessed the address
            socket.send_fds(link, *introduction)
            num_met += 1
            yield link


def _introduction(link: socket.socket) -> tuple[int, int]:
    """Return the rank and the outbox that the other end sends."""
    said, descriptors, _, _ = socket.recv_fds(link, 4, 1)
    if len(said) != 4 or len(descriptors) != 1:
        raise OSError("the other end did not introduce itself")
    return struct.unpack("i", said)[0], descriptors[0]


def _map(descriptor: int, num_slots: int) -> Tensor:
    memory = mmap.mmap(descriptor, num_slots * SLOT_BYTES)
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_slots, SLOT_BYTES)

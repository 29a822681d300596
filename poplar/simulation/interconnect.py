"""Links between ranks, and what collectives cost over them. Ring costs, with the slowest link setting the pace.

Nothing here is measured on the reader's machines: bandwidths come from data sheets times an efficiency, latencies are
assumed, and ``--link`` replaces each of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from poplar.catalog import Card
from poplar.errors import ConfigError

NVLINK_EFFICIENCY, PCIE_EFFICIENCY, NETWORK_EFFICIENCY = 0.8, 0.7, 0.8
"""Assumed share of a link's bandwidth that a large collective reaches (public NCCL fits reach 0.7 to 0.83)."""


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """How the ranks of a cluster are wired."""

    inter_bytes_per_s: float = 12.5e9
    """Of one node's network, one direction. Assumed: 100 Gbit/s."""
    intra_bytes_per_s: float | None = None
    """Inside a node, one direction. None: each card's own link from the catalogue."""
    latency_s: float = 10e-6
    """Of one message. Assumed."""
    ranks_per_node: int = 8
    """At most so many cards of one kind share a node; unlike cards sit in different nodes."""
    one_node: bool = False
    """All cards sit in one node, whatever their kind."""

    def __post_init__(self) -> None:
        for name in ("inter_bytes_per_s", "intra_bytes_per_s", "latency_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"link: {name} must be a number above 0; got {value!r}")
        if self.ranks_per_node < 1:
            raise ConfigError(f"link: node must be 1 or more; got {self.ranks_per_node}")

    def ring_bytes_per_s(self, cards: Sequence[Card]) -> float:
        """Return the bandwidth of a ring through all ranks: the slowest link that it crosses."""
        nodes = self._nodes(cards)
        links = [self._intra(card) for node in nodes if len(node) > 1 for card in node]
        if len(nodes) > 1:
            links.append(self.inter_bytes_per_s * NETWORK_EFFICIENCY)
        return min(links, default=math.inf)

    def _nodes(self, cards: Sequence[Card]) -> list[list[Card]]:
        if self.one_node:
            return [list(cards)]
        nodes: list[list[Card]] = []
        for card in cards:
            if nodes and nodes[-1][0].name == card.name and len(nodes[-1]) < self.ranks_per_node:
                nodes[-1].append(card)
            else:
                nodes.append([card])
        return nodes

    def _intra(self, card: Card) -> float:
        if self.intra_bytes_per_s is not None:
            return self.intra_bytes_per_s
        if card.nvlink_bytes_per_s is not None and not self.one_node:
            return card.nvlink_bytes_per_s * NVLINK_EFFICIENCY
        return card.pcie_bytes_per_s * PCIE_EFFICIENCY


@dataclass(frozen=True, kw_only=True)
class Ring:
    """A ring through the ranks of one cluster, and how the model state is cut over them."""

    bytes_per_s: float
    latency_s: float
    shares: tuple[float, ...]
    """Share of every buffer that each rank holds."""

    def shard_s(self, num_bytes: float) -> float:
        """Return the seconds of an all-gather or a reduce-scatter of ``num_bytes`` in all.

        Equal shards go round the ring; unequal ones take the cheaper of the ring paced by the largest shard, and one
        broadcast (or reduction) a rank.
        """
        steps = len(self.shares) - 1
        if steps == 0:
            return 0.0
        ring_s = steps * max(self.shares) * num_bytes / self.bytes_per_s
        broadcasts_s = num_bytes / self.bytes_per_s
        return min(ring_s, broadcasts_s) + steps * self.latency_s

    def all_reduce_s(self, num_bytes: float) -> float:
        """Return the seconds of an all-reduce: twice round the ring, in equal parts whatever the shards."""
        steps = len(self.shares) - 1
        if steps == 0:
            return 0.0
        return 2 * steps / len(self.shares) * num_bytes / self.bytes_per_s + 2 * steps * self.latency_s


def parse_link(text: str) -> Interconnect:
    """Return the wiring of "inter=12.5,intra=nvlink,latency-us=10,node=8": bandwidths in GB/s, one direction.

    ``intra`` may be "card" (each card's own link, the default), ``node`` may be "all" (every card in one box).

    Raises:
        ConfigError: an unknown key, or a value that is not a number above 0.
    """
    link = Interconnect()
    for part in text.split(","):
        key, _, value = (piece.strip().lower() for piece in part.partition("="))
        if key == "inter":
            link = replace(link, inter_bytes_per_s=_number(part, value) * 1e9)
        elif key == "intra":
            link = replace(link, intra_bytes_per_s=None if value == "card" else _number(part, value) * 1e9)
        elif key == "latency-us":
            link = replace(link, latency_s=_number(part, value) * 1e-6)
        elif key == "node" and value == "all":
            link = replace(link, one_node=True)
        elif key == "node":
            if not value.isdecimal():
                raise ConfigError(f"--link: {part.strip()!r} must be a whole number, or 'all'")
            link = replace(link, ranks_per_node=int(value))
        else:
            raise ConfigError(f"--link {text!r}: expected inter=, intra=, latency-us= or node=; got {part.strip()!r}")
    return link


def _number(part: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError as error:
        raise ConfigError(f"--link: {part.strip()!r} needs a number") from error
    if not math.isfinite(number) or number <= 0:
        raise ConfigError(f"--link: {part.strip()!r} must be above 0")
    return number

"""GPU facts: memory, peaks, what a transformer layer reaches, links, each with its source. No torch here.

The facts lie in ``cards.json`` beside this file. Users add their own cards in a file of the same form, named by the
environment variable ``POPLAR_CARDS`` (so that every rank of a run sees them) or read by ``load_user_cards``.

[Note: peaks and rates]
A data sheet's peak says little about training: a V100 has 1.9 times the peak of a T4 and trains 3.1 to 3.9 times as
fast. So a card carries both. ``fp32_tflops``, ``fp16_tflops`` and ``bf16_tflops`` are the dense peaks, with float32
accumulation, that the strategy "flops" splits by. ``half`` and ``single`` are ``KernelRates``, what a transformer layer
reaches in 16 bit and in float32 without TF32; the simulator and the emulation go by them. Each card's ``sources`` say
whether its rates were fitted to public measurements or assumed.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from poplar.errors import ConfigError
from poplar.simulation.model_spec import BLOCK_TRAFFIC_BYTES

MAX_RANKS = 65_536
"""More ranks than this in a cluster is taken for a slip of the pen."""
CARDS_VARIABLE = "POPLAR_CARDS"
"""Environment variable that names a file of the user's cards."""
_GIB = 2**30
_CONTEXT_BYTES = _GIB // 2
"""Assumed: what the driver's context and the math libraries take of the memory that PyTorch reports."""
_ASSUMED_SHARE = {"half": 0.6, "single": 0.7}
"""Assumed: share of the peak that a card reaches whose file gives no rates."""
_REFERENCE_TOKEN_FLOP = 6 * 202.4e6
_REFERENCE_TOKEN_BYTES = BLOCK_TRAFFIC_BYTES["half"] * 4096
"""``relative_speed`` compares cards on one token of a 7B Llama layer: see ``KernelRates``, ``step_model.py``."""


@dataclass(frozen=True, kw_only=True)
class KernelRates:
    """What a transformer layer reaches on a card, forward and backward, when the card has enough to do."""

    matmul_tflops: float
    """Of the products with weights."""
    attention_tflops: float | None = None
    """Of the products of attention. None: they could not be told from the rest, and cost nothing of their own."""
    bytes_per_parameter: float = 28.0
    """Memory traffic of a micro-batch for each parameter, whatever its size: casts, gradient, accumulation."""

    def __post_init__(self) -> None:
        _check_positive("matmul_tflops", self.matmul_tflops)
        if self.attention_tflops is not None:
            _check_positive("attention_tflops", self.attention_tflops)
        if not _is_number(self.bytes_per_parameter) or self.bytes_per_parameter < 0:
            raise ConfigError(f"bytes_per_parameter must be a number, 0 or more; got {self.bytes_per_parameter!r}")


@dataclass(frozen=True, kw_only=True)
class Card:
    """One kind of GPU, as a single rank sees it (one die of a two-die card)."""

    name: str
    """Catalogue name, kind and nominal memory: "t4-16g"."""
    memory_bytes: int
    """Nominal memory."""
    usable_memory_bytes: int
    """Memory that PyTorch reports, less 0.5 GiB assumed for the driver's context."""
    memory_bandwidth_bytes_per_s: float
    fp32_tflops: float
    """Dense peak in float32, without TF32."""
    fp16_tflops: float | None
    bf16_tflops: float | None
    """Dense peak with float32 accumulation. None: bfloat16 is not native (it may run, slowly)."""
    half: KernelRates
    """What a transformer layer reaches in 16 bit."""
    single: KernelRates
    """What a transformer layer reaches in float32, without TF32."""
    pcie_bytes_per_s: float
    """One direction."""
    nvlink_bytes_per_s: float | None = None
    """One direction, NVLink or Infinity Fabric to cards of its node. None: PCI Express only."""
    measured_matmul_tflops: float | None = None
    """Largest public matrix-multiply rate in bf16."""
    aliases: tuple[str, ...] = ()
    """Other names, among them what ``torch.cuda.get_device_name`` says."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each fact was read, by the name of the fact; "data_sheet" covers memory, bandwidth, peaks and links."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "usable_memory_bytes", "memory_bandwidth_bytes_per_s", "pcie_bytes_per_s"):
            _check_positive(f"{self.name}: {name}", getattr(self, name))
        for name in ("fp32_tflops", "fp16_tflops", "bf16_tflops", "nvlink_bytes_per_s", "measured_matmul_tflops"):
            if getattr(self, name) is not None:
                _check_positive(f"{self.name}: {name}", getattr(self, name))

    @property
    def native_dtypes(self) -> tuple[str, ...]:
        peaks = {"float32": self.fp32_tflops, "float16": self.fp16_tflops, "bfloat16": self.bf16_tflops}
        return tuple(dtype for dtype, peak in peaks.items() if peak is not None)

    @property
    def link_bytes_per_s(self) -> float:
        """Return the bandwidth to the other cards of its node, one direction."""
        return self.nvlink_bytes_per_s or self.pcie_bytes_per_s

    @property
    def relative_speed(self) -> float:
        """Return how fast the card trains in 16 bit, a T4 being 1; from its ``half`` rates, not from its data sheet."""
        return _reference_token_s(find_card("t4-16g")) / _reference_token_s(self)

    def rates(self, precision: str) -> KernelRates:
        """Return the rates at ``precision``: "fp32", "fp16" or "bf16"."""
        return self.single if precision == "fp32" else self.half

    def peak_tflops(self, precision: str) -> float:
        """Return the data sheet's peak at ``precision``; a slow or missing 16-bit type is computed in float32."""
        native = {"fp32": self.fp32_tflops, "fp16": self.fp16_tflops, "bf16": self.bf16_tflops}[precision]
        return max(native or 0.0, self.fp32_tflops)


def find_card(name: str) -> Card:
    """Return the card of a name or an alias, in any case and with any spacing.

    Raises:
        ConfigError: no such card; the message gives the nearest name.
    """
    cards = _catalog(os.environ.get(CARDS_VARIABLE) or None)
    if not isinstance(name, str):
        raise ConfigError(f"a card's name is text, as 't4-16g'; got {name!r}")
    card = cards.get(_normalise(name))
    if card is not None:
        return card
    near = difflib.get_close_matches(_normalise(name), cards, n=1, cutoff=0.4)
    hint = f"; did you mean {cards[near[0]].name!r}?" if near else f"; known are {', '.join(card_names())}"
    raise ConfigError(f"unknown card {name!r}{hint} (your own cards: a file named by {CARDS_VARIABLE})")


def match_device_name(device_name: str) -> Card | None:
    """Return the card that ``torch.cuda.get_device_name`` speaks of, or None where the catalogue lacks it."""
    return _catalog(os.environ.get(CARDS_VARIABLE) or None).get(_normalise(device_name))


def card_names() -> tuple[str, ...]:
    """Return the names of all cards, in the order of the catalogue."""
    return tuple(dict.fromkeys(card.name for card in _catalog(os.environ.get(CARDS_VARIABLE) or None).values()))


def parse_cluster(text: str) -> tuple[str, ...]:
    """Return one card name a rank, from "v100-16g:2,t4-16g:2"; a name without a count stands for one rank.

    Raises:
        ConfigError: nothing in it, an unknown card, a count that is not an integer from 1, or too many ranks.
    """
    if not isinstance(text, str) or not text.strip(" ,"):
        raise ConfigError(f"a cluster needs at least one card, as 'v100-16g:2,t4-16g:2'; got {text!r}")
    names: list[str] = []
    for part in text.split(","):
        if not part.strip():
            raise ConfigError(f"an empty entry in the cluster {text!r}: write CARD:COUNT between the commas")
        name, colon, count_text = (piece.strip() for piece in part.partition(":"))
        if colon and not re.fullmatch(r"[0-9]{1,9}", count_text):
            raise ConfigError(f"the count in {part.strip()!r} must be an integer from 1; got {count_text!r}")
        count = int(count_text) if colon else 1
        if count < 1:
            raise ConfigError(f"the count in {part.strip()!r} must be 1 or more; got {count}")
        if len(names) + count > MAX_RANKS:
            raise ConfigError(f"the cluster {text!r} has more than {MAX_RANKS} ranks")
        names += [find_card(name).name] * count
    return tuple(names)


def load_user_cards(path: str | os.PathLike[str]) -> tuple[Card, ...]:
    """Return the cards of a user's file, in the form of ``cards.json``: {"cards": [{"name": ..., ...}]}.

    Needed are name, memory_gib, memory_bandwidth_gb_per_s, fp32_tflops and pcie_gb_per_s; rates that are not given are
    assumed from the peaks.

    Raises:
        ConfigError: the file cannot be read, or a card in it is wrong; the message names the card and the field.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the cards in {os.fspath(path)!r}: {error}") from error
    return _cards_from_json(text, os.fspath(path))


@lru_cache(maxsize=8)
def _catalog(user_path: str | None) -> dict[str, Card]:
    text = resources.files("poplar").joinpath("cards.json").read_text(encoding="utf-8")
    cards = _cards_from_json(text, "cards.json")
    if user_path is not None:
        cards += load_user_cards(user_path)  # later ones win
    return {_normalise(name): card for card in cards for name in (card.name, *card.aliases)}


def _cards_from_json(text: str, where: str) -> tuple[Card, ...]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    rows = data.get("cards") if isinstance(data, dict) else None
    if not isinstance(rows, list):
        raise ConfigError(f'{where} needs a list "cards"')
    return tuple(_card_from_row(row, data.get("sources", {}), where) for row in rows)


_FIELDS = {
    "memory_bandwidth_gb_per_s": ("memory_bandwidth_bytes_per_s", 1e9),
    "pcie_gb_per_s": ("pcie_bytes_per_s", 1e9),
    "nvlink_gb_per_s": ("nvlink_bytes_per_s", 1e9),
    "fp32_tflops": ("fp32_tflops", 1.0),
    "fp16_tflops": ("fp16_tflops", 1.0),
    "bf16_tflops": ("bf16_tflops", 1.0),
    "measured_matmul_tflops": ("measured_matmul_tflops", 1.0),
}
_REQUIRED = ("name", "memory_gib", "memory_bandwidth_gb_per_s", "fp32_tflops", "pcie_gb_per_s")
_OPTIONAL = ("aliases", "reported_memory_gib", "half", "single", "sources")


def _card_from_row(row: Any, shared_sources: Mapping[str, str], where: str) -> Card:
    name = row.get("name") if isinstance(row, dict) else None
    if not isinstance(name, str) or not name or set(name) & set(",: "):
        raise ConfigError(f'{where}: a card needs a "name" without comma, colon or space; got {name!r}')
    unknown = set(row) - set(_FIELDS) - set(_REQUIRED) - set(_OPTIONAL)
    missing = [key for key in _REQUIRED if row.get(key) is None]
    if unknown or missing:
        raise ConfigError(f"{where}: card {name!r} lacks {missing} and has unknown fields {sorted(unknown)}")
    aliases, sources = row.get("aliases", []), row.get("sources", {})
    if not isinstance(aliases, list) or not isinstance(sources, dict):
        raise ConfigError(f'{where}: card {name!r}: "aliases" must be a list and "sources" an object')
    numbers = {key: row[key] for key in ("memory_gib", "reported_memory_gib", *_FIELDS) if row.get(key) is not None}
    for key, value in numbers.items():
        _check_positive(f"{where}: card {name!r}: {key}", value)
    memory_bytes = int(numbers["memory_gib"] * _GIB)
    reported_bytes = int(numbers.get("reported_memory_gib", numbers["memory_gib"]) * _GIB)
    settings: dict[str, Any] = {"fp16_tflops": None, "bf16_tflops": None}
    settings |= {_FIELDS[key][0]: value * _FIELDS[key][1] for key, value in numbers.items() if key in _FIELDS}
    return Card(
        name=name,
        memory_bytes=memory_bytes,
        usable_memory_bytes=max(1, reported_bytes - _CONTEXT_BYTES),
        half=_rates_from_row(row, "half", settings["fp16_tflops"] or settings["fp32_tflops"], where),
        single=_rates_from_row(row, "single", settings["fp32_tflops"], where),
        aliases=tuple(map(str, aliases)),
        sources={fact: shared_sources.get(source, source) for fact, source in sources.items()},
        **settings,
    )


def _rates_from_row(row: Mapping[str, Any], key: str, peak_tflops: float, where: str) -> KernelRates:
    given = row.get(key)
    if given is None:
        rate = peak_tflops * _ASSUMED_SHARE[key]
        return KernelRates(matmul_tflops=rate, attention_tflops=rate)
    if not isinstance(given, dict) or "matmul_tflops" not in given:
        raise ConfigError(f'{where}: card {row["name"]!r}: "{key}" needs "matmul_tflops"; got {given!r}')
    try:
        return KernelRates(**{"attention_tflops": given["matmul_tflops"], **given})
    except TypeError as error:
        raise ConfigError(f'{where}: card {row["name"]!r}: "{key}": {error}') from error


def _reference_token_s(card: Card) -> float:
    compute_s = _REFERENCE_TOKEN_FLOP / (card.half.matmul_tflops * 1e12)
    return compute_s + _REFERENCE_TOKEN_BYTES / card.memory_bandwidth_bytes_per_s


def _normalise(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name.strip().lower())


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_positive(what: str, value: object) -> None:
    if not _is_number(value) or value <= 0:  # type: ignore[operator]
        raise ConfigError(f"{what} must be a number above 0; got {value!r}")

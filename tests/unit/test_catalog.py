"""Cards: facts with sources, names as people and drivers write them, clusters, cards of the user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from poplar.catalog import (
    CARDS_VARIABLE,
    MAX_RANKS,
    card_names,
    find_card,
    load_user_cards,
    match_device_name,
    parse_cluster,
)
from poplar.errors import ConfigError

_OWN = {
    "name": "rtx9000-20g",
    "memory_gib": 20,
    "memory_bandwidth_gb_per_s": 700,
    "fp32_tflops": 30.0,
    "fp16_tflops": 60.0,
    "pcie_gb_per_s": 31.5,
}


def _write(folder: Path, *rows: object) -> Path:
    path = folder / "cards.json"
    path.write_text(json.dumps({"cards": rows}))
    return path


def test_the_named_cards_are_there() -> None:
    wanted = {"a100-80g", "a100-40g", "v100-16g", "t4-16g", "a800-80g", "v100s-32g", "rtx3060-12g", "rtx3090-24g"}
    wanted |= {"rtx4060-8g", "rtx5090-32g", "l4-24g", "l40s-48g", "a10g-24g", "a6000-48g", "h100-80g", "h200-141g"}
    wanted |= {"mi250-64g", "mi300x-192g"}
    assert wanted <= set(card_names())
    assert len(card_names()) >= 25


@pytest.mark.parametrize("name", card_names())
def test_facts_are_possible_and_have_sources(name: str) -> None:
    card = find_card(name)
    assert card.name == name
    assert 0.85 * card.memory_bytes < card.usable_memory_bytes < card.memory_bytes
    assert card.memory_bytes == int(name.rsplit("-", 1)[1].rstrip("g")) * 2**30
    assert len(card.sources["data_sheet"]) > 20 and card.sources["rates"] and card.sources["reported_memory_gib"]
    # Nothing computes faster than its data sheet says, but for what 16-bit inputs save a card without fast fp16.
    assert card.single.matmul_tflops <= card.fp32_tflops
    assert card.half.matmul_tflops <= card.peak_tflops("fp16")
    if card.measured_matmul_tflops is not None:
        assert card.half.matmul_tflops <= card.measured_matmul_tflops <= (card.bf16_tflops or 0)
        assert "measured_matmul_tflops" in card.sources
    assert card.link_bytes_per_s >= card.pcie_bytes_per_s
    assert "float32" in card.native_dtypes


def test_cards_before_ampere_have_no_native_bfloat16() -> None:
    for name in ("p40", "p100", "v100", "v100s", "t4", "rtx2080ti"):
        assert "bfloat16" not in find_card(name).native_dtypes
    for name in ("a100", "rtx3060", "l4", "h100", "mi250"):
        assert "bfloat16" in find_card(name).native_dtypes


def test_speed_is_as_measured_not_as_on_the_data_sheet() -> None:
    v100, t4 = find_card("v100"), find_card("t4")
    assert 3.1 < v100.relative_speed / t4.relative_speed < 3.9
    assert v100.peak_tflops("fp16") / t4.peak_tflops("fp16") == pytest.approx(125 / 65)
    assert 1.05 < find_card("a100-80g").relative_speed / find_card("a100-40g").relative_speed < 1.09
    assert t4.relative_speed == 1.0


def test_a_slow_16_bit_unit_is_rated_as_float32() -> None:
    p40 = find_card("p40")
    assert p40.peak_tflops("fp16") == p40.peak_tflops("fp32") == p40.fp32_tflops
    assert find_card("v100").peak_tflops("bf16") == find_card("v100").fp32_tflops


@pytest.mark.parametrize(
    ("device_name", "card"),
    [
        ("Tesla T4", "t4-16g"),
        ("Tesla V100-SXM2-16GB", "v100-16g"),
        ("Tesla V100S-PCIE-32GB", "v100s-32g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA GeForce RTX 3090", "rtx3090-24g"),
        ("NVIDIA H200", "h200-141g"),
    ],
)
def test_drivers_names_are_known(device_name: str, card: str) -> None:
    found = match_device_name(device_name)
    assert found is not None and found.name == card


def test_an_unknown_device_is_no_card() -> None:
    assert match_device_name("NVIDIA GeForce GT 710") is None


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'v100-17g'; did you mean 'v100-16g'"):
        find_card("v100-17g")
    with pytest.raises(ConfigError, match="unknown card 'zzzzzzzz'; known are .*t4-16g"):
        find_card("zzzzzzzz")


def test_clusters_are_one_name_a_rank() -> None:
    assert parse_cluster("v100-16g:2,t4-16g:2") == ("v100-16g", "v100-16g", "t4-16g", "t4-16g")
    assert parse_cluster(" T4 , a100 : 1 ") == ("t4-16g", "a100-80g")
    assert len(parse_cluster(f"t4:{MAX_RANKS}")) == MAX_RANKS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one card"),
        (" , ", "at least one card"),
        ("t4,,v100", "empty entry"),
        ("t4:0", "1 or more"),
        ("t4:-1", "integer from 1"),
        ("t4:1.5", "integer from 1"),
        ("t4:", "integer from 1"),
        ("t4:2:2", "integer from 1"),
        ("t4:9999999999999", "integer from 1"),
        (f"t4:{MAX_RANKS},v100", "more than 65536 ranks"),
        ("t5-16g:2", "did you mean"),
    ],
)
def test_impossible_clusters_are_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_cluster(text)
    assert "\n" not in str(caught.value)


def test_own_cards_are_read_and_missing_rates_assumed(tmp_path: Path) -> None:
    rates = {"half": {"matmul_tflops": 50.0, "bytes_per_parameter": 10.0}, "sources": {"data_sheet": "the box"}}
    plain, full = load_user_cards(_write(tmp_path, _OWN, {**_OWN, "name": "b-8g", **rates}))
    assert plain.memory_bytes == 20 * 2**30 and plain.memory_bandwidth_bytes_per_s == 700e9
    assert plain.usable_memory_bytes == 20 * 2**30 - 2**29
    assert plain.half.matmul_tflops == pytest.approx(36.0)
    assert plain.bf16_tflops is None and plain.nvlink_bytes_per_s is None
    assert (full.half.matmul_tflops, full.half.attention_tflops, full.half.bytes_per_parameter) == (50.0, 50.0, 10.0)
    assert full.sources["data_sheet"] == "the box"


def test_own_cards_join_the_catalogue_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path, {**_OWN, "aliases": ["ours"]}, {**_OWN, "name": "t4-16g"})
    monkeypatch.setenv(CARDS_VARIABLE, str(path))
    assert parse_cluster("ours:2,v100") == ("rtx9000-20g", "rtx9000-20g", "v100-16g")
    assert find_card("t4-16g").memory_bytes == 20 * 2**30  # one's own card wins
    monkeypatch.delenv(CARDS_VARIABLE)
    assert find_card("t4-16g").memory_bytes == 16 * 2**30


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**_OWN, "memory_gib": -1}, "memory_gib must be a number above 0"),
        ({**_OWN, "fp32_tflops": "fast"}, "fp32_tflops must be a number above 0"),
        ({**_OWN, "fp32_tflops": True}, "fp32_tflops must be a number above 0"),
        ({**_OWN, "memory_bandwidth_gb_per_s": float("nan")}, "must be a number above 0"),
        ({key: value for key, value in _OWN.items() if key != "memory_gib"}, r"lacks \['memory_gib'\]"),
        ({**_OWN, "speed": 3}, r"unknown fields \['speed'\]"),
        ({**_OWN, "name": "a b"}, "without comma"),
        ({**_OWN, "half": {"tflops": 3}}, '"half" needs "matmul_tflops"'),
        ({**_OWN, "half": {"matmul_tflops": 3, "speed": 1}}, '"half"'),
        ({**_OWN, "single": {"matmul_tflops": 0}}, "matmul_tflops must be a number above 0"),
        ({**_OWN, "aliases": "ours"}, '"aliases" must be a list'),
        (7, 'needs a "name"'),
    ],
)
def test_wrong_own_cards_say_what_is_wrong(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_user_cards(_write(tmp_path, row))


def test_files_that_hold_no_cards(tmp_path: Path) -> None:
    path = tmp_path / "cards.json"
    for content, message in (("{", "is not JSON"), ("[]", 'a list "cards"'), ('{"cards": 3}', 'a list "cards"')):
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            load_user_cards(path)
    with pytest.raises(ConfigError, match="cannot read the cards"):
        load_user_cards(tmp_path / "absent.json")

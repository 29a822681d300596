"""Models from numbers and from modules: both must count the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from poplar.errors import ConfigError
from poplar.simulation.model_spec import BLOCK_TRAFFIC_BYTES, PRESETS, ModelSpec, parse_model
from poplar.simulation.module_costs import _TrafficMode


class _Norm(nn.Module):
    """RMS norm as Llama has it, one operation after the other."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class _Block(nn.Module):
    def __init__(self, width: int, ffn_width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = _Norm(width), _Norm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, ffn_width, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn_width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(batch, length, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        angles = torch.ones(length, width // self.heads, device=x.device)
        q, k = (z * angles + _rotate_half(z) * angles for z in (q, k))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


class _Llama(nn.Module):
    def __init__(self, layers: int, width: int, ffn_width: int, heads: int, vocab: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(_Block(width, ffn_width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _measured(batch_size: int = 2) -> ModelSpec:
    with torch.device("meta"):
        model = _Llama(4, 256, 704, 8, 1000)
        tokens = torch.zeros(batch_size, 128, dtype=torch.long)
    return ModelSpec.from_module(model, _loss, tokens, batch_size=batch_size, tokens_per_sample=128, name="module")


_NUMBERS = ModelSpec.transformer(layers=4, width=256, ffn_width=704, heads=8, vocab=1000, seq_len=128)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-7b", 6.738), ("llama-1.1b", 1.100), ("gpt2", 0.1244), ("gpt2-xl", 1.5576), ("bert-large", 0.334)],
)
def test_presets_have_their_known_sizes(name: str, billions: float) -> None:
    assert ModelSpec.preset(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_presets_named_by_their_size_have_it() -> None:
    for name in ("llama-0.5b", "llama-1.1b", "llama-3b", "bert-1.1b"):
        size = float(name.split("-")[1].rstrip("b"))
        assert ModelSpec.preset(name).num_parameters / 1e9 == pytest.approx(size, rel=0.15)
    assert len(PRESETS) >= 9


def test_a_module_counts_as_its_numbers() -> None:
    module = _measured()
    assert module.matmul_flop == _NUMBERS.matmul_flop
    # The attention of the meta device multiplies whole matrices of scores, as the numbers count.
    assert module.attention_flop == pytest.approx(_NUMBERS.attention_flop)
    assert module.num_parameters == _NUMBERS.num_parameters
    assert sorted(module.unit_parameters)[-4:] == sorted(_NUMBERS.unit_parameters)[-4:]
    # Kept for backward: the numbers know no matrix of scores (8 heads x 128 x 128 a block, here in full), and count the
    # head at the peak, after forward.
    kept_bytes = module.activation_bytes("fp32", False) - 4 * (4 * 8 * 128 * 128 + 128 * 1000)
    assert kept_bytes == pytest.approx(_NUMBERS.activation_bytes("fp32", False) - _NUMBERS.head_bytes, rel=0.05)


def test_costs_are_per_sample() -> None:
    one, four = _measured(1), _measured(4)
    assert one.matmul_flop == four.matmul_flop
    assert one.kept_elements == pytest.approx(four.kept_elements, rel=1e-2)


def test_measuring_leaves_no_gradients() -> None:
    with torch.device("meta"):
        model, tokens = _Llama(1, 64, 128, 2, 100), torch.zeros(1, 8, dtype=torch.long)
    ModelSpec.from_module(model, _loss, tokens)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("autocast", "key"), [(True, "half"), (False, "single")])
def test_a_blocks_memory_traffic_is_what_was_counted(autocast: bool, key: str) -> None:
    width, length = 512, 256

    def count(layers: int, batch_size: int) -> float:
        model = _Llama(layers, width, 1408, 8, 100)
        tokens = torch.zeros(batch_size, length, dtype=torch.long)
        with _TrafficMode() as traffic:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = _loss(model, tokens)
            loss.backward()
        return traffic.num_bytes

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        by_batch = [count(3, size) - count(1, size) for size in (1, 2)]
    finally:
        torch.set_num_threads(threads)
    assert (by_batch[1] - by_batch[0]) / 2 / length / width == pytest.approx(BLOCK_TRAFFIC_BYTES[key], rel=0.01)


def test_checkpointing_keeps_block_inputs_and_one_block() -> None:
    spec = ModelSpec.preset("llama-1.1b")
    kept, checkpointed = (spec.activation_bytes("fp16", flag) for flag in (False, True))
    inputs = 22 * 2048 * 2048 * 4
    assert checkpointed == pytest.approx(inputs + (kept - spec.head_bytes) / 22 + spec.head_bytes)
    assert spec.activation_bytes("fp16", False) < spec.activation_bytes("fp32", False)
    with pytest.raises(ConfigError, match="put activation checkpointing into the module"):
        _measured().activation_bytes("fp32", True)


def test_longer_samples_cost_more_than_in_proportion() -> None:
    short, long = (ModelSpec.preset("llama-1.1b", length) for length in (1024, 2048))
    assert long.matmul_flop == 2 * short.matmul_flop
    assert long.attention_flop == 4 * short.attention_flop
    assert long.activation_bytes("fp16", False) == 2 * short.activation_bytes("fp16", False)


def test_models_from_text() -> None:
    spec = parse_model("layers=2,width=64,heads=4,vocab=100,seq_len=32,gated=0,tied=1")
    assert len(spec.unit_parameters) == 3
    assert parse_model("GPT2", 512).tokens_per_sample == 512
    assert parse_model("layers=2,width=64,heads=4,vocab=100", 16).tokens_per_sample == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llama-8b", "unknown model 'llama-8b'; known are .*llama-7b"),
        ("layers=2,width=64,heads=4", "lacks vocab, seq_len"),
        ("layers=2,depth=3", "got 'depth=3'"),
        ("layers=two", "got 'layers=two'"),
        ("layers=-2,width=64", "got 'layers=-2'"),
        ("layers=0,width=64,heads=4,vocab=9,seq_len=9", "layers must be an integer from 1"),
        ("layers=2,width=64,heads=5,vocab=9,seq_len=9", "heads 5 must divide width 64"),
        ("layers=2,width=99999999999,heads=1,vocab=9,seq_len=9", "width must be an integer from 1 to 1e9"),
        ("layers=999,width=999999,heads=1,vocab=9,seq_len=9", "parameters; at most"),
        ("layers=2,width=64,heads=4,vocab=9,seq_len=999999999", "seq_len 999999999 is beyond"),
    ],
)
def test_impossible_models_are_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_model(text)
    assert "\n" not in str(caught.value)


def test_modules_that_cannot_be_measured() -> None:
    with pytest.raises(ConfigError, match="must be built on the meta device; it has parameters on cpu"):
        ModelSpec.from_module(nn.Linear(2, 2), _loss, torch.zeros(1, 2))
    with torch.device("meta"):
        model, batch = nn.Linear(2, 2), torch.zeros(1, 2)
    with pytest.raises(ConfigError, match="does not run on the meta device"):
        ModelSpec.from_module(model, lambda model, batch: model(batch).sum() * model(batch).sum().item(), batch)

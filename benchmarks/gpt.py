"""What is trained: a plain GPT in a few sizes, with AdamW, on random tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MicroBatch = tuple[Tensor, Tensor]
"""Tokens and the tokens after them, both (samples, seq_len)."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A GPT's size."""

    layers: int
    width: int
    heads: int
    vocab: int
    seq_len: int


SIZES = {
    "gpt-xs": ModelSize(layers=4, width=128, heads=4, vocab=1024, seq_len=64),
    "gpt-s": ModelSize(layers=6, width=256, heads=8, vocab=4096, seq_len=128),
    "gpt-m": ModelSize(layers=8, width=512, heads=8, vocab=8192, seq_len=128),
    "gpt-gpu": ModelSize(layers=12, width=1024, heads=16, vocab=32768, seq_len=1024),
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A plain GPT whose forward returns the mean cross entropy."""

    def __init__(self, size: ModelSize):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(size.vocab, size.width), nn.Embedding(size.seq_len, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocab, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every system is given."""

    model: str = "gpt-s"
    precision: str = "fp32"
    """ "fp32" or "bf16"."""
    optimizer: str = "foreach"
    """How AdamW runs: "foreach" or "fused"."""

    @property
    def size(self) -> ModelSize:
        return SIZES[self.model]

    def build_model(self) -> GPT:
        """Build the model, with the same weights on every rank and for every system."""
        torch.manual_seed(0)
        return GPT(self.size)

    def adamw(self, params: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        return torch.optim.AdamW(params, **self.adamw_settings())

    def adamw_settings(self) -> dict[str, Any]:
        return {"lr": 1e-3, self.optimizer: True}

    def samples(self, count: int, seed: int, device: torch.device | str = "cpu") -> MicroBatch:
        """Make ``count`` samples."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self.size.vocab, (count, self.size.seq_len + 1), generator=generator).to(device)
        return tokens[:, :-1], tokens[:, 1:]

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16)


def gpt_loss(model: nn.Module, batch: MicroBatch) -> Tensor:
    return model(*batch)

"""The default recipe: a byte-level GPT on the sources of the installed Python standard library.

Real text that every machine with Python already has, so nothing is downloaded. Ranks on machines with different Python
releases would read different text; install the same release everywhere.
"""

from __future__ import annotations

import math
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from poplar.config import Recipe
from poplar.errors import ConfigError

VOCAB_SIZE = 256
HELD_OUT_EVERY = 10
"""Every tenth file is held out, so that held-out text comes from modules that training has never seen."""
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True, kw_only=True)
class BytesGptConfig:
    """Size and schedule of the default recipe.

    Raises:
        ConfigError: a size below 1, or a width that the heads do not divide.
    """

    num_layers: int = 4
    width: int = 128
    num_heads: int = 4
    seq_len: int = 128
    """Bytes the model sees at once; a sample is one byte longer, since targets are inputs moved by one."""
    tied_head: bool = False
    """Whether the output head shares the embedding's weights."""
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    """Applied to matrices alone; biases, norms and positions are left out."""
    warmup_steps: int = 10
    total_steps: int = 80
    """Steps until the cosine has brought the learning rate down to a tenth, where it stays."""
    max_text_bytes: int = 4 << 20
    """Standard library text that is read at most, training and held-out together."""
    num_eval_samples: int = 128
    """Held-out windows at most, evenly spread over the held-out text."""

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "width",
            "num_heads",
            "seq_len",
            "total_steps",
            "max_text_bytes",
            "num_eval_samples",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"BytesGptConfig.{name} must be 1 or more; got {getattr(self, name)!r}")
        if self.width % self.num_heads:
            raise ConfigError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")


class Block(nn.Module):
    """One pre-norm transformer layer: causal attention, then a four times wider MLP."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_out(self._attend(self.attention_norm(x)))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))

    def _attend(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))  # (batch, seq, 3, heads, head width)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2)


class GPT(nn.Module):
    """A small GPT. Takes token ids (batch, seq) and gives logits (batch, seq, vocab_size)."""

    def __init__(self, config: BytesGptConfig, vocab_size: int = VOCAB_SIZE):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, config.width)
        self.position = nn.Parameter(torch.zeros(config.seq_len, config.width))
        self.blocks = nn.ModuleList(Block(config.width, config.num_heads) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, vocab_size, bias=False)
        self.apply(self._init_weights)
        # Each layer adds two branches to the residual stream; scaled so, its variance does not grow with depth (GPT-2).
        for name, parameter in self.named_parameters():
            if name.endswith("_out.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.num_layers))
        if config.tied_head:
            self.head.weight = self.embedding.weight
        else:
            # As small as the rest, the first norm magnifies its gradient so much that the first steps diverge.
            nn.init.normal_(self.embedding.weight, std=0.1)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ByteWindows(Dataset[Tensor]):
    """Windows of seq_len + 1 bytes, int64, that follow each other by seq_len: every byte is a target once."""

    def __init__(self, text: bytes, seq_len: int, max_samples: int | None = None):
        self.text = np.frombuffer(text, dtype=np.uint8)
        self.seq_len = seq_len
        num_windows = (len(text) - 1) // seq_len
        if num_windows < 1:
            raise ConfigError(f"the text has {len(text)} bytes, a window of seq_len {seq_len} needs {seq_len + 1}")
        self._num_samples = min(num_windows, max_samples or num_windows)
        self._stride = num_windows // self._num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        start = index * self._stride * self.seq_len
        return torch.from_numpy(self.text[start : start + self.seq_len + 1].astype(np.int64))


@lru_cache(maxsize=1)
def read_text(max_text_bytes: int) -> tuple[bytes, bytes]:
    """Return the standard library's training text and held-out text.

    Raises:
        ConfigError: this Python has no readable standard library sources.
    """
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    left = max_text_bytes
    for number, path in enumerate(_standard_library_files()):
        if left <= 0:
            break
        text = path.read_bytes()[:left]
        left -= len(text)
        parts[number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(text)
    training, held_out = (b"".join(part) for part in parts)
    if not training or not held_out:
        raise ConfigError(
            f"found too little Python source text under {sysconfig.get_paths()['stdlib']!r}; install the standard "
            "library's sources, raise max_text_bytes, or name a recipe with its own data"
        )
    return training, held_out


def _standard_library_files() -> Iterator[Path]:
    for folder, subfolders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        subfolders[:] = sorted(name for name in subfolders if name not in _SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def unigram_entropy(text: bytes | np.ndarray) -> float:
    """Return the entropy of the text's bytes in nats: the least loss of a model that ignores context."""
    data = np.frombuffer(text, dtype=np.uint8) if isinstance(text, bytes) else text
    counts = np.bincount(data, minlength=VOCAB_SIZE)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross entropy in nats of each byte given those before it; windows: (batch, seq_len + 1)."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def count_targets(windows: Tensor) -> int:
    """Return the bytes that ``next_byte_loss`` is a mean over."""
    return windows[:, 1:].numel()


def bytes_gpt(config: BytesGptConfig | None = None) -> Recipe:
    """Return the recipe for ``config`` (None: the default sizes)."""
    config = config or BytesGptConfig()
    return Recipe(
        model=partial(GPT, config),
        optimizer=partial(_build_optimizer, config),
        loss=next_byte_loss,
        weight=count_targets,
        dataset=partial(_build_dataset, config),
        scheduler=partial(_build_scheduler, config),
        eval_dataset=partial(_build_eval_dataset, config),
        probe=partial(_build_probe, config),
    )


def _build_optimizer(config: BytesGptConfig, model: nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for name, parameter in model.named_parameters() if _decays(name, parameter)]
    others = [parameter for name, parameter in model.named_parameters() if not _decays(name, parameter)]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))


def _decays(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim >= 2 and name != "position"


def _build_scheduler(config: BytesGptConfig, optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, partial(_learning_rate_share, config))


def _learning_rate_share(config: BytesGptConfig, step: int) -> float:
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps))
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


def _build_dataset(config: BytesGptConfig) -> ByteWindows:
    return ByteWindows(read_text(config.max_text_bytes)[0], config.seq_len)


def _build_eval_dataset(config: BytesGptConfig) -> ByteWindows:
    return ByteWindows(read_text(config.max_text_bytes)[1], config.seq_len, max_samples=config.num_eval_samples)


def _build_probe(config: BytesGptConfig, num_samples: int) -> Tensor:
    # Its own generator: profiling must not move the random state of training.
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCAB_SIZE, (num_samples, config.seq_len + 1), generator=generator)


recipe = bytes_gpt()

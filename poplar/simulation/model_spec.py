"""Models as the simulator sees them: parameters by unit, FLOP, memory traffic and kept activations per sample.

From numbers (``ModelSpec.transformer``, ``ModelSpec.preset``: no torch) or from a module on the meta device
(``ModelSpec.from_module``).

[Note: what is counted]
A Llama block's products with weights cost 2 FLOP a parameter and token, attention's products 4 x sequence x width FLOP
a token, with no discount for causality. All else (norms, residuals, rotary positions, gates, casts) is bound by memory.
Counted over a Llama block that runs one operation after the other, forward and backward move 715 bytes a token and unit
of width under 16-bit autocast and 794 in float32; ``tests/unit/test_simulator.py`` counts it again. Blocks of other
kinds are taken to move as much. Kept for backward are the inputs of every product and, in float32 also under autocast,
of every norm; attention is taken to be fused (``scaled_dot_product_attention``, no matrix of scores).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poplar.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

BLOCK_TRAFFIC_BYTES = {"half": 715.0, "single": 794.0}
"""Forward and backward, per token and unit of width of a block: see the note above."""
_LOGIT_TRAFFIC_BYTES = 24.0
"""Forward and backward, per logit: written, cast, soft-maxed, read; gradient written, cast, read."""
_LOGIT_KEPT_BYTES = 12.0
"""Per logit: itself, its float32 or soft-max, its gradient."""
MAX_PARAMETERS = 10**13
MAX_SEQ_LEN = 10**8


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Costs of one model at one sequence length, all per sample unless said otherwise."""

    name: str
    unit_parameters: tuple[int, ...]
    """Parameters by unit: what stages 2 and 3 gather and reduce together."""
    tokens_per_sample: int
    matmul_flop: float
    """Forward: products with weights."""
    attention_flop: float
    """Forward: products of attention."""
    half_traffic_bytes: float
    """Forward and backward in 16 bit: bytes moved by all that is not a matrix product."""
    single_traffic_bytes: float
    """The same in float32."""
    kept_wide_elements: float
    """Elements kept for backward that are float32 under autocast too."""
    kept_elements: float
    """Elements kept for backward in the compute dtype."""
    head_bytes: float = 0.0
    """Logits, their soft-max and their gradient at the end of forward."""
    block_input_elements: float | None = None
    """Inputs of all blocks, kept under activation checkpointing. None: it cannot be told (``from_module``)."""
    num_blocks: int = 1

    def __post_init__(self) -> None:
        if not self.unit_parameters or min(self.unit_parameters) < 0 or self.num_parameters < 1:
            raise ConfigError(f"{self.name}: a model needs parameters; got units of {list(self.unit_parameters)}")
        if self.num_parameters > MAX_PARAMETERS:
            raise ConfigError(
                f"{self.name}: {self.num_parameters:.3g} parameters; at most {MAX_PARAMETERS:.0e} are taken"
            )

    @property
    def num_parameters(self) -> int:
        return sum(self.unit_parameters)

    def traffic_bytes(self, precision: str) -> float:
        """Return the bytes that all but the matrix products move, forward and backward."""
        return self.single_traffic_bytes if precision == "fp32" else self.half_traffic_bytes

    def activation_bytes(self, precision: str, checkpointing: bool) -> float:
        """Return the bytes that one sample keeps at the end of forward.

        Raises:
            ConfigError: checkpointing of a model that was measured as a module.
        """
        element_bytes = 4 if precision == "fp32" else 2
        kept_bytes = 4 * self.kept_wide_elements + element_bytes * self.kept_elements
        if not checkpointing:
            return kept_bytes + self.head_bytes
        if self.block_input_elements is None:
            raise ConfigError(
                f"{self.name} was measured as a module: put activation checkpointing into the module instead"
            )
        return 4 * self.block_input_elements + kept_bytes / self.num_blocks + self.head_bytes

    @classmethod
    def transformer(
        cls,
        *,
        layers: int,
        width: int,
        heads: int,
        vocab: int,
        seq_len: int,
        ffn_width: int | None = None,
        kv_heads: int | None = None,
        gated: bool = True,
        tied: bool = False,
        learned_positions: bool = False,
        name: str = "transformer",
    ) -> ModelSpec:
        """Describe a decoder or encoder by its numbers; the defaults are Llama's.

        Args:
            ffn_width: default 8/3 of the width, rounded up to 256, where ``gated``, else 4 times the width.
            gated: the feed-forward part has three matrices (SwiGLU), else two.
            tied: the head is the embedding.

        Raises:
            ConfigError: a number is not an integer from 1, or ``heads`` does not divide ``width``.
        """
        ffn_width = ffn_width or (256 * math.ceil(width * 8 / 3 / 256) if gated else 4 * width)
        kv_heads = kv_heads or heads
        _check_integers(
            name,
            layers=layers,
            width=width,
            heads=heads,
            vocab=vocab,
            seq_len=seq_len,
            ffn=ffn_width,
            kv_heads=kv_heads,
        )
        if width % heads or heads % kv_heads:
            raise ConfigError(f"{name}: heads {heads} must divide width {width}, and kv_heads {kv_heads} divide heads")
        if seq_len > MAX_SEQ_LEN:
            raise ConfigError(f"{name}: seq_len {seq_len} is beyond {MAX_SEQ_LEN}")
        kv_width = width // heads * kv_heads
        matrices = 2 * width * width + 2 * width * kv_width + (3 if gated else 2) * width * ffn_width
        # Norms; the older models also have biases.
        vectors = 2 * width if gated else 9 * width + ffn_width
        embedding = vocab * width + (seq_len * width if learned_positions else 0)
        head = () if tied else (vocab * width,)
        # Inputs of products: two norms' outputs, q, k and v, attention's output before and after its transpose.
        kept = 5 * width + 2 * kv_width + 4 * ffn_width if gated else 7 * width + 2 * ffn_width
        traffic = {key: layers * value * width for key, value in BLOCK_TRAFFIC_BYTES.items()}
        return cls(
            name=name,
            unit_parameters=(embedding, *[matrices + vectors] * layers, *head),
            tokens_per_sample=seq_len,
            matmul_flop=2.0 * seq_len * (layers * matrices + vocab * width),
            attention_flop=4.0 * layers * seq_len * seq_len * width,
            half_traffic_bytes=seq_len * (traffic["half"] + _LOGIT_TRAFFIC_BYTES * vocab),
            single_traffic_bytes=seq_len * (traffic["single"] + _LOGIT_TRAFFIC_BYTES * vocab),
            kept_wide_elements=float(seq_len * layers * (4 if gated else 2) * width),
            kept_elements=float(seq_len * layers * kept),
            head_bytes=_LOGIT_KEPT_BYTES * seq_len * vocab,
            block_input_elements=float(seq_len * layers * width),
            num_blocks=layers,
        )

    @classmethod
    def preset(cls, name: str, seq_len: int | None = None) -> ModelSpec:
        """Describe a model by its name; ``seq_len`` None takes the length the model was made for.

        Raises:
            ConfigError: no such preset; the message lists them.
        """
        numbers = PRESETS.get(name.strip().lower())
        if numbers is None:
            raise ConfigError(
                f"unknown model {name!r}; known are {', '.join(PRESETS)}, or 'layers=..,width=..,heads=..'"
            )
        return cls.transformer(**{**numbers, **({} if seq_len is None else {"seq_len": seq_len}), "name": name})

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        loss: Callable[[Any, Any], Any],
        batch: Any,
        *,
        batch_size: int = 1,
        tokens_per_sample: int = 1,
        unit_parameters: tuple[int, ...] | None = None,
        name: str = "module",
    ) -> ModelSpec:
        """Measure a module by one forward and backward on the meta device: nothing is computed, no memory is taken.

        Args:
            loss: called as ``loss(module, batch)``; its result is a scalar on meta.
            batch: of ``batch_size`` samples, on meta.
            unit_parameters: parameters by unit. None: the elements of outermost lists and sequences, then the rest.

        Raises:
            ConfigError: a parameter is not on meta, or the loss cannot run there.
        """
        from poplar.simulation.module_costs import measure_module, parameters_by_unit

        costs = measure_module(module, loss, batch)
        return cls(
            name=name,
            unit_parameters=unit_parameters or parameters_by_unit(module),
            tokens_per_sample=tokens_per_sample,
            matmul_flop=costs.matmul_flop / batch_size,
            attention_flop=costs.attention_flop / batch_size,
            half_traffic_bytes=costs.traffic_bytes / 2 / batch_size,
            single_traffic_bytes=costs.traffic_bytes / batch_size,
            kept_wide_elements=0.0,
            kept_elements=costs.kept_elements / batch_size,
        )


PRESETS: dict[str, dict[str, Any]] = {
    # github.com/jzhang38/TinyLlama
    "llama-1.1b": dict(layers=22, width=2048, heads=32, kv_heads=4, ffn_width=5632, vocab=32000, seq_len=2048),
    # arXiv:2302.13971, table 2
    "llama-7b": dict(layers=32, width=4096, heads=32, ffn_width=11008, vocab=32000, seq_len=2048),
    # github.com/openlm-research/open_llama
    "llama-3b": dict(layers=26, width=3200, heads=32, ffn_width=8640, vocab=32000, seq_len=2048),
    # Assumed shapes: only the sizes are known.
    "llama-0.5b": dict(layers=22, width=1280, heads=20, ffn_width=3456, vocab=32000, seq_len=2048),
    "bert-1.1b": dict(
        layers=28, width=1792, heads=28, vocab=30522, seq_len=512, gated=False, tied=True, learned_positions=True
    ),
    # arXiv:1810.04805
    "bert-large": dict(
        layers=24, width=1024, heads=16, vocab=30522, seq_len=512, gated=False, tied=True, learned_positions=True
    ),
    # github.com/openai/gpt-2
    **{
        name: dict(
            layers=layers, width=width, heads=heads, vocab=50257, seq_len=1024, gated=False, tied=True,
            learned_positions=True,
        )
        for name, layers, width, heads in (
            ("gpt2", 12, 768, 12),
            ("gpt2-medium", 24, 1024, 16),
            ("gpt2-large", 36, 1280, 20),
            ("gpt2-xl", 48, 1600, 25),
        )
    },
}  # fmt: skip


def parse_model(text: str, seq_len: int | None = None) -> ModelSpec:
    """Return the model of a preset's name, or of numbers as "layers=24,width=1024,heads=16,vocab=50257,seq_len=1024".

    Raises:
        ConfigError: an unknown preset or number, or one that is missing.
    """
    if "=" not in text:
        return ModelSpec.preset(text, seq_len)
    settings: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in _NUMBERS or not value.isdecimal():
            raise ConfigError(
                f"the model {text!r}: expected NUMBER=INTEGER with NUMBER of {', '.join(_NUMBERS)}; got {part!r}"
            )
        settings[key] = bool(int(value)) if key in ("gated", "tied", "learned_positions") else int(value)
    if seq_len is not None:
        settings["seq_len"] = seq_len
    missing = [key for key in ("layers", "width", "heads", "vocab", "seq_len") if key not in settings]
    if missing:
        raise ConfigError(f"the model {text!r} lacks {', '.join(missing)}")
    return ModelSpec.transformer(**settings)


_NUMBERS = (
    "layers",
    "width",
    "heads",
    "vocab",
    "seq_len",
    "ffn_width",
    "kv_heads",
    "gated",
    "tied",
    "learned_positions",
)


def _check_integers(name: str, **numbers: int) -> None:
    for key, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 10**9:
            raise ConfigError(f"{name}: {key} must be an integer from 1 to 1e9; got {value!r}")

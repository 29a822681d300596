"""Real models of the ``transformers`` library, tiny and with random weights, equal one process at all stages.

Float64, two ranks that get different numbers of samples; with and without gradient checkpointing; LoRA by ``peft`` on
one.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import poplar
from poplar.zero.precision import PoplarWarning
from tests.helpers.parity import TOLERANCE, distance, rows_of
from tests.helpers.spawn import run_ranks

pytest.importorskip("transformers", reason="needs the extra hf")

NUM_SAMPLES, LENGTH, VOCABULARY = 6, 5, 11
NUM_STEPS = 2


def _tiny(family: str) -> nn.Module:
    import transformers as hf

    small: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 2, "intermediate_size": 12, "max_position_embeddings": 16}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if family == "gpt2":
        config = hf.GPT2Config(
            vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0,
        )  # fmt: skip
        return hf.GPT2LMHeadModel(config)
    if family == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**small, num_key_value_heads=1))
    if family == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**small, **no_dropout))
    if family == "t5":
        return hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, dropout_rate=0.0,
                decoder_start_token_id=0,
            )
        )  # fmt: skip
    small.pop("vocab_size"), small.pop("max_position_embeddings")
    return hf.ViTForImageClassification(
        hf.ViTConfig(**small, **no_dropout, image_size=8, patch_size=4, num_labels=3, pooler_output_size=8)
    )


def _low_rank(family: str) -> nn.Module:
    import peft

    return peft.get_peft_model(_tiny(family), peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]))


def _batch(family: str, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    if family == "vit":
        pixels = torch.randn(NUM_SAMPLES, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)}
    ids = torch.randint(0, VOCABULARY, (NUM_SAMPLES, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, 1:][torch.rand(NUM_SAMPLES, LENGTH - 1, generator=generator) < 0.4] = -100
    return {"input_ids": ids, "labels": labels}


CAUSAL = ("gpt2", "llama")


def _loss(family: str, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss would do, were it not computed in float32."""
    logits, labels = model(**batch).logits, batch["labels"]
    if family in CAUSAL:  # the first label of a sample has no prediction
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def _weight(family: str, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["labels"]
    return (labels[:, 1:] if family in CAUSAL else labels).ne(-100).sum()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def _build(family: str, lora: bool, checkpointing: bool, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = (_low_rank if lora else _tiny)(family).double().train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if lora:
            model.enable_input_require_grads()
    return model


def _equals_one_process(rank: int, world_size: int, families: tuple[tuple[str, bool], ...]) -> list[str]:
    failures: list[str] = []
    for category in (DeprecationWarning, FutureWarning):  # theirs, of renamed methods
        warnings.filterwarnings("ignore", category=category)
    warnings.filterwarnings("ignore", ".*at stage 3 it is gathered whole", PoplarWarning)
    for family, lora in families:
        for checkpointing in (False, True):
            whole = _build(family, lora, checkpointing, seed=0)
            optimizer = _optimizer(whole)
            expected = []
            for step in range(NUM_STEPS):
                optimizer.zero_grad()
                loss = _loss(family, whole, _batch(family, step))
                loss.backward()
                trained = [p for p in whole.parameters() if p.requires_grad and p.grad is not None]
                norm = torch.nn.utils.get_total_norm([p.grad for p in trained])
                optimizer.step()
                expected.append((loss.item(), norm.item()))
            for stage in range(4):
                where = f"{family}{' lora' * lora}{' checkpointed' * checkpointing}, z{stage}"
                model = _build(family, lora, checkpointing, seed=rank)
                engine = poplar.initialize(
                    model, _optimizer(model), partial(_loss, family), zero_stage=stage, weight=partial(_weight, family),
                    shard_ratios=[1, 2] if checkpointing else None,
                )  # fmt: skip
                for step in range(NUM_STEPS):
                    batch = _batch(family, step)
                    own = [rows_of(batch, [0, 1, 2]), rows_of(batch, [3, 4])] if rank == 0 else [rows_of(batch, [5])]
                    result = engine.step(own)
                    for got, want in zip((result.loss, result.grad_norm), expected[step], strict=True):
                        if abs(got - want) > TOLERANCE * abs(want):
                            failures.append(f"{where}, step {step}: loss or norm {got}, one process {want}")
                got = engine.full_state_dict()
                for name, value in whole.state_dict().items():
                    if distance(got[name], value) > TOLERANCE:
                        failures.append(f"{where}: {name} is off by {distance(got[name], value)}")
                engine.close()
    return failures


FAMILIES = (("gpt2", False), ("llama", False), ("bert", False), ("t5", False), ("vit", False))


def test_transformers_models_equal_one_process() -> None:
    for failures in run_ranks(_equals_one_process, 2, FAMILIES, timeout_s=110):
        assert not failures, "\n".join(failures)


def test_peft_low_rank_adapters_equal_one_process() -> None:
    pytest.importorskip("peft", reason="needs the extra hf")
    for failures in run_ranks(_equals_one_process, 2, (("llama", True),), timeout_s=110):
        assert not failures, "\n".join(failures)

"""Random packed rows, small drafters and a target of two matrices, shared by the tests of drafter and step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftline.config import DFlashConfig, LossConfig
from draftline.draft.attention import Attention, DenseAttention
from draftline.draft.block import FrozenTarget
from draftline.draft.loss import StepMetrics
from draftline.draft.model import DFlashDraftModel
from draftline.records import PackedBatch
from draftline.targets.head import TargetHead
from draftline.train.step import row_loss

VOCABULARY = 48
WIDTH = 16


def drafter_config(changes: dict[str, Any] | None = None) -> DFlashConfig:
    """Two layers, blocks of 4, two captured layers, and what `changes` says."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 512,
        "sliding_window": None,
        "block_size": 4,
        "mask_token_id": VOCABULARY - 1,
        "target_layer_ids": (0, 2),
        "num_target_layers": 8,
        "sample_from_anchor": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    shape |= changes or {}
    shape.setdefault("layer_types", ("full_attention",) * shape["num_hidden_layers"])
    return DFlashConfig(**shape)


def drafter(config: DFlashConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> DFlashDraftModel:
    """Weights wide enough that every input matters; norm weights are drawn too."""
    model = DFlashDraftModel(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.25 * drawn if parameter.ndim == 2 else 1.0 + 0.1 * drawn
    if config.draft_vocab_size is not None:
        model.keep_tokens(torch.randperm(config.vocab_size, generator=generator)[: config.head_rows].sort().values)
    return model.to(dtype)


class TinyTarget(nn.Module):
    """Embedding, final norm and head of a target, frozen."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.embedding.weight.data = torch.randn(VOCABULARY, WIDTH, generator=generator)
        self.norm.weight.data = 1.0 + 0.1 * torch.randn(WIDTH, generator=generator)
        self.lm_head.weight.data = 0.3 * torch.randn(VOCABULARY, WIDTH, generator=generator)
        self.requires_grad_(False).to(dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def target_ids(self, last_hidden: Tensor, chunk_size: int) -> Tensor:
        return torch.cat([self.lm_head(self.norm(part)).argmax(-1) for part in last_hidden.split(chunk_size)])

    def frozen(self, kept_ids: Tensor | None = None) -> FrozenTarget:
        return FrozenTarget(self.embedding, TargetHead(self.norm, self.lm_head).of_rows(kept_ids))


def make_row(
    lengths: Sequence[int],
    loss_mask_S: Tensor,
    captured: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    sample_ids: Sequence[int] | None = None,
    epoch: int = 0,
) -> PackedBatch:
    """A row of documents of these lengths with random tokens and states; it carries the last hidden states."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    return PackedBatch(
        sequence_number=0,
        step=0,
        last_of_step=True,
        epoch=epoch,
        sample_ids=tuple(range(len(lengths)) if sample_ids is None else sample_ids),
        input_ids=torch.randint(0, VOCABULARY - 1, (1, total), generator=generator),
        loss_mask=loss_mask_S[None],
        document_ids=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        hidden_states_packed=torch.randn(1, total, captured * WIDTH, generator=generator).to(dtype),
        verifier_last_hidden_packed=torch.randn(1, total, WIDTH, generator=generator).to(dtype),
    )


def random_mask(rng: random.Random, length: int, longest_turn: int = 9) -> list[bool]:
    """Turns of random lengths, supervised and not in alternation."""
    mask: list[bool] = []
    supervised = rng.random() < 0.3
    while len(mask) < length:
        mask += [supervised] * rng.randint(1, longest_turn)
        supervised = not supervised
    return mask[:length]


def random_lengths(rng: random.Random, shortest: int = 2, longest: int = 24) -> list[int]:
    """One to four documents."""
    return [rng.randint(shortest, longest) for _ in range(rng.randint(1, 4))]


def block_outputs(
    model: DFlashDraftModel,
    batch: PackedBatch,
    anchors: Tensor,
    target: TinyTarget,
    attention: type[Attention] = DenseAttention,
) -> tuple[Tensor, StepMetrics]:
    """What the drafter says for all blocks of a row, [A, P, D], through the training step's own path."""
    seen: list[Tensor] = []
    hook = model.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    with torch.no_grad():
        _, metrics = row_loss(model, batch, anchors, target.frozen(model.kept_ids), LossConfig(), attention)
    hook.remove()
    return seen[0][0].unflatten(0, (-1, model.config.block_size)), metrics

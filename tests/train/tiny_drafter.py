"""A drafter of a few hundred weights, for tests of what surrounds it."""

from __future__ import annotations

import torch

from draftline.config import DFlashConfig
from draftline.draft.model import DFlashDraftModel


def tiny_config(vocab_size: int = 32) -> DFlashConfig:
    return DFlashConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=512,
        layer_types=("full_attention",),
        sliding_window=None,
        block_size=4,
        mask_token_id=vocab_size - 1,
        target_layer_ids=(0, 1),
        num_target_layers=4,
        sample_from_anchor=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def tiny_drafter(seed: int = 0) -> DFlashDraftModel:
    model = DFlashDraftModel(tiny_config())
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def update(model: DFlashDraftModel, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One optimiser update with drawn gradients."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    optimizer.zero_grad()

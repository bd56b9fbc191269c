"""Write and read drafters in z-lab's format: `config.json` and `model.safetensors`, which most serving engines read.

Every key is written, because readers differ in what they assume about a missing one: SGLang takes `num_target_layers`
from the drafter's own depth, some read `block_size` only at the top level and some only inside `dflash_config`.
`is_causal` overrides all layers of a reader, so it is left out exactly where layers differ (full layers bidirectional,
sliding layers causal), which is what all readers do by default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftline.config import DFlashConfig
from draftline.draft.model import DFlashDraftModel
from draftline.errors import ExportError
from draftline.formats.folder import ExportDtype, canonical, write_folder
from draftline.formats.importing import load_format
from draftline.formats.verify import refuse_short_window, verify_folder

_NEUTRAL: dict[str, float | None] = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}
"""What the target does to embeddings and logits, written only where it does something."""


def export_zlab(
    draft_model: DFlashDraftModel, folder: Path, dtype: ExportDtype = "bfloat16", card: str | None = None
) -> None:
    """Write the drafter, read it back, and compare: the folder appears only if what it holds is the same drafter.

    Args:
        card: content of README.md.

    Raises:
        ExportError: the format cannot express this drafter, a weight is not finite, or what was read back differs.
        StorageError: the folder is not empty or cannot be written.
    """
    tree = zlab_config(draft_model.config, dtype)
    write_folder(folder, tree, draft_model, dtype, lambda written: verify_folder(written, draft_model, dtype), card)


def load_zlab(folder: Path, dtype: torch.dtype = torch.float32) -> DFlashDraftModel:
    """Read a drafter in this format, every tensor and no other, and give its weights in `dtype` on the CPU.

    Raises:
        CheckpointError: no drafter is there, it is in another format, or not one that this model class computes.
    """
    return load_format(folder, "zlab").draft_model.to(dtype).eval()


def zlab_config(config: DFlashConfig, dtype: ExportDtype) -> dict[str, Any]:
    """The complete `config.json`.

    Raises:
        ExportError: the format has no words for this drafter.
    """
    if config.sample_from_anchor:
        raise ExportError(
            "sample_from_anchor = true: z-lab's decoder would read every slot one place too early, without an error; "
            "export with --for speculators, or train with drafter.sample_from_anchor=false"
        )
    if config.draft_vocab_size is not None:
        raise ExportError(
            f"draft_vocab_size = {config.draft_vocab_size}: z-lab's format has no place for a reduced vocabulary, and "
            "its readers would draft from the target's whole head: export with --for vllm or --for speculators, or "
            "train without drafter.draft_vocab_size"
        )
    refuse_short_window(config)
    config = canonical(config)
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    scaling = None if rope["rope_type"] == "default" else rope
    sliding = "sliding_attention" in config.layer_types
    tree: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "sample_from_anchor": False,
            **_target_scales(config),
        },
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_hidden_layers,
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window,
        "layer_types": list(config.layer_types),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "dtype": dtype,
    }
    causal = _is_causal(config)
    return tree if causal is None else {**tree, "is_causal": causal}


def _is_causal(config: DFlashConfig) -> bool | None:
    """One answer for all layers, or None where readers are to decide by layer type."""
    kinds = set(config.layer_types)
    if "sliding_attention" not in kinds or not config.sliding_window_causal:
        return False
    return True if kinds == {"sliding_attention"} else None


def _target_scales(config: DFlashConfig) -> dict[str, float | None]:
    values = {
        "input_embedding_scale": config.input_embedding_scale,
        "output_multiplier": config.output_multiplier,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    return {name: value for name, value in values.items() if value != _NEUTRAL[name]}

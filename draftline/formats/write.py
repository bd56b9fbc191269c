"""Write drafters in z-lab's format, which most serving engines read, or in that of speculators 0.9, for vLLM.

z-lab's has every key written, because readers differ in what they assume about a missing one: SGLang takes
`num_target_layers` from the drafter's own depth, some read `block_size` only at the top level and some only inside
`dflash_config`. `is_causal` overrides all layers of a reader, so it is left out exactly where layers differ (full ones
bidirectional, sliding ones causal), which is what all readers do by default.

Three conventions of speculators differ from ours and raise no error: layers are numbered from one (convention B),
`sliding_window_non_causal` is for vLLM the causality of *all* layers, and embedding and head are rebuilt from the raw
rows of the target. So a bidirectional drafter is written with `sliding_window_non_causal: true` even without sliding
layers, and what the format cannot say is refused: full bidirectional layers mixed with causal sliding ones, and targets
that scale their embeddings or logits. A reduced vocabulary is written as `d2t` (offsets), `t2d` and the drafter's rows
of the target's head, because vLLM cannot choose them by itself: without `lm_head` it would take the target's whole one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from draftline.config import DFlashConfig, ExportDtype
from draftline.draft.model import DFlashDraftModel
from draftline.draft.vocabulary import membership_of
from draftline.errors import ConfigError, ExportError
from draftline.formats.check import refuse_short_window, verify_folder
from draftline.formats.files import DTYPES, canonical, write_folder
from draftline.formats.programs import formats_for
from draftline.targets.head import TargetHead
from draftline.targets.layers import to_aux_hidden_state_layer_ids

_NEUTRAL: dict[str, float | None] = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}
"""What the target does to embeddings and logits, written only where it does something."""

SPECULATORS_VERSION = "0.9.0"
"""The version whose format this is."""


def export_zlab(
    draft_model: DFlashDraftModel,
    folder: Path,
    dtype: ExportDtype,
    card: str | None = None,
    prove: Callable[[Path], None] | None = None,
) -> None:
    """Write the drafter, read it back, and compare: the folder appears only if what it holds is the same drafter.

    Args:
        card: content of README.md.
        prove: called with the checked files; adds its own.

    Raises:
        ExportError: the format cannot express this drafter, a weight is not finite, or what was read back differs.
        StorageError: the folder is not empty or cannot be written.
    """
    tree = zlab_config(draft_model.config, dtype)
    write_folder(
        folder, tree, draft_model, dtype, lambda written: verify_folder(written, draft_model, dtype), card, prove=prove
    )


def zlab_config(config: DFlashConfig, dtype: ExportDtype) -> dict[str, Any]:
    """The complete `config.json`.

    Raises:
        ExportError: the format has no words for this drafter.
    """
    _refuse_what_zlab_lacks(config)
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
        **_sizes(config),
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


def _refuse_what_zlab_lacks(config: DFlashConfig) -> None:
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


def _is_causal(config: DFlashConfig) -> bool | None:
    """One answer for all layers, or None where readers are to decide by layer type."""
    answers = set(config.causal_layers)
    return answers.pop() if len(answers) == 1 else None


def _target_scales(config: DFlashConfig) -> dict[str, float | None]:
    values = {
        "input_embedding_scale": config.input_embedding_scale,
        "output_multiplier": config.output_multiplier,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    return {name: value for name, value in values.items() if value != _NEUTRAL[name]}


def export_speculators(
    draft_model: DFlashDraftModel,
    folder: Path,
    dtype: ExportDtype,
    *,
    verifier: str | None,
    verifier_architectures: tuple[str, ...] = (),
    target_head: TargetHead | None = None,
    card: str | None = None,
    prove: Callable[[Path], None] | None = None,
) -> None:
    """Write the drafter, read it back, and compare: the folder appears only if what it holds is the same drafter.

    Args:
        verifier: the target's hub name or folder, from which readers take embedding and head.
        verifier_architectures: as its `config.json` names them.
        target_head: the target's, of which a reduced vocabulary stores rows.
        card: content of README.md.
        prove: called with the checked files; adds its own.

    Raises:
        ExportError: the format cannot express this drafter, or what was read back differs.
        StorageError: the folder is not empty or cannot be written.
    """
    tree = speculators_config(draft_model.config, dtype, verifier, verifier_architectures)
    beside = _reduced_head(draft_model, target_head, dtype)
    write_folder(
        folder,
        tree,
        draft_model,
        dtype,
        lambda written: verify_folder(written, draft_model, dtype, beside),
        card,
        beside,
        prove,
    )


def speculators_config(
    config: DFlashConfig, dtype: ExportDtype, verifier: str | None, verifier_architectures: tuple[str, ...]
) -> dict[str, Any]:
    """The complete `config.json`.

    Raises:
        ExportError: the format has no words for this drafter.
    """
    _refuse_unspeakable(config)
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "aux_hidden_state_layer_ids": list(to_aux_hidden_state_layer_ids(config.target_layer_ids)),
        "block_size": config.block_size,
        "draft_vocab_size": config.head_rows,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": not any(config.causal_layers),
        "target_hidden_size": None,
        "dtype": dtype,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.num_speculative_tokens,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": list(verifier_architectures)},
        },
        "transformer_layer_config": _layers(canonical(config)),
    }


def _reduced_head(
    draft_model: DFlashDraftModel, target_head: TargetHead | None, dtype: ExportDtype
) -> dict[str, Tensor]:
    """What is stored with the drafter's own tensors; nothing if it can say every token."""
    if draft_model.d2t is None or draft_model.kept_ids is None:
        return {}
    if target_head is None:
        raise ExportError(
            f"draft_vocab_size = {draft_model.config.draft_vocab_size} stores rows of the target's head, and no target "
            "was given: add --target"
        )
    head = target_head.of_rows(draft_model.kept_ids).lm_head
    if "bias" in dict(head.named_parameters()):
        raise ExportError("the target's head has a bias, for which the speculators format has no place: not exported")
    rows = head.get_parameter("weight").detach().to("cpu", DTYPES[dtype]).contiguous()
    return {"lm_head.weight": rows, "t2d": membership_of(draft_model.d2t.cpu(), draft_model.config.vocab_size)}


def _sizes(config: DFlashConfig) -> dict[str, Any]:
    """What both formats say in the same words."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
    }


def _layers(config: DFlashConfig) -> dict[str, Any]:
    layers: dict[str, Any] = {
        "model_type": "qwen3",
        **_sizes(config),
        "max_position_embeddings": config.max_position_embeddings,
        "layer_types": list(config.layer_types),
        "attention_bias": False,
        "rope_parameters": dict(config.rope_parameters),
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    if config.sliding_window is None:
        return layers
    # without use_sliding_window transformers forgets the window
    return layers | {
        "use_sliding_window": True,
        "sliding_window": config.sliding_window,
        "max_window_layers": config.num_hidden_layers,
    }


def refuse_unwritable(config: DFlashConfig) -> None:
    """Refuse a drafter that could be trained and never exported.

    Raises:
        ConfigError: no format has words for it.
    """
    reasons = []
    for form in formats_for(config):
        try:
            _refuse_what_zlab_lacks(config) if form == "zlab" else _refuse_unspeakable(config)
        except ExportError as error:
            reasons.append(str(error).partition(": ")[0])
        else:
            return
    special = [name for name in ("sample_from_anchor", "draft_vocab_size") if getattr(config, name)]
    without = f"without drafter.{' and drafter.'.join(special)}" if special else "with a longer drafter.sliding_window"
    raise ConfigError(f"no export could hold this drafter ({'; '.join(dict.fromkeys(reasons))}): train it {without}")


def _refuse_unspeakable(config: DFlashConfig) -> None:
    elsewhere = "export with --for zlab (z-lab's format)"
    if config.draft_vocab_size is not None:  # for which there is no other format
        elsewhere = "train without drafter.draft_vocab_size, and export with --for zlab"
    if len(set(config.causal_layers)) > 1:
        raise ExportError(
            "full bidirectional layers mixed with causal sliding ones have no speculators form that vLLM runs right: "
            f"{elsewhere}"
        )
    scales = {
        "input_embedding_scale": config.input_embedding_scale,
        "output_multiplier": config.output_multiplier,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    for name, value in scales.items():
        if value not in (None, 1.0):
            raise ExportError(
                f"{name} = {value}: the speculators format rebuilds embedding and head from raw rows and has no place "
                f"for it: {elsewhere}"
            )
    refuse_short_window(config)

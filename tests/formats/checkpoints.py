"""Folders as other trainers write them: their keys, their tensor names, tiny random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftline.draft.model import DFlashDraftModel

Tree = dict[str, Any]

LAYERS: Tree = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "rope_scaling": None,
    "max_position_embeddings": 128,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}
FULL = ["full_attention", "full_attention"]


def zlab() -> Tree:
    return {
        **LAYERS,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "num_target_layers": 7,
        "is_causal": False,
        "dflash_config": {"block_size": 4, "mask_token_id": 39, "target_layer_ids": [1, 3, 4]},
        "max_window_layers": 2,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": FULL,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "dtype": "float32",
    }


def specforge() -> Tree:
    """z-lab's older keys: block size at the top only, no causality; and an `auto_map` to a file that is not there."""
    tree = zlab()
    del tree["is_causal"], tree["dflash_config"]["block_size"]
    return {**tree, "auto_map": {"AutoModel": "modeling_dflash.DFlashDraftModel"}}


def modelopt() -> Tree:
    nested = {"mask_token_id": 39, "target_layer_ids": [1, 3, 4], "causal": False}
    tree = {**LAYERS, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 4}
    return {
        **tree,
        "dflash_config": nested,
        "initializer_range": 0.02,
        "torch_dtype": "float32",
        "num_target_layers": 7,
        "layer_types": FULL,
        "eos_token_id": 2,
    }


def modelopt_sliding() -> Tree:
    tree = modelopt()
    tree["dflash_config"] |= {"use_swa": True, "swa_window_size": 6}
    return {**tree, "sliding_window": 6}


def nemo() -> Tree:
    tree = zlab()
    return {**tree, "architectures": ["Qwen3DFlashDraftModel"], "transformers_version": "5.19.0"}


def torchspec() -> Tree:
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings")
    return {
        **{name: LAYERS[name] for name in (*keys, *more)},
        "architectures": ["DFlashDraftModel"],
        "model_type": "dflash",
        "block_size": 4,
        "num_target_layers": 3,
        "target_hidden_size": 24,
        "target_num_hidden_layers": 7,
        "target_layer_ids": [1, 3, 4],
        "mask_token_id": 39,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def deepspec() -> Tree:
    """The target's whole configuration, with flat keys added."""
    return {
        **{name: value for name, value in LAYERS.items() if not name.startswith("rope")},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_target_layers": 7,
        "block_size": 4,
        "layer_types": FULL,
        "mask_token_id": 39,
        "target_layer_ids": [1, 3, 4],
        "num_anchors": 512,
        "enable_confidence_head": False,
        "markov_rank": 0,
        "eos_token_id": 2,
        "dtype": "float32",
    }


def speculators() -> Tree:
    layers = {name: value for name, value in LAYERS.items() if not name.startswith("rope")}
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}]
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "block_size": 4,
        "draft_vocab_size": 40,
        "mask_token_id": 39,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "target_hidden_size": None,
        "dtype": "float32",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": methods,
            "verifier": {"name_or_path": "a/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": {
            **layers,
            "model_type": "qwen3",
            "layer_types": FULL,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            "eos_token_id": 2,
        },
    }


CONTRACTS: dict[str, Callable[[], Tree]] = {
    "zlab": zlab,
    "specforge": specforge,
    "modelopt": modelopt,
    "nemo": nemo,
    "torchspec": torchspec,
    "deepspec": deepspec,
    "speculators": speculators,
}


def tensors_of(form: str, model: DFlashDraftModel, table: Tensor | None = None) -> dict[str, Tensor]:
    """A drafter's weights under the names of a trainer, with the copies of the target's table that it stores."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    table = torch.zeros(40, 24) if table is None else table
    if form == "torchspec":
        names = {"fc.weight": "context_proj.weight", "hidden_norm.weight": "context_norm.weight"}
        names["norm.weight"] = "final_norm.weight"
        return {names.get(name, name): tensor for name, tensor in weights.items()} | {"embed_tokens.weight": table}
    if form == "deepspec":
        return weights | {"embed_tokens.weight": table, "lm_head.weight": table.clone()}
    return weights


def write(folder: Path, tree: Tree, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tree))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

"""Small drafters whose tensors are not exchangeable, a target that they fit, and a run that trained one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftline.config import DataConfig, DFlashConfig, RunConfig, TargetConfig
from draftline.draft.loss import StepMetrics
from draftline.draft.model import DFlashDraftModel
from draftline.targets.model import Target, build_target
from draftline.train.checkpoint import Checkpoint, TrainState, write_checkpoint

SMALL = DFlashConfig(
    vocab_size=40,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    max_position_embeddings=128,
    layer_types=("full_attention", "full_attention"),
    sliding_window=None,
    block_size=4,
    mask_token_id=39,
    target_layer_ids=(1, 3, 4),
    num_target_layers=7,
    sample_from_anchor=False,
    bos_token_id=None,
    eos_token_id=2,
)
MIX: dict[str, Any] = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
ALL_SLIDING: dict[str, Any] = {"layer_types": ("sliding_attention", "sliding_attention"), "sliding_window": 6}
BIDIRECTIONAL: dict[str, Any] = {**MIX, "sliding_window_causal": False}
YARN: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
}


def make_drafter(**changes: Any) -> DFlashDraftModel:
    """A drafter with random matrices and norms, so that no tensor is exchangeable."""
    model = DFlashDraftModel(DFlashConfig(**{**SMALL.model_dump(), **changes}))
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.ndim == 1)
    return model.eval()


def make_target(**changes: Any) -> Target:
    """A Qwen3 target with random weights that `SMALL` fits."""
    sizes = {
        "vocab_size": 40,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(5)
    model = Qwen3ForCausalLM(Qwen3Config(**{**sizes, **changes}))
    model.config.architectures = ["Qwen3ForCausalLM"]
    return build_target("small-target", model, None)


def make_run(folder: Path, trained_for: TargetConfig | None = None, **changes: Any) -> Path:
    """A run folder with one checkpoint, which is its last and its best."""
    model, trained_for = make_drafter(**changes), trained_for or TargetConfig(name="a/target")
    checkpoint = Checkpoint(
        weights=model.state_dict(),
        moments={},
        random={},
        state=TrainState(StepMetrics.zero(4), step=12, tokens=3456),
        run_config=RunConfig(target=trained_for, data=DataConfig(path=Path("somewhere/talks"))),
        drafter_config=model.config,
        data_fingerprint="f1n9er",
    )
    write_checkpoint(folder / "best", checkpoint)
    (folder / "run.json").write_text(json.dumps({"sessions": [{"allowed": ["LOS030"]}, {"allowed": []}]}))
    return folder


def same_weights(model: DFlashDraftModel, tensors: dict[str, Tensor]) -> bool:
    """Whether a drafter has exactly these weights, in whatever dtype they are stored."""
    weights = model.state_dict()
    return weights.keys() == tensors.keys() and all(
        torch.equal(weights[name].to(tensor.dtype), tensor) for name, tensor in tensors.items()
    )

"""Write and read drafters in z-lab's format: `config.json` and `model.safetensors`, which most serving engines read.

Every key is written, because readers differ in what they assume about a missing one: SGLang takes `num_target_layers`
from the drafter's own depth, some read `block_size` only at the top level and some only inside `dflash_config`.
`is_causal` overrides all layers of a reader, so it is left out exactly where layers differ (full layers bidirectional,
sliding layers causal), which is what all readers do by default.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from draftline.config import DFlashConfig
from draftline.draft.attention import BlockLayout
from draftline.draft.model import DFlashDraftModel
from draftline.errors import CheckpointError, ExportError
from draftline.storage import new_folder

ExportDtype = Literal["float32", "bfloat16"]

_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_NEUTRAL: dict[str, float | None] = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}
"""What the target does to embeddings and logits, written only where it does something."""


def export_zlab(draft_model: DFlashDraftModel, folder: Path, dtype: ExportDtype = "bfloat16") -> None:
    """Write the drafter, read it back, and compare: the folder appears only if what it holds is the same drafter.

    Raises:
        ExportError: the format cannot express this drafter, a weight is not finite, or what was read back differs.
        StorageError: the folder is not empty or cannot be written.
    """
    if dtype not in _DTYPES:
        raise ExportError(f"dtype {dtype!r} is not written: use float32 or bfloat16")
    tree = zlab_config(draft_model.config, dtype)
    tensors = _stored_tensors(draft_model, _DTYPES[dtype])
    with new_folder(folder) as temporary:
        (temporary / "config.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        _check_written(draft_model, temporary, tensors)


def load_zlab(folder: Path, dtype: torch.dtype = torch.float32) -> DFlashDraftModel:
    """Read a drafter, every tensor and no other, and give its weights in `dtype` on the CPU.

    Raises:
        CheckpointError: no drafter is there, or it is not one that this model class computes.
    """
    config = config_from_zlab(_read_config(folder / "config.json"), folder)
    path = folder / "model.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no model.safetensors: give a folder written by `draftline export`")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} cannot be read ({reason}): export the drafter again") from error
    model = DFlashDraftModel(config)
    _check_tensors(tensors, model, path)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, strict=True, assign=True)
    return model.to(dtype).eval()


def zlab_config(config: DFlashConfig, dtype: ExportDtype) -> dict[str, Any]:
    """The complete `config.json`.

    Raises:
        ExportError: the format has no words for this drafter.
    """
    if config.sample_from_anchor:
        raise ExportError(
            "sample_from_anchor = true: z-lab's decoder would read every slot one place too early, without an error; "
            "train with drafter.sample_from_anchor=false for this format"
        )
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
        "sliding_window": config.sliding_window if sliding else None,
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


def config_from_zlab(tree: dict[str, Any], folder: Path) -> DFlashConfig:
    """The shape of the drafter that a z-lab `config.json` describes; `dflash_config` goes before the top level.

    Raises:
        CheckpointError: a key is missing, or says something that `DFlashDraftModel` does not compute.
    """
    values = {**tree, **tree.get("dflash_config", {})}
    try:
        _refuse_other_models(values, folder)
        layer_types = tuple(values.get("layer_types") or ["full_attention"] * values["num_hidden_layers"])
        sliding = "sliding_attention" in layer_types
        names = set(DFlashConfig.model_fields) - {"rope_parameters", "layer_types", "sliding_window_causal"}
        given = {name: values[name] for name in names if name in values}
        config = DFlashConfig(
            **{
                "sample_from_anchor": False,
                "bos_token_id": None,
                "eos_token_id": None,
                **given,
                "rope_parameters": _rope_parameters(tree),
                "layer_types": layer_types,
                "sliding_window": values["sliding_window"] if sliding else None,
                "sliding_window_causal": values.get("is_causal") is not False if sliding else True,
            }
        )
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"])) or "config"
        raise CheckpointError(f"{folder}/config.json: {where}: {fault['msg']}: mend or export again") from error
    except KeyError as error:
        raise CheckpointError(f"{folder}/config.json has no {error.args[0]}: add it, or export again") from error
    return config


def _is_causal(config: DFlashConfig) -> bool | None:
    """One answer for all layers, or None where readers are to decide by layer type."""
    kinds = set(config.layer_types)
    if kinds == {"full_attention"}:
        return False
    if config.sliding_window_causal:
        return True if kinds == {"sliding_attention"} else None
    assert config.sliding_window is not None
    if config.sliding_window < config.block_size:
        raise ExportError(
            f"sliding_window {config.sliding_window} is shorter than block_size {config.block_size} in bidirectional "
            "layers: readers would also hide later slots from earlier ones; set drafter.sliding_window to at least "
            f"{config.block_size}"
        )
    return False


def _target_scales(config: DFlashConfig) -> dict[str, float | None]:
    values = {
        "input_embedding_scale": config.input_embedding_scale,
        "output_multiplier": config.output_multiplier,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    return {name: value for name, value in values.items() if value != _NEUTRAL[name]}


def _stored_tensors(draft_model: DFlashDraftModel, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in draft_model.state_dict().items()}
    broken = next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), None)
    if broken is not None:
        raise ExportError(f"{broken} has values that are not finite in {dtype}: the training run is broken")
    return tensors


@torch.no_grad()
def _check_written(draft_model: DFlashDraftModel, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Shape, weights, rotary table and one forward, all from the files."""
    loaded = load_zlab(folder)
    expected = _canonical(draft_model.config)
    different = [name for name in DFlashConfig.model_fields if getattr(loaded.config, name) != getattr(expected, name)]
    if different:
        name = different[0]
        raise ExportError(
            f"{name} was {getattr(expected, name)!r} and reads back as {getattr(loaded.config, name)!r}: not exported"
        )
    stored = load_file(folder / "model.safetensors")
    if any(not torch.equal(stored[name], tensor) for name, tensor in tensors.items()):
        raise ExportError("the weights read back differ from those written: check the disk")
    reference = DFlashDraftModel(draft_model.config)
    reference.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    table = Qwen3RotaryEmbedding(Qwen3Config.from_pretrained(folder)).inv_freq
    if not torch.equal(table, draft_model.rotary_emb.inv_freq.cpu()):
        raise ExportError(f"rope_parameters {draft_model.config.rope_parameters} read back as another rotary table")
    if not torch.equal(_probe(loaded), _probe(reference)):
        raise ExportError("the drafter read back computes something else than the one exported: not exported")


def _probe(model: DFlashDraftModel) -> Tensor:
    """Output of two blocks over a few random states."""
    config = model.config
    generator = torch.Generator().manual_seed(0)
    length = config.block_size + 4
    states = torch.randn(1, length, len(config.target_layer_ids) * config.hidden_size, generator=generator)
    blocks = torch.randn(1, 2 * config.block_size, config.hidden_size, generator=generator)
    layout = BlockLayout.of_row(torch.tensor([1, length - 1]), torch.arange(length), config.block_size)
    output: Tensor = model(states, blocks, layout)
    return output


def _canonical(config: DFlashConfig) -> DFlashConfig:
    """The same drafter with settings of sliding layers at rest where there are none."""
    if "sliding_attention" in config.layer_types:
        return config
    return config.model_copy(update={"sliding_window": None, "sliding_window_causal": True})


def _read_config(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): give a folder written by `draftline export`"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): export the drafter again") from error
    if not isinstance(tree, dict) or not isinstance(tree.get("dflash_config", {}), dict):
        raise CheckpointError(f"{path} does not describe a drafter: give a folder written by `draftline export`")
    return tree


def _refuse_other_models(values: dict[str, Any], folder: Path) -> None:
    """Refuse what would load and then compute something else."""
    for name, wanted in (("model_type", "qwen3"), ("hidden_act", "silu"), ("attention_bias", False)):
        found = values.get(name, wanted)
        if found != wanted:
            raise CheckpointError(
                f"{folder}/config.json: {name} = {found!r} is not a DFlash drafter of {wanted!r} kind"
            )
    architectures = values.get("architectures", ["DFlashDraftModel"])
    if architectures != ["DFlashDraftModel"]:
        raise CheckpointError(f"{folder}/config.json: architectures {architectures}: only DFlashDraftModel is read")
    if values.get("is_causal") and set(values.get("layer_types") or ()) != {"sliding_attention"}:
        raise CheckpointError(f"{folder}/config.json: is_causal = true in full_attention layers is not supported")
    rope = _rope_parameters(values)
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or "mrope_section" in rope:
        raise CheckpointError(f"{folder}/config.json: partial or multimodal rotary positions are not supported")


def _rope_parameters(values: dict[str, Any]) -> dict[str, Any]:
    """One dictionary, from the form of transformers 5 or from the older pair `rope_theta`, `rope_scaling`."""
    if values.get("rope_parameters"):
        return dict(values["rope_parameters"])
    scaling = dict(values.get("rope_scaling") or {"rope_type": "default"})
    scaling.setdefault("rope_type", scaling.pop("type", "default"))
    return {**scaling, "rope_theta": values["rope_theta"]}


def _check_tensors(tensors: dict[str, Tensor], model: DFlashDraftModel, path: Path) -> None:
    wanted = model.state_dict()
    missing, unexpected = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    for names, word in ((missing, "misses"), (unexpected, "has unknown")):
        if names:
            raise CheckpointError(
                f"{path} {word} {len(names)} tensors, first {names[0]}: it is no drafter of this shape"
            )
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{path}: {name} is {list(tensor.shape)}, config.json asks for {list(wanted[name].shape)}: "
                "they do not belong together"
            )

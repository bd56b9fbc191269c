"""The formats that drafters come in, how each is recognised, and which of its tensors are the drafter's.

    format       written by                     recognised by                                  slot layout
    zlab         z-lab, Draftline               DFlashDraftModel and a `dflash_config`         DFlash
    specforge    SpecForge                      the same and an `auto_map`                     DFlash
    modelopt     NVIDIA ModelOpt                the same, `dflash_config.{causal, use_swa}`    DFlash
    nemo         NVIDIA NeMo AutoModel          Qwen3DFlashDraftModel                          DFlash
    torchspec    TorchSpec                      tensors `context_proj`, `final_norm`           DFlash
    deepspec     DeepSpec                       Qwen3DSparkModel                               every slot predicts
    speculators  speculators, Draftline         `speculators_model_type`                       says so

A field that states the layout (`sample_from_anchor`, `shift_label`) goes before this table. The class name
DFlashDraftModel with neither such a field nor a `dflash_config` tells nothing: DeepSpec's and z-lab's "DFlash" differ
in what each slot predicts, so that is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from draftline.errors import CheckpointError
from draftline.formats.folder import DrafterFiles

Format = Literal["zlab", "specforge", "modelopt", "nemo", "torchspec", "deepspec", "speculators"]

_BY_ARCHITECTURE: dict[str, Format] = {
    "DFlashDraftModel": "zlab",
    "Qwen3DFlashDraftModel": "nemo",
    "Qwen3DSparkModel": "deepspec",
}

_OTHER_ARCHITECTURES = {
    "DFlash2DraftModel": "DFlash 2 adds convolutions and a candidate selector",
    "Qwen3DFlash2DraftModel": "DFlash 2 adds convolutions and a candidate selector",
    "DSparkSpeculator": "DSpark adds a Markov head and a confidence head",
    "DSparkDraftModel": "DSpark adds a Markov head and a confidence head",
    "Gemma4DSparkModel": "its layers are Gemma's",
    "LiLiCorrDraftModel": "LiLiCorr adds a reranker",
}

_OTHER_TENSORS = {
    "attention_conv": "the convolutions of DFlash 2",
    "mlp_conv": "the convolutions of DFlash 2",
    "candidate_selector": "the candidate selector of DFlash 2",
    "markov_head": "the Markov head of DSpark",
    "markov_w1": "the Markov head of DSpark",
    "confidence_head": "the confidence head of DSpark",
    "confidence_proj": "the confidence head of DSpark",
    "prefix_gru": "the correction head of Domino",
    "embed_proj": "the correction head of Domino",
    "attention_sink": "learned attention sinks",
}

_TARGETS_OWN: dict[Format, tuple[str, ...]] = {
    "torchspec": ("embed_tokens.weight",),
    "deepspec": ("embed_tokens.weight", "lm_head.weight"),
    "speculators": ("embed_tokens.weight", "lm_head.weight", "verifier_norm.weight", "verifier_lm_head.weight", "t2d"),
}
"""Frozen copies of the target's tensors that a format stores and its readers rebuild from the target; and `t2d`, which
says what `d2t` says."""

_TORCHSPEC_NAMES = {"context_proj.": "fc.", "context_norm.": "hidden_norm.", "final_norm.": "norm."}


def detect(tree: Mapping[str, Any], names: set[str], where: str) -> Format:
    """Which format a configuration and its tensors' names are in.

    Raises:
        CheckpointError: another kind of drafter, or none that is known.
    """
    kind = tree.get("speculators_model_type")
    if kind == "dflash":
        return "speculators"
    if kind is not None:
        raise CheckpointError(f"{where}: a speculators model of type {kind!r}: only 'dflash' is a DFlash drafter")
    architectures = tree.get("architectures") or []
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if "context_proj.weight" in names or tree.get("model_type") == "dflash":
        return "torchspec"
    if name in _OTHER_ARCHITECTURES:
        raise CheckpointError(f"{where}: {name} is not computed here: {_OTHER_ARCHITECTURES[name]}")
    if name not in _BY_ARCHITECTURE:
        known = ", ".join([*_BY_ARCHITECTURE, "DFlashSpeculator"])
        raise CheckpointError(f"{where}: architectures {architectures} is not a known drafter: known are {known}")
    if name != "DFlashDraftModel":
        return _BY_ARCHITECTURE[name]
    if "auto_map" in tree:
        return "specforge"
    nested = tree.get("dflash_config", {})
    return "modelopt" if {"causal", "use_swa"} & nested.keys() else "zlab"


def our_tensors(files: DrafterFiles, form: Format) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The drafter's own tensors under our names, and what lies beside them and is not needed.

    Raises:
        CheckpointError: the tensors belong to another kind of drafter.
    """
    for name in files.tensors:
        part = next((part for part in _OTHER_TENSORS if part in name), None)
        if part is not None:
            raise CheckpointError(f"{files.folder} has {name}, {_OTHER_TENSORS[part]}: not computed here")
    mapping = sorted({"t2d", "d2t"} & files.tensors.keys())
    layers = files.tree.get("transformer_layer_config", {})
    if mapping and (form != "speculators" or files.tree.get("draft_vocab_size") == layers.get("vocab_size")):
        raise CheckpointError(
            f"{files.folder} has {mapping[0]}, of a reduced vocabulary, and its config.json knows of none: "
            "export the drafter again"
        )
    targets = {name: files.tensors[name] for name in _TARGETS_OWN.get(form, ()) if name in files.tensors}
    own = {name: tensor for name, tensor in files.tensors.items() if name not in targets}
    if form != "torchspec":
        return own, targets
    twice = sorted(name for name in own if _torchspec_name(name) != name and _torchspec_name(name) in own)
    if twice:
        raise CheckpointError(
            f"{files.folder} has {twice[0]} and {_torchspec_name(twice[0])}, two names of the same tensor: "
            "remove what does not belong"
        )
    return {_torchspec_name(name): tensor for name, tensor in own.items()}, targets


def _torchspec_name(name: str) -> str:
    prefix = next((old for old in _TORCHSPEC_NAMES if name.startswith(old)), None)
    return name if prefix is None else _TORCHSPEC_NAMES[prefix] + name.removeprefix(prefix)

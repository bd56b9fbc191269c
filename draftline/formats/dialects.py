"""The formats that drafters come in: how each is recognised, which tensors are the drafter's, what its keys mean.

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

The tree of z-lab's keys serves four trainers, which differ in what they leave out and in what sliding layers do by
default; TorchSpec and DeepSpec keep flat keys, speculators keeps the layers apart and numbers captured layers from one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from torch import Tensor

from draftline.config import DFlashConfig, LayerType
from draftline.errors import CheckpointError, ConfigError
from draftline.formats.files import DrafterFiles
from draftline.formats.programs import (
    PROGRAMS,
    format_of,
    in_words,
    layer_kinds,
    layers_as_read,
    proposed_tokens,
    readers_of,
)
from draftline.targets.layers import default_target_layer_ids, from_aux_hidden_state_layer_ids
from draftline.targets.rope import rope_of_folder

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

_COPIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)

_OTHER_MODELS = {
    "attention_bias": (False, "biases in its attention"),
    "mlp_bias": (False, "biases in its MLP"),
    "hidden_act": ("silu", "another activation"),
    "quantization_config": (None, "quantised weights"),
    "projector_type": (None, "a correction head"),
    "markov_rank": (0, "the Markov head of DSpark"),
    "enable_confidence_head": (False, "the confidence head of DSpark"),
    "use_confidence_head": (False, "the confidence head of DSpark"),
    "attention_sink_bias": (False, "learned attention sinks"),
    "attention_value_scale": (1.0, "scaled attention values"),
    "conv_kernel_size": (0, "the convolutions of DFlash 2"),
    "selector_rank": (0, "the candidate selector of DFlash 2"),
    "enable_d2_feature": (False, "features of real prefix tokens"),
    "num_experts": (0, "a mixture of experts"),
}
"""Keys whose presence, with another value than this, means a model that `DFlashDraftModel` does not compute."""

_NESTED_KEYS = {
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "sample_from_anchor",
    "shift_label",
    "causal",
    "use_swa",
    "swa_window_size",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
}
_NOT_IN_SPECULATORS = ("num_target_layers", "bos_token_id", "eos_token_id", "initializer_range")
"""Taken from the weights' header, if Draftline wrote it."""

_SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")

_TRAINERS: dict[Format, str] = {
    "zlab": "a trainer that writes z-lab's format",
    "specforge": "SpecForge: z-lab's names; auto_map points at a file that is not shipped",
    "modelopt": "NVIDIA ModelOpt: z-lab's names, block_size at top level only, windows bidirectional inside a block",
    "nemo": "NVIDIA NeMo AutoModel: z-lab's names, sliding layers bidirectional inside a block",
    "torchspec": "TorchSpec: tensors context_proj, context_norm, final_norm; num_target_layers counts captured layers",
    "deepspec": "DeepSpec: every slot predicts, a block of P drafts P tokens; stores embedding and head",
    "speculators": "speculators: layer ids count from the embedding (plus one)",
}

_OURS = "the target's own next tokens, divided by the count of supervised slots"

_SIGNALS: dict[Format, str] = {
    "zlab": "what the files do not say",
    "specforge": "the tokens of the data, divided by the local sum of weights",
    "modelopt": "the target's whole distribution, divided by the local sum of weights",
    "nemo": "the tokens of the data, divided by the local sum of weights",
    "torchspec": "the tokens of the data, divided by the local sum of weights",
    "deepspec": "the tokens of the data, divided by the global sum of weights",
    "speculators": "the target's own next tokens, divided by the count of supervised slots",
}


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


def describe(files: DrafterFiles) -> list[str]:
    """Sentences for a report: format, conventions, and one for each program that might read the folder."""
    try:
        form = detect(files.tree, set(files.tensors), files.where)
    except CheckpointError as error:
        return [f"conventions: {error}"]
    ours = files.shape is not None
    return [
        f"written by {'Draftline' if ours else _TRAINERS[form]}",
        f"trained on {_OURS if ours else _SIGNALS[form]}",
        *_ids_in_words(files.tree, form),
        *_programs_in_words(files, form),
    ]


def _ids_in_words(tree: Mapping[str, Any], form: Format) -> list[str]:
    if form == "speculators":
        ids = tree.get("aux_hidden_state_layer_ids") or []
        return [f"captured layers {ids} count from the embedding: outputs of layers {[i - 1 for i in ids]}"]
    inner = tree.get("dflash_config") or {}
    ids = inner.get("target_layer_ids", tree.get("target_layer_ids"))
    if ids is None:
        return ["captured layers are not written: each reader computes its own"]
    embedding = " (-1 is the embedding's output)" if -1 in ids else ""
    return [f"captured layers {ids} are 0-based layer outputs{embedding}"]


def _programs_in_words(files: DrafterFiles, form: Format) -> list[str]:
    words, readers = None, readers_of(format_of(files.tree))
    if form == "torchspec" and "context_proj.weight" in files.tensors:
        words = "finds none of fc, hidden_norm, norm under these names; convert with `draftline import`"
    if form == "deepspec":
        words = "would read every slot one place off; import with --sample-from-anchor"
    if words is not None:
        return [f"{PROGRAMS[reader].name}: {words}" for reader in readers]
    return [in_words(reader, files.tree) for reader in readers]


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


def said_by(files: DrafterFiles, form: Format) -> DFlashConfig:
    """What the configuration says in the meaning of its format, in our words and without checks of the whole.

    What it leaves open is None: `sample_from_anchor`, `block_size`, `mask_token_id`, `num_target_layers`.

    Raises:
        CheckpointError: it describes something that `DFlashDraftModel` does not compute, or contradicts itself.
    """
    readers: dict[Format, Callable[[DrafterFiles], DFlashConfig]] = {
        "torchspec": _torchspec_shape,
        "deepspec": _deepspec_shape,
        "speculators": _speculators_shape,
    }
    size, rows = files.tree.get("draft_vocab_size"), files.tree.get("vocab_size")
    if form != "speculators" and size not in (None, rows):
        raise CheckpointError(
            f"{files.where}: draft_vocab_size is {size} of {rows}, and this format has no place for a reduced "
            "vocabulary: remove the key if the drafter has none"
        )
    try:
        return readers[form](files) if form in readers else _nested_shape(files, form)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{files.where}: a value is of the wrong kind ({error}): fix the file") from error


def _nested_shape(files: DrafterFiles, form: Format) -> DFlashConfig:
    """z-lab's keys: looked up in `dflash_config` first, then at the top level."""
    tree, where = files.tree, files.where
    nested: dict[str, Any] = tree.get("dflash_config", {})
    refuse_other_models(nested, where)
    unknown = sorted(nested.keys() - _NESTED_KEYS)
    if unknown:
        raise CheckpointError(
            f"{where}: dflash_config.{unknown[0]} is unknown and may change what is computed: remove it"
        )
    values = {
        name: agreed(name, {"dflash_config": nested.get(name), "the top level": tree.get(name)}, where)
        for name in ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "sample_from_anchor")
    }
    ids = values["target_layer_ids"]
    if ids is None:
        ids = _default_ids(values["num_target_layers"], tree.get("num_hidden_layers"), where)
    types, window = _nested_layers(tree, nested, where)
    states = form in ("nemo", "specforge") or bool({"mask_token_id", "target_layer_ids"} & nested.keys())
    layout = agreed(
        "the layout",
        {"sample_from_anchor": values["sample_from_anchor"], "dflash_config.shift_label": nested.get("shift_label")},
        where,
    )
    return _in_our_words(
        tree,
        where,
        {
            "target_layer_ids": tuple(ids),
            "block_size": values["block_size"],
            "mask_token_id": values["mask_token_id"],
            "num_target_layers": values["num_target_layers"],
            "sample_from_anchor": False if layout is None and states else layout,
            "layer_types": types,
            "sliding_window": window,
            "sliding_window_causal": _sliding_causal(tree, nested, types, form, where),
            **_scales(tree, nested, where),
        },
    )


def _nested_layers(
    tree: Mapping[str, Any], nested: Mapping[str, Any], where: str
) -> tuple[tuple[str, ...], int | None]:
    types = _layer_types(tree, where)
    if nested.get("use_swa"):  # ModelOpt: every layer slides, whatever `layer_types` says
        window = agreed(
            "the window",
            {"swa_window_size": nested.get("swa_window_size"), "sliding_window": tree.get("sliding_window")},
            where,
        )
        types = tuple("sliding_attention" for _ in types)
    else:
        window = tree.get("sliding_window")
    if "sliding_attention" not in types:
        return types, None
    if window is None:
        raise CheckpointError(f"{where}: sliding layers have no sliding_window and would run as full: add it")
    if not nested.get("use_swa") and tree.get("use_sliding_window") is False:
        raise CheckpointError(f"{where}: use_sliding_window is false beside sliding layers: set it to true")
    return types, window


def _scales(tree: Mapping[str, Any], nested: Mapping[str, Any], where: str) -> dict[str, Any]:
    """z-lab's reader looks for them in both places."""
    places = {name: {"dflash_config": nested.get(name), "the top level": tree.get(name)} for name in _SCALES}
    said = {name: agreed(name, values, where) for name, values in places.items()}
    return {name: value for name, value in said.items() if value is not None}


def _sliding_causal(
    tree: Mapping[str, Any], nested: Mapping[str, Any], types: tuple[str, ...], form: Format, where: str
) -> bool:
    """Whether sliding layers are causal inside the block. Full layers must not be: no such drafter is computed here."""
    statements = {"is_causal": tree.get("is_causal"), "dflash_config.causal": nested.get("causal")}
    if nested.get("causal") and tree.get("is_causal") is False:
        raise CheckpointError(f"{where}: dflash_config.causal is true (JetSpec): causal blocks are not computed here")
    said = agreed("causality", statements, where)
    if said and "full_attention" in types:
        raise CheckpointError(f"{where}: is_causal = true with full_attention layers is not computed here")
    if "sliding_attention" not in types:
        return True  # at rest: there is no layer that it could concern
    return bool(said) if said is not None else form not in ("modelopt", "nemo")


def _torchspec_shape(files: DrafterFiles) -> DFlashConfig:
    """Flat keys; `num_target_layers` counts captured layers, the depth is `target_num_hidden_layers`."""
    tree, where = files.tree, files.where
    count, depth = tree.get("num_target_layers"), tree.get("target_num_hidden_layers")
    ids = tree.get("target_layer_ids")
    if ids is None:
        ids = _default_ids(depth, count, where)
    if count is not None and count != len(ids):
        raise CheckpointError(
            f"{where}: num_target_layers is {count} for {len(ids)} target_layer_ids: they must be as many"
        )
    if tree.get("target_hidden_size", tree.get("hidden_size")) != tree.get("hidden_size"):
        raise CheckpointError(f"{where}: target_hidden_size differs from hidden_size: not computed here")
    if tree.get("rope_scaling"):
        raise CheckpointError(
            f"{where}: versions of TorchSpec differ in whether rope_scaling acts: remove it if it did not"
        )
    return _in_our_words(
        tree,
        where,
        {
            "target_layer_ids": tuple(ids),
            "block_size": tree.get("block_size"),
            "mask_token_id": tree.get("mask_token_id"),
            "num_target_layers": depth,
            "sample_from_anchor": tree.get("sample_from_anchor", False),
            "layer_types": ("full_attention",) * int(tree.get("num_hidden_layers") or 0),
            "sliding_window": None,
        },
    )


def _deepspec_shape(files: DrafterFiles) -> DFlashConfig:
    """Flat keys; every slot predicts; id -1 is the embedding's output."""
    tree, where = files.tree, files.where
    ids = tuple(tree.get("target_layer_ids") or ())
    if -1 in ids:
        raise CheckpointError(f"{where}: target_layer_ids {list(ids)} reads the embedding (-1): not captured here")
    types = _layer_types(tree, where)
    if "sliding_attention" in types:
        raise CheckpointError(f"{where}: DeepSpec writes full layers only, layer_types has sliding ones: fix the file")
    return _in_our_words(
        tree,
        where,
        {
            "target_layer_ids": ids,
            "block_size": tree.get("block_size"),
            "mask_token_id": tree.get("mask_token_id"),
            "num_target_layers": tree.get("num_target_layers"),
            "sample_from_anchor": tree.get("sample_from_anchor", True),
            "layer_types": types,
            "sliding_window": None,
        },
    )


def _speculators_shape(files: DrafterFiles) -> DFlashConfig:
    """speculators 0.9: ids in convention B, layers in `transformer_layer_config`, full layers always bidirectional."""
    tree, where = files.tree, files.where
    stack = tree.get("transformer_layer_config")
    if not isinstance(stack, dict):
        raise CheckpointError(f"{where} has no transformer_layer_config: copy or export the drafter again")
    rows = tree.get("draft_vocab_size")
    if rows is None:
        raise CheckpointError(f"{where} has no draft_vocab_size, for which speculators assumes 32000: add it")
    if tree.get("target_hidden_size") not in (None, stack.get("hidden_size")):
        raise CheckpointError(f"{where}: target_hidden_size differs from hidden_size: not computed here")
    try:
        ids = from_aux_hidden_state_layer_ids(tree.get("aux_hidden_state_layer_ids") or ())
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from error
    _check_proposal(tree, where)
    types = _layer_types(stack, where)
    sliding = "sliding_attention" in types
    if sliding and stack.get("sliding_window") is None:
        raise CheckpointError(f"{where}: sliding layers have no sliding_window and would run as full: add it")
    if sliding and tree.get("sliding_window_non_causal") is None:
        raise CheckpointError(f"{where} has no sliding_window_non_causal beside sliding layers: add it")
    written = {} if files.shape is None else {name: getattr(files.shape, name) for name in _NOT_IN_SPECULATORS}
    return _in_our_words(
        {**written, **stack},
        where,
        {
            "target_layer_ids": ids,
            "block_size": tree.get("block_size"),
            "mask_token_id": tree.get("mask_token_id"),
            "num_target_layers": written.get("num_target_layers"),
            "sample_from_anchor": tree.get("sample_from_anchor"),
            "layer_types": types,
            "sliding_window": stack["sliding_window"] if sliding else None,
            "sliding_window_causal": not tree.get("sliding_window_non_causal") if sliding else True,
            "draft_vocab_size": None if rows == stack.get("vocab_size") else rows,
        },
    )


def _check_proposal(tree: Mapping[str, Any], where: str) -> None:
    """Fewer tokens than the block has may be proposed, more are positions that were never trained."""
    proposed, size = proposed_tokens(tree), tree.get("block_size")
    if proposed is None or size is None:
        return
    drafted = size if tree.get("sample_from_anchor") else size - 1
    if proposed > drafted:
        raise CheckpointError(
            f"{where}: speculative_tokens is {proposed}, and a block_size of {size} drafts {drafted}: "
            "one of the two is wrong; fix it"
        )


def _layer_types(tree: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """As written, else as transformers fills them in, which is what readers do."""
    types = tree.get("layer_types")
    types = layer_kinds(layers_as_read(tree)) if types is None else types
    unknown = next((kind for kind in types if kind not in get_args(LayerType)), None)
    if unknown is not None:
        raise CheckpointError(f"{where}: layer type {unknown!r} is unknown: known are {', '.join(get_args(LayerType))}")
    return tuple(types)


def _default_ids(depth: int | None, count: int | None, where: str) -> tuple[int, ...]:
    """What the reference code captures when a configuration lists no layers."""
    if depth is None or count is None:
        raise CheckpointError(f"{where} has no target_layer_ids: add the layers that it was trained on")
    return default_target_layer_ids(depth, count)


def _in_our_words(stack: Mapping[str, Any], where: str, said: Mapping[str, Any]) -> DFlashConfig:
    """The record without its checks.

    Args:
        stack: the keys that describe the layers, named as in a Qwen3 configuration.
        said: fields that formats keep in places of their own.
    """
    refuse_other_models(stack, where)
    missing = [name for name in _COPIED if stack.get(name) is None]
    if missing:
        raise CheckpointError(f"{where} has no {missing[0]}: add it, or export the drafter again")
    head_dim = stack.get("head_dim") or stack["hidden_size"] // stack["num_attention_heads"]
    if stack.get("v_head_dim") not in (None, head_dim):
        raise CheckpointError(f"{where}: v_head_dim {stack['v_head_dim']} differs from {head_dim}: not computed here")
    optional = {name: stack[name] for name in ("initializer_range",) if name in stack}
    return DFlashConfig.model_construct(
        **{name: stack[name] for name in _COPIED},
        head_dim=head_dim,
        rope_parameters=rope_of_folder(stack, where),
        bos_token_id=_token(stack, "bos_token_id"),
        eos_token_id=_token(stack, "eos_token_id"),
        **optional,
        **said,
    )


def _token(stack: Mapping[str, Any], name: str) -> int | None:
    """Some targets have several ends; which one stands here matters to no reader."""
    found: Any = stack.get(name)
    if isinstance(found, list):
        return int(found[0]) if found else None
    return None if found is None else int(found)


def refuse_other_models(tree: Mapping[str, Any], where: str) -> None:
    """Refuse what would load and then compute something else.

    Raises:
        CheckpointError: a key announces parts that a DFlash drafter does not have.
    """
    for name, (neutral, what) in _OTHER_MODELS.items():
        found = tree.get(name)
        if found is not None and found != neutral:
            raise CheckpointError(f"{where}: {name} = {found!r}: this drafter has {what}, which are not computed here")


def agreed(name: str, places: Mapping[str, Any], where: str) -> Any:
    """The one value that is said in any of several places, or None.

    Raises:
        CheckpointError: two places disagree; readers would differ in which one they believe.
    """
    said = {place: value for place, value in places.items() if value is not None}
    values = list(said.values())
    if any(value != values[0] for value in values):
        listed = ", ".join(f"{value!r} in {place}" for place, value in said.items())
        raise CheckpointError(f"{where}: {name} is {listed}: readers differ in which they use; make them equal")
    return values[0] if values else None

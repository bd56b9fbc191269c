"""Rotary settings in the one form that everything here uses, whoever wrote them: the only place that knows the kinds.

They come in three spellings: `rope_theta` beside `rope_scaling` (transformers 4), `rope_parameters` with the base in it
(transformers 5), and mixtures; they name their type `rope_type`, `type` or not at all, and may differ by layer type. A
base read from the wrong place, or a number left to the reader's default, raises no error anywhere and ruins acceptance
with distance. So what a target has is written out in full, and what a folder leaves unclear is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from draftline.errors import CheckpointError, TargetError

NO_ROPE_THETA = 10000.0
"""Base for the drafter of a target that has no rotary positions at all (GPT-2)."""

KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
}
"""Type of transformers that a drafter can have -> numbers without which a reader would guess, numbers it may have.

`longrope` is not one of them: transformers turns every position by another table as soon as one position of the call
lies beyond the original length, and vLLM by the same one from its start, so that a conversation packed beside a longer
one, the same decoded with a cache, and the same served are three different drafters.
"""

_ORIGINAL = "original_max_position_embeddings"
"""Where a target leaves it out, transformers takes it from beside the settings, or the longest position."""

_SAME_AS_DEFAULT = ("mrope", "proportional")
"""Types of targets that differ from `default` only in the multimodal or partial rotation that is dropped."""

_MULTIMODAL = ("mrope_section", "mrope_interleaved")
"""With one position per token, which is all a drafter sees, these change nothing."""

_OF_TARGETS = (*_MULTIMODAL, "llama_4_scaling_beta", "max_position_embeddings")
"""What targets write among their rotary settings and drafters do not have: Ministral 3 and Mistral 4 scale their
queries with the position, which is no rotation, and repeat the longest position."""


def rope_of_target(config: PretrainedConfig) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and every number of the type, for the drafter of a target.

    The drafter turns whole heads by one-dimensional positions: what makes the target's own rotation partial or
    multimodal is dropped, because a reader that honoured it would rotate otherwise than in training.

    Raises:
        TargetError: the type is unknown or lacks a number, or has one that this file does not know.
    """
    places = ("rope_parameters", "rope_scaling", "rope_theta")
    tree = {name: getattr(config, name) for name in places if hasattr(config, name)}
    found = _spelled(tree)
    by_layer = {name: value for name, value in found.items() if isinstance(value, Mapping)}
    if by_layer:
        if "full_attention" not in by_layer and len(by_layer) > 1:
            raise TargetError(
                f"target of type {config.model_type} has rotary settings for {', '.join(by_layer)} and none for "
                "full_attention: not supported"
            )
        one = by_layer["full_attention"] if "full_attention" in by_layer else next(iter(by_layer.values()))
        found = _spelled({**tree, "rope_parameters": one})
    kind, theta = found.pop("rope_type"), found.pop("rope_theta", None)
    kind = "default" if kind in _SAME_AS_DEFAULT else kind
    if kind not in KINDS:
        raise TargetError(
            f"target of type {config.model_type} scales its rotary positions by {kind!r}: "
            f"drafters can do {', '.join(KINDS)}"
        )
    numbers = {name: value for name, value in found.items() if name not in (*_OF_TARGETS, "partial_rotary_factor")}
    beside = [getattr(config, name) for name in (_ORIGINAL, "max_position_embeddings") if hasattr(config, name)]
    if _ORIGINAL in KINDS[kind][0] and beside:
        numbers.setdefault(_ORIGINAL, beside[0])
    missing, unknown = _faults(kind, numbers)
    if missing:
        raise TargetError(
            f"target of type {config.model_type}: its rotary scaling {kind!r} lacks {missing[0]}: add it to config.json"
        )
    if unknown:
        raise TargetError(
            f"target of type {config.model_type}: its rotary scaling {kind!r} has {unknown[0]}, which no reader of "
            "drafters computes: this target is not supported"
        )
    return {"rope_type": kind, "rope_theta": float(theta if theta is not None else NO_ROPE_THETA), **numbers}


def rope_of_folder(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The same of a drafter's `config.json`, from any spelling.

    Args:
        tree: the configuration that describes the drafter's layers.
        where: names the file in messages.

    Raises:
        CheckpointError: the base is missing or given twice, the type is unknown or not complete, or only a part of the
            head rotates.
    """
    found = _spelled({**tree, "rope_parameters": _merged(tree, where)})
    if any(isinstance(value, Mapping) for value in found.values()):
        raise CheckpointError(f"{where}: rope settings differ between layer types: no reader of drafters supports that")
    share = found.pop("partial_rotary_factor", tree.get("partial_rotary_factor"))
    if share not in (None, 1, 1.0):
        raise CheckpointError(
            f"{where}: partial_rotary_factor {share}: trainers ignore it and servers honour it; "
            "remove the key if the drafter was trained with full rotation"
        )
    kind, theta = found.pop("rope_type"), found.pop("rope_theta", None)
    if theta is None:
        raise CheckpointError(f"{where} has no rope_theta, and readers assume different ones: add it")
    if tree.get("rope_theta") not in (None, theta):
        listed = " and ".join(map(str, sorted((theta, tree["rope_theta"]))))
        raise CheckpointError(f"{where}: rope_theta is given twice, as {listed}: remove one")
    numbers = {name: value for name, value in found.items() if name not in _MULTIMODAL}
    kind = "default" if kind == "mrope" else kind
    if kind not in KINDS:
        raise CheckpointError(f"{where}: rope type {kind!r} is not supported: known are {', '.join(KINDS)}")
    missing, unknown = _faults(kind, numbers)
    if missing:
        raise CheckpointError(f"{where}: rope type {kind!r} needs {missing[0]}: add it")
    if unknown:
        raise CheckpointError(f"{where}: rope type {kind!r} has {unknown[0]}, which it does not use: fix it")
    return {"rope_type": kind, "rope_theta": theta, **numbers}


def _spelled(tree: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_type` and all that else is said, in a dictionary that may be changed; nothing is left out but nulls."""
    written = dict(tree.get("rope_parameters") or tree.get("rope_scaling") or {})
    found = {name: value for name, value in written.items() if value is not None and name not in ("rope_type", "type")}
    if "rope_theta" not in found and tree.get("rope_theta") is not None:
        found["rope_theta"] = tree["rope_theta"]
    return {**found, "rope_type": written.get("rope_type") or written.get("type") or "default"}


def _faults(kind: str, numbers: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Numbers that a type lacks, and numbers that it does not have."""
    needed, possible = KINDS[kind]
    return [name for name in needed if name not in numbers], sorted(numbers.keys() - {*needed, *possible})


def _merged(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Both places that settings may stand in, of which readers believe different ones: they must not disagree."""
    places = {name: tree[name] for name in ("rope_parameters", "rope_scaling") if tree.get(name)}
    if any(not isinstance(settings, Mapping) for settings in places.values()):
        raise CheckpointError(f"{where}: rope settings must be a mapping: fix the file")
    first, second = places.get("rope_parameters", {}), places.get("rope_scaling", {})
    for name in first.keys() & second.keys():
        if first[name] != second[name]:
            raise CheckpointError(
                f"{where}: {name} is {first[name]} in rope_parameters and {second[name]} in rope_scaling: remove one"
            )
    return {**first, **second}

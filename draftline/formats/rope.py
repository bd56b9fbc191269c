"""Rotary settings of a foreign `config.json`, in the one form that everything here uses.

They come in three spellings: `rope_theta` beside `rope_scaling` (transformers 4), `rope_parameters` with the theta
inside (transformers 5), and mixtures. A base read from the wrong place, or a rotation of a part of the head that the
trainer did not make, raises no error anywhere and ruins acceptance with distance, so what is unclear is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftline.errors import CheckpointError

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
"""Rotary types of transformers that a drafter can have, and the numbers without which a reader would guess."""

_MULTIMODAL = ("mrope_section", "mrope_interleaved")
"""With one position per token, which is all a drafter sees, these change nothing."""


def rope_parameters(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and the numbers of the type, from any spelling.

    Args:
        tree: the configuration that describes the drafter's layers.
        where: names the file in messages.

    Raises:
        CheckpointError: the base is missing or given twice, the type is unknown, or only a part of the head rotates.
    """
    spellings = [tree[name] for name in ("rope_parameters", "rope_scaling") if tree.get(name)]
    if any(not isinstance(spelling, dict) for spelling in spellings):
        raise CheckpointError(f"{where}: rope settings must be a mapping: fix the file")
    numbers: dict[str, Any] = {}
    for spelling in spellings:
        numbers = _merged(numbers, spelling, where)
    if any(isinstance(value, dict) for value in numbers.values()):
        raise CheckpointError(f"{where}: rope settings differ between layer types: no reader of drafters supports that")
    share = numbers.pop("partial_rotary_factor", tree.get("partial_rotary_factor"))
    if share not in (None, 1, 1.0):
        raise CheckpointError(
            f"{where}: partial_rotary_factor {share}: trainers ignore it and servers honour it; "
            "remove the key if the drafter was trained with full rotation"
        )
    theta = _theta(tree, numbers, where)
    kind = numbers.pop("rope_type", None) or numbers.pop("type", None) or "default"
    numbers = {name: value for name, value in numbers.items() if name not in ("type", "rope_theta", *_MULTIMODAL)}
    kind = "default" if kind == "mrope" else kind
    if kind not in _NEEDED:
        raise CheckpointError(f"{where}: rope type {kind!r} is not supported: known are {', '.join(_NEEDED)}")
    missing = [name for name in _NEEDED[kind] if name not in numbers]
    if missing:
        raise CheckpointError(f"{where}: rope type {kind!r} needs {missing[0]}: add it")
    if kind == "default" and numbers:
        raise CheckpointError(f"{where}: rope type 'default' has {sorted(numbers)[0]}, which it does not use: fix it")
    return {"rope_type": kind, "rope_theta": theta, **numbers}


def _merged(first: dict[str, Any], second: dict[str, Any], where: str) -> dict[str, Any]:
    for name in first.keys() & second.keys():
        if first[name] != second[name]:
            raise CheckpointError(
                f"{where}: {name} is {first[name]} in rope_parameters and {second[name]} in rope_scaling: remove one"
            )
    return {**first, **second}


def _theta(tree: Mapping[str, Any], numbers: Mapping[str, Any], where: str) -> float:
    found = {value for value in (tree.get("rope_theta"), numbers.get("rope_theta")) if value is not None}
    if len(found) > 1:
        listed = " and ".join(map(str, sorted(found)))
        raise CheckpointError(f"{where}: rope_theta is given twice, as {listed}: remove one")
    if not found:
        raise CheckpointError(f"{where} has no rope_theta, and readers assume different ones: add it")
    theta: float = found.pop()
    return theta

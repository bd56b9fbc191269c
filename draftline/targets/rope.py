"""One form for the rotary settings that configurations write in many.

They may stand at top level or under `rope_parameters` / `rope_scaling`, name their type `rope_type`, `type` or not at
all, and differ by layer type. The drafter turns whole heads by one-dimensional positions: what makes a target's own
rotation partial or multimodal is dropped, because a reader that honoured it would rotate otherwise than in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from draftline.errors import TargetError

NO_ROPE_THETA = 10000.0
"""Base for the drafter of a target that has no rotary positions at all (GPT-2)."""

_SCALINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
}
"""Scaling type -> numbers it needs, numbers it may have."""

_SAME_AS_DEFAULT = ("mrope", "proportional")
"""Types that differ from `default` only in the multimodal or partial rotation that is dropped."""

_DROPPED = frozenset({"partial_rotary_factor", "mrope_section", "mrope_interleaved"})


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and the numbers of a scaling, as transformers 5 reads them.

    Raises:
        TargetError: the scaling is unknown or lacks a number, or has one that this file does not know.
    """
    found = _settings(config)
    kind = found.pop("rope_type", None) or found.pop("type", None) or "default"
    found.pop("type", None)
    kind = "default" if kind in _SAME_AS_DEFAULT else kind
    if kind not in _SCALINGS:
        raise TargetError(
            f"target of type {config.model_type} scales its rotary positions by {kind!r}: "
            f"drafters can do {', '.join(_SCALINGS)}"
        )
    needed, possible = _SCALINGS[kind]
    theta = found.pop("rope_theta", None)
    numbers = {name: value for name, value in found.items() if name not in _DROPPED and value is not None}
    missing = [name for name in needed if name not in numbers]
    unknown = [name for name in numbers if name not in needed + possible]
    if missing or unknown:
        fault = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which Draftline does not know"
        raise TargetError(f"target of type {config.model_type}: its rotary scaling {kind!r} {fault}: fix config.json")
    return {"rope_type": kind, "rope_theta": float(theta if theta is not None else NO_ROPE_THETA), **numbers}


def _settings(config: PretrainedConfig) -> dict[str, Any]:
    """All rotary settings of full-attention layers, in a dictionary that may be changed."""
    found: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        if hasattr(config, name) and getattr(config, name):
            found = dict(getattr(config, name))
    if found and all(isinstance(value, Mapping) for value in found.values()):
        if "full_attention" not in found and len(found) > 1:
            raise TargetError(
                f"target of type {config.model_type} has rotary settings for {', '.join(found)} and none for "
                "full_attention: not supported"
            )
        found = dict(found["full_attention"] if "full_attention" in found else next(iter(found.values())))
    if found.get("rope_theta") is None and hasattr(config, "rope_theta"):
        found["rope_theta"] = config.rope_theta
    return found

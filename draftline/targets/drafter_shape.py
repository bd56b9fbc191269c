"""The complete shape of a drafter, from what the user set and what the target is.

What the user leaves open follows the target, so that the drafter's layers look to a serving engine like those of a
dense Qwen3 of the target's width. Nothing is left to a default of the reader: every number is written out.

A slot that is still to be predicted is a row of the target's embedding table, its mask token. The row is the target's
own and frozen, so it must exist (the table is never resized), must mean nothing else to the drafter (never pad, eos or
bos, never an id of the data), and must not be close to zero.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import PretrainedConfig

from draftline.config import DFlashConfig, DrafterConfig, LayerType
from draftline.errors import ConfigError, TargetError
from draftline.targets.head import setting_of
from draftline.targets.layers import check_target_layer_ids, default_target_layer_ids
from draftline.targets.model import Target
from draftline.targets.rope import rope_of_target

SMALLEST_NORM = 0.01
"""A row below this share of the table's median norm carries no signal: many tables have such rows."""

_RESERVED = re.compile(r"reserved|unused|mask|extra|placeholder|dummy", re.IGNORECASE)

EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names under which configurations say how many experts a layer has."""
_OTHER_EPS = 1e-6
"""Of a Qwen3: the norms are the drafter's own, and only have to be the same wherever it runs."""

_EPS_FIELDS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")


def resolve_drafter_config(
    target: Target, drafter: DrafterConfig, used_token_ids: Collection[int] | Tensor | None
) -> DFlashConfig:
    """Fill in what `drafter` leaves open.

    Args:
        target: the live target.
        drafter: what the user set.
        used_token_ids: ids that occur in the data, or a bool tensor [V]; None if no data is known.

    Raises:
        ConfigError: a setting contradicts the target or another setting, or no row is free for the mask token.
        TargetError: the target is too shallow, or its configuration cannot be followed.
    """
    config = target.config
    layer_types = _layer_types(drafter)
    ids = drafter.target_layer_ids
    if ids is None:
        ids = default_target_layer_ids(target.num_layers, drafter.num_captured_layers)
    heads = drafter.num_attention_heads or _number(config, "num_attention_heads")
    try:
        return DFlashConfig(
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            intermediate_size=drafter.intermediate_size or _mlp_width(config),
            num_hidden_layers=drafter.num_layers,
            num_attention_heads=heads,
            num_key_value_heads=drafter.num_key_value_heads or _key_value_heads(config, heads),
            head_dim=drafter.head_dim or _head_dim(config),
            rms_norm_eps=_eps(target),
            rope_parameters=rope_of_target(config),
            max_position_embeddings=config.max_position_embeddings,
            layer_types=layer_types,
            sliding_window=drafter.sliding_window,
            block_size=drafter.block_size,
            mask_token_id=resolve_mask_token(target, drafter.mask_token_id, _used_ids(used_token_ids)),
            target_layer_ids=check_target_layer_ids(ids, target.num_layers),
            num_target_layers=target.num_layers,
            draft_vocab_size=_draft_vocab_size(target, drafter),
            sample_from_anchor=drafter.sample_from_anchor,
            input_embedding_scale=target.input_embedding_scale,
            output_multiplier=target.head.output_multiplier,
            final_logit_softcapping=target.head.final_logit_softcapping,
            bos_token_id=_first_id(config, "bos_token_id"),
            eos_token_id=_first_id(config, "eos_token_id"),
        )
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"the drafter for {target.name} cannot be built: {message}") from error


def _draft_vocab_size(target: Target, drafter: DrafterConfig) -> int | None:
    """None also where the number asked for is the whole table: no mapping is kept or written for that."""
    wanted = drafter.draft_vocab_size
    if wanted is not None and wanted > target.vocab_size:
        raise ConfigError(
            f"drafter.draft_vocab_size {wanted} is more than the {target.vocab_size} rows of {target.name}: lower it"
        )
    return None if wanted == target.vocab_size else wanted


def _layer_types(drafter: DrafterConfig) -> tuple[LayerType, ...]:
    """Sliding layers first, as set; both halves of the setting must be there or neither."""
    sliding = drafter.num_sliding_layers
    if not 0 <= sliding <= drafter.num_layers:
        raise ConfigError(f"drafter.num_sliding_layers {sliding} does not fit a drafter of {drafter.num_layers} layers")
    if sliding and drafter.sliding_window is None:
        raise ConfigError(f"drafter.num_sliding_layers is {sliding} without a window: set drafter.sliding_window")
    if drafter.sliding_window is not None and not sliding:
        raise ConfigError(
            f"drafter.sliding_window {drafter.sliding_window} is used by no layer: set drafter.num_sliding_layers"
        )
    if drafter.sliding_window == 2 and drafter.num_layers == 1 and not drafter.sample_from_anchor:
        raise ConfigError(
            "drafter.sliding_window 2 in the only layer shows no captured state to the slots that predict: "
            "give a longer window, or another layer"
        )
    kinds: tuple[LayerType, LayerType] = ("sliding_attention", "full_attention")
    return tuple(kinds[layer >= sliding] for layer in range(drafter.num_layers))


def _number(config: PretrainedConfig, name: str) -> int:
    """A whole number of the target's configuration that the drafter cannot do without."""
    value = setting_of(config, name)
    if not isinstance(value, int):
        raise TargetError(f"target of type {config.model_type} does not say its {name}: set drafter.{name}")
    return value


def _key_value_heads(config: PretrainedConfig, heads: int) -> int:
    return heads if setting_of(config, "num_key_value_heads") is None else _number(config, "num_key_value_heads")


def _head_dim(config: PretrainedConfig) -> int:
    if setting_of(config, "head_dim") is None:
        return int(config.hidden_size) // _number(config, "num_attention_heads")
    return _number(config, "head_dim")


def _mlp_width(config: PretrainedConfig) -> int:
    """The target's width; 3 * D where there is none to follow: experts, or widths that differ by layer."""
    experts = any((setting_of(config, name) or 0) > 1 for name in EXPERT_FIELDS)
    width = setting_of(config, "intermediate_size")
    return 3 * int(config.hidden_size) if experts or not isinstance(width, int) else width


def _eps(target: Target) -> float:
    """From the configuration, which names it in several ways, else from the final norm itself, if it says it (OLMo)."""
    norm = target.final_norm
    said = [setting_of(target.config, name) for name in _EPS_FIELDS]
    for value in (*said, *(getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name))):
        if value is not None:
            return float(value)
    return _OTHER_EPS


def _first_id(config: PretrainedConfig, name: str) -> int | None:
    """Configurations may list several end tokens, the first being the usual one."""
    value = getattr(config, name) if hasattr(config, name) else None
    return (value[0] if value else None) if isinstance(value, list) else value


def resolve_mask_token(target: Target, wanted: int | None, used_token_ids: Collection[int]) -> int:
    """The row asked for, if it can serve; else a padding row of the table, else an unused special token.

    Args:
        wanted: what the user set, or None.
        used_token_ids: ids that occur in the data.

    Raises:
        ConfigError: the row asked for cannot serve, or none is free.
    """
    table = target.embedding.get_parameter("weight").detach()
    if table.is_meta:  # a target that is only described: which row it is changes no size
        return target.vocab_size - 1 if wanted is None else wanted
    norms = table.float().norm(dim=1)
    if wanted is None:
        for candidate in _free_rows(target):
            if _mask_fault(target, candidate, used_token_ids, norms) is None:
                return candidate
        raise ConfigError(
            f"target {target.name} has no free embedding row for the mask token: "
            "set drafter.mask_token_id to an id that the data does not use"
        )
    fault = _mask_fault(target, wanted, used_token_ids, norms)
    if fault is None:
        return wanted
    free = (c for c in _free_rows(target) if _mask_fault(target, c, used_token_ids, norms) is None)
    proposal = next(free, None)
    fix = "choose another" if proposal is None else f"{proposal} would do"
    raise ConfigError(f"drafter.mask_token_id {wanted} {fault}: {fix}")


def _free_rows(target: Target) -> Iterator[int]:
    """Padding rows first, then special tokens: the tokenizer's mask token, reserved ones, others from the last."""
    if target.tokenizer is None:
        return
    yield from range(max(target.tokenizer.get_vocab().values()) + 1, target.vocab_size)
    if target.tokenizer.mask_token_id is not None:
        yield target.tokenizer.mask_token_id
    written = target.tokenizer.chat_template or ""
    added = [(i, t) for i, t in target.tokenizer.added_tokens_decoder.items() if t.content not in written]
    yield from (i for i, token in sorted(added) if _RESERVED.search(token.content))
    named = set(target.tokenizer.all_special_ids)
    yield from (i for i, token in sorted(added, reverse=True) if token.special and i not in named)


def _mask_fault(target: Target, token: int, used_token_ids: Collection[int], norms: Tensor) -> str | None:
    """Why a row cannot be the mask, or None."""
    if not 0 <= token < target.vocab_size:
        return (
            f"is not a row of the embedding table of {target.name}, which has {target.vocab_size} and is never resized"
        )
    for role, ids in _role_ids(target).items():
        if token in ids:
            return f"is the {role} token of {target.name}, which also occurs as a real token"
    if token in used_token_ids:
        return "occurs in the data"
    if bool(norms[token] < SMALLEST_NORM * norms.median()):
        return (
            f"has an embedding row of nearly zero (norm {norms[token].item():.2g}, median {norms.median().item():.2g})"
        )
    return None


def _role_ids(target: Target) -> dict[str, set[int]]:
    """Ids with a meaning of their own, from every place that may define them."""
    sources = [source for source in (target.config, target.model.generation_config, target.tokenizer) if source]
    roles: dict[str, set[int]] = {}
    for role in ("pad", "eos", "bos"):
        values = [getattr(source, f"{role}_token_id") for source in sources if hasattr(source, f"{role}_token_id")]
        lists = [value if isinstance(value, list) else [value] for value in values]
        roles[role] = {int(i) for ids in lists for i in ids if i is not None}
    return roles


def _used_ids(used_token_ids: Collection[int] | Tensor | None) -> frozenset[int]:
    """A set of ids from a collection, or from a bool tensor [V] that is true at used ids."""
    if used_token_ids is None:
        return frozenset()
    if isinstance(used_token_ids, Tensor):
        assert used_token_ids.dtype == torch.bool, used_token_ids.dtype
        return frozenset(used_token_ids.nonzero().flatten().tolist())
    return frozenset(used_token_ids)

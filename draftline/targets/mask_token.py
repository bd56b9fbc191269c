"""Which row of the target's embedding table stands for a slot that is still to be predicted.

The row is the target's own and frozen, so it must exist (the table is never resized), must mean nothing else to the
drafter (never pad, eos or bos, never an id of the data), and must not be close to zero.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from draftline.errors import ConfigError
from draftline.targets.model import Target

SMALLEST_NORM = 0.01
"""A row below this share of the table's median norm carries no signal: many tables have such rows."""

_RESERVED = re.compile(r"reserved|unused|mask|extra|placeholder|dummy", re.IGNORECASE)


def resolve_mask_token(target: Target, wanted: int | None, used_token_ids: Collection[int]) -> int:
    """The row asked for, if it can serve; else a padding row of the table, else an unused special token.

    Args:
        wanted: what the user set, or None.
        used_token_ids: ids that occur in the data.

    Raises:
        ConfigError: the row asked for cannot serve, or none is free.
    """
    norms = target.embedding.get_parameter("weight").detach().float().norm(dim=1)
    if wanted is None:
        for candidate in _candidates(target):
            if _fault(target, candidate, used_token_ids, norms) is None:
                return candidate
        raise ConfigError(
            f"target {target.name} has no free embedding row for the mask token: "
            "set drafter.mask_token_id to an id that the data does not use"
        )
    fault = _fault(target, wanted, used_token_ids, norms)
    if fault is None:
        return wanted
    free = (c for c in _candidates(target) if _fault(target, c, used_token_ids, norms) is None)
    proposal = next(free, None)
    fix = "choose another" if proposal is None else f"{proposal} would do"
    raise ConfigError(f"drafter.mask_token_id {wanted} {fault}: {fix}")


def _candidates(target: Target) -> Iterator[int]:
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


def _fault(target: Target, token: int, used_token_ids: Collection[int], norms: Tensor) -> str | None:
    """Why a row cannot be the mask, or None."""
    if not 0 <= token < target.vocab_size:
        return (
            f"is not a row of the embedding table of {target.name}, which has {target.vocab_size} and is never resized"
        )
    for role, ids in _roles(target).items():
        if token in ids:
            return f"is the {role} token of {target.name}, which also occurs as a real token"
    if token in used_token_ids:
        return "occurs in the data"
    if bool(norms[token] < SMALLEST_NORM * norms.median()):
        return (
            f"has an embedding row of nearly zero (norm {norms[token].item():.2g}, median {norms.median().item():.2g})"
        )
    return None


def _roles(target: Target) -> dict[str, set[int]]:
    """Ids with a meaning of their own, from every place that may define them."""
    sources = [source for source in (target.config, target.model.generation_config, target.tokenizer) if source]
    roles: dict[str, set[int]] = {}
    for role in ("pad", "eos", "bos"):
        values = [getattr(source, f"{role}_token_id") for source in sources if hasattr(source, f"{role}_token_id")]
        lists = [value if isinstance(value, list) else [value] for value in values]
        roles[role] = {int(i) for ids in lists for i in ids if i is not None}
    return roles


def used_ids(used_token_ids: Collection[int] | Tensor | None) -> frozenset[int]:
    """A set of ids from a collection, or from a bool tensor [V] that is true at used ids."""
    if used_token_ids is None:
        return frozenset()
    if isinstance(used_token_ids, Tensor):
        assert used_token_ids.dtype == torch.bool, used_token_ids.dtype
        return frozenset(used_token_ids.nonzero().flatten().tolist())
    return frozenset(used_token_ids)

"""The target over one growing sequence: forward over new tokens, then keep only the first few of them.

Attention caches are rolled back by cutting off what was rejected. Linear-attention layers hold one state for the whole
past, from which nothing can be cut: transformers' own `crop` leaves their recurrent state where the rejected tokens
brought it, without an error. For targets that have such layers the caches are put back as they were before the
forward, and the accepted tokens are run again: one more forward wherever a block was not accepted whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from draftline.errors import TargetError
from draftline.targets.cached import cached_forward, last_logits_only, unlike
from draftline.targets.capture import HookCapture
from draftline.targets.model import Target

_CROPPABLE = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer"})
"""Cache layers whose `crop` brings them back exactly; by name, as not every supported transformers has them all."""

_REPLAYED = frozenset(
    {"LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"}
)
"""Cache layers that are put back from a copy, and brought forward by running the accepted tokens again."""

_PROBED, _LONGEST_REASON = 8, 120
"""Tokens before and behind the cache of the trial; letters of a reason that is not ours."""


@dataclass(frozen=True)
class Verification:
    """What one forward of the target gives.

    Attributes:
        logits_nV: next-token logits after each new token; after the prompt's forward only those of its last token.
        hidden_states: [1, n, L*D] states of the captured layers; None if none are captured.
    """

    logits_nV: Tensor
    hidden_states: Tensor | None


class TargetState:
    """The target's cache over one sequence. Make it with `open_target_state`.

    Attributes:
        length: tokens in the cache, without those not yet kept.
        replayed_forwards: extra forwards that the rollback of linear-attention layers took.
    """

    def __init__(self, target: Target, capture: HookCapture | None) -> None:
        self.length = 0
        self.replayed_forwards = 0
        self._target = target
        self._capture = capture
        self._cache, self._replays = _new_cache(target)
        self._new_ids = torch.empty(1, 0, dtype=torch.int64)
        self._before: list[dict[str, Any]] = []

    def forward(self, input_ids: Tensor) -> Verification:
        """Run the target over new tokens, [1, n]; `keep` has to follow."""
        self._new_ids = input_ids
        if self._replays and self.length:
            self._before = [_copy_of_layer(layer) for layer in self._cache.layers]
        return self._run(input_ids)

    def keep(self, count: int) -> None:
        """Keep the first `count` tokens of the last forward, and forget the others."""
        rejected = self._new_ids.shape[1] - count
        if not self._replays:
            self._cache.crop(-rejected)
        elif rejected:
            for layer, before in zip(self._cache.layers, self._before, strict=True):
                vars(layer).update(before)
            self._run(self._new_ids[:, :count])
            self.replayed_forwards += 1
        self.length += count

    def _run(self, input_ids: Tensor) -> Verification:
        model, count = self._target.model, input_ids.shape[1]
        if self.length:
            positions = torch.arange(self.length, self.length + count, device=input_ids.device)[None]
            logits, _ = cached_forward(model, input_ids, positions, self._cache)
        else:
            logits, _ = cached_forward(model, input_ids, None, self._cache, **last_logits_only(model))
        if self._capture is None:
            return Verification(logits[0], None)
        states = self._capture.get_hidden_states_packed(torch.ones_like(input_ids))
        return Verification(logits[0], states.hidden_states_packed)


@contextmanager
def open_target_state(target: Target, target_layer_ids: tuple[int, ...]) -> Iterator[TargetState]:
    """A fresh state whose captured layers are hooked until the block ends; no ids: nothing is captured.

    Raises:
        TargetError: this target cannot be decoded here.
    """
    fault = decoding_fault(target)
    if fault:
        raise TargetError(f"{target.name}: {fault}: this target can be drafted for, but not decoded here")
    if not target_layer_ids:
        yield TargetState(target, None)
        return
    with HookCapture(target.model, target_layer_ids) as capture:
        yield TargetState(target, capture)


_FAULTS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""What was found of each model."""


def decoding_fault(target: Target) -> str:
    """Why transformers cannot verify blocks of this target, in a few words; empty if it can.

    Found by trying, once for each model: several tokens behind a cache, against the same without one.
    """
    if target.model not in _FAULTS:
        _FAULTS[target.model] = _unknown_layers(target) or _wrong_behind_cache(target)
    return _FAULTS[target.model]


def _unknown_layers(target: Target) -> str:
    try:
        cache = DynamicCache(config=target.model.config)
    except KeyError as error:
        return f"transformers has no cache for its layers of type {error}"
    kinds = {type(layer).__name__ for layer in cache.layers}
    unknown = kinds - _CROPPABLE - _REPLAYED
    if unknown or not kinds:
        return f"its cache ({', '.join(sorted(unknown)) or 'none'}) cannot be rolled back to the accepted tokens"
    return ""


@torch.no_grad()
def _wrong_behind_cache(target: Target) -> str:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (1, 2 * _PROBED), generator=generator).to(target.device)
    state = TargetState(target, None)
    try:
        state.forward(ids[:, :_PROBED])
        state.length = _PROBED
        found_nV = state.forward(ids[:, _PROBED:]).logits_nV
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        return f"transformers cannot read several tokens behind a cache ({reason})"
    if unlike(found_nV, target.model(input_ids=ids, use_cache=False).logits[0, _PROBED:]):
        return "transformers gives other logits for several tokens behind a cache than without one"
    return ""


def _new_cache(target: Target) -> tuple[DynamicCache, bool]:
    """An empty cache, and whether its rollback takes a replay."""
    cache = DynamicCache(config=target.model.config)
    replays = any(type(layer).__name__ in _REPLAYED for layer in cache.layers)
    if not replays:
        cache.activate_past_recording()
    return cache, replays


def _copy_of_layer(layer: object) -> dict[str, Any]:
    """All that a cache layer remembers. Attention layers replace their tensors, linear ones write into theirs."""
    return {name: _copied(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}


def _copied(states: dict[int, Any]) -> dict[int, Any]:
    return {index: value.clone() if isinstance(value, Tensor) else value for index, value in states.items()}

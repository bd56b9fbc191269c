"""Which decoder layers are read, and the two ways in which programs number them.

Convention A (ours, z-lab's, SGLang's): `target_layer_ids`, 0-based decoder layers whose *output* is read.
Convention B (speculators, vLLM's `eagle_aux_hidden_state_layer_ids`, GGUF): the same plus one, because there index 0
is the embedding. Nothing outside this file adds or subtracts that one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from draftline.errors import ConfigError, TargetError


def default_target_layer_ids(num_layers: int, count: int) -> tuple[int, ...]:
    """Spread `count` layers evenly from layer 1 to layer num_layers - 3; a single one is the middle layer.

    The rule is the one of the DFlash paper (arXiv 2602.06036): 64 layers and count 5 give 1, 16, 31, 46, 61.

    Raises:
        TargetError: the target is too shallow for that many distinct layers; the largest count that works is named.
    """
    ids = _spread(num_layers, count)
    if _usable(ids, num_layers):
        return ids
    largest = next((k for k in range(count - 1, 0, -1) if _usable(_spread(num_layers, k), num_layers)), 0)
    if not largest:
        raise TargetError(f"a target of {num_layers} layers is too shallow to be captured: it needs at least 3")
    raise TargetError(
        f"a target of {num_layers} layers is too shallow for {count} captured layers: "
        f"set drafter.num_captured_layers to at most {largest}, or give drafter.target_layer_ids"
    )


def check_target_layer_ids(ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return `ids` as a tuple if they are distinct, increasing and in 0..num_layers-2.

    The last layer is refused: some programs read its output before the final norm and some after it, so a drafter
    fed with it would be served with other features than it was trained on.

    Raises:
        ConfigError: an id is out of range, or the order is wrong.
    """
    if not ids:
        raise ConfigError("target_layer_ids is empty: give at least one layer")
    for layer in ids:
        if layer == num_layers - 1:
            raise ConfigError(
                f"target_layer_ids {list(ids)} has {layer}, the last layer, which programs read differently "
                f"(before or after the final norm): use 0..{num_layers - 2}"
            )
        if not 0 <= layer < num_layers:
            raise ConfigError(
                f"target_layer_ids {list(ids)} has {layer}, which is not a layer of a target with {num_layers}: "
                f"use 0..{num_layers - 2}"
            )
    if list(ids) != sorted(set(ids)):
        raise ConfigError(f"target_layer_ids {list(ids)} must be distinct and increasing: use {sorted(set(ids))}")
    return tuple(ids)


def to_aux_hidden_state_layer_ids(target_layer_ids: Sequence[int]) -> tuple[int, ...]:
    """Convention A to convention B."""
    return tuple(layer + 1 for layer in target_layer_ids)


def from_aux_hidden_state_layer_ids(aux_hidden_state_layer_ids: Sequence[int]) -> tuple[int, ...]:
    """Convention B to convention A.

    Raises:
        ConfigError: an id is 0: the embedding's output, which is not a decoder layer.
    """
    if any(layer < 1 for layer in aux_hidden_state_layer_ids):
        raise ConfigError(
            f"aux_hidden_state_layer_ids {list(aux_hidden_state_layer_ids)} reads the embedding (id 0): "
            "only outputs of decoder layers (1 and up) can be captured"
        )
    return tuple(layer - 1 for layer in aux_hidden_state_layer_ids)


def _spread(num_layers: int, count: int) -> tuple[int, ...]:
    if count == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))


def _usable(ids: tuple[int, ...], num_layers: int) -> bool:
    return all(0 <= layer <= num_layers - 2 for layer in ids) and all(a < b for a, b in itertools.pairwise(ids))

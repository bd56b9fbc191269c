"""A target of its own for each loop, at the price of one, and the target's ends for the drafter's device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftline.config import TargetConfig
from draftline.draft.block import FrozenTarget
from draftline.targets.model import Target, build_target, load_target, resolve_device


def share_weights(target: Target) -> Target:
    """A second target on the same device whose modules are new and whose parameters are the same memory.

    Buffers are copied: some rotary embeddings rewrite theirs during a forward. Costs no weights, only modules.
    """
    parameters: dict[int, object] = {id(parameter): parameter for parameter in target.model.parameters()}
    model = copy.deepcopy(target.model, parameters)
    return build_target(target.name, model, target.tokenizer)


def loop_targets(target: Target, config: TargetConfig, devices: Sequence[str]) -> list[Target]:
    """One target per device named, no two of which (nor `target` itself) share a module.

    Args:
        target: already loaded; serves the loops on its own device.
        config: how to load it on other devices, once for each.

    Raises:
        TargetError: a device cannot be used, or the target does not fit on it.
    """
    loaded = {target.device: target}
    for name in devices:
        device = resolve_device(name)
        if device not in loaded:
            loaded[device] = load_target(config.model_copy(update={"device": name}))
    return [share_weights(loaded[resolve_device(name)]) for name in devices]


def frozen_target(target: Target, device: torch.device, kept_ids: Tensor | None = None) -> FrozenTarget:
    """Embedding and head on the drafter's device: the target's own modules there, else a copy of just these.

    Embeddings come as float32, the precision of the drafter's residual stream.

    Args:
        kept_ids: tokens of a reduced vocabulary.
    """
    if device != target.device:
        embedding, head = copy.deepcopy((target.embedding, target.head))
        target = replace(target, parts=replace(target.parts, embedding=embedding.to(device)), head=head.to(device))
    return FrozenTarget.of(target, kept_ids, like=torch.zeros((), device=device))

"""A target of its own for each loop, at the price of one."""

from __future__ import annotations

import copy

from draftline.target.model import Target, build_target


def share_weights(target: Target) -> Target:
    """A second target on the same device whose modules are new and whose parameters are the same memory.

    Buffers are copied: some rotary embeddings rewrite theirs during a forward. Costs no weights, only modules.
    """
    parameters: dict[int, object] = {id(parameter): parameter for parameter in target.model.parameters()}
    model = copy.deepcopy(target.model, parameters)
    return build_target(target.name, model, target.tokenizer)

"""The number formats in which a run multiplies matrices, watched from below, whatever the code above says of them.

Every matrix product that torch carries out passes here: in a step, while labels are made, and in the measurement of a
held-out row. Which format belongs to which is section 8 of the recipe.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftline.audit.comparison import computed_in
from draftline.audit.report import Problem
from draftline.config import sent_beside_states
from draftline.records import PackedBatch
from draftline.run import Run

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "scaled_dot_product")


class _Watched(TorchDispatchMode):
    """Notes the format of each product.

    Attributes:
        seen: of products with as many columns as the head has rows, and of the others.
        updating: set once gradients are there: what an optimiser multiplies is its own matter.
    """

    def __init__(self, head_rows: set[int]) -> None:
        super().__init__()
        self._rows = head_rows
        self.seen: dict[str, set[torch.dtype]] = {"head": set(), "drafter": set()}
        self.updating = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).partition(".")[2].partition(".")[0]
        given = [tensor for tensor in args if isinstance(tensor, Tensor)]
        if name.lstrip("_").startswith(_PRODUCTS) and given[0].is_floating_point():
            inner = given[-1].shape[-2] if given[-1].ndim > 1 else 1
            sizes = {size for tensor in given for size in tensor.shape[-2:]}
            if inner > 1 and not self.updating:  # rotary tables are outer products, in float32
                self.seen["head" if sizes & self._rows else "drafter"].add(given[0].dtype)
        return result


def wrong_products(run: Run, row: PackedBatch) -> Problem | None:
    """Products of a step and of an evaluation that are in another format than configured.

    Args:
        row: packed, on the drafter's device.
    """
    low, drafter, shape = computed_in(run), run.drafter.twin(), run.shape
    rows = {shape.vocab_size, shape.head_rows}
    states = shape.hidden_size * len(shape.target_layer_ids)
    if rows & {shape.hidden_size, states, shape.intermediate_size, shape.head_dim, shape.block_size}:
        return None  # the head's products could not be told from others
    spoken = run.target.dtype if low == torch.float32 else low
    labels = {run.target.dtype} if sent_beside_states(run.config) == "last_hidden" else set()
    wanted = {"drafter": {low}, "head": {spoken} | labels}
    for where, call in (("a step", lambda: drafter.step([row])), ("an evaluation", lambda: drafter.measure(row))):
        with _Watched(rows) as watched:
            moving = drafter.optimizer.register_step_pre_hook(lambda *_, now=watched: setattr(now, "updating", True))
            call()
        moving.remove()
        for part, right in wanted.items():
            if watched.seen[part] != right:
                return Problem(
                    f"in {where} products of the {part} are in {_named(watched.seen[part])}, by the settings in "
                    f"{_named(right)}",
                    "train.precision for the drafter and what it says; labels in the target's own format (section 8)",
                )
    return None


def _named(formats: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(one).removeprefix("torch.") for one in formats)) or "none"

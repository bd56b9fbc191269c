"""How a target's forward is asked for what is wanted of it: its cache, the rows in it, and few logits.

The one place that knows what transformers calls these things, and where a family does otherwise than the others.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftline.errors import TargetError


def cached_forward(
    model: PreTrainedModel, input_ids: Tensor, positions: Tensor | None, cache: Any, **options: Any
) -> tuple[Tensor, Any]:
    """One forward over new tokens behind what a cache holds.

    Args:
        input_ids: [B, n] new tokens.
        positions: [B, n] their positions, counted from the first real token of each row; none: 0 to n - 1. Where the
            first layer keeps no keys, some families (Bamba) count from 0 again if they are not told.
        cache: what the last forward returned; none before the first.
        options: further arguments of the model.

    Returns:
        Logits [B, n or fewer, V], and the cache.

    Raises:
        TargetError: the family keeps its past elsewhere than in a cache.
    """
    parameters = inspect.signature(model.forward).parameters
    # transformers renamed the argument, and the field of the result, within the range of supported versions
    name = "cache" if "cache" in parameters else "past_key_values"
    if positions is not None:
        options["position_ids"] = positions
    output = model(input_ids=input_ids, use_cache=True, **{name: cache}, **options)
    if name not in output:
        raise TargetError(f"{type(model).__name__} gives no cache back: its answers cannot be continued here")
    return output.logits, output[name]


def last_logits_only(model: PreTrainedModel) -> dict[str, Tensor]:
    """Arguments for logits of the last token alone, where a forward can do that: no others are read.

    The place is named and not the number of places: of a number, targets that share keys and values between layers
    (Gemma 4) conclude that only these tokens need to go through the sharing layers, whose states are captured.
    """
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return {}
    return {"logits_to_keep": torch.tensor([-1], device=model.device)}


def select_rows(cache: Any, rows: Tensor) -> None:
    """Keep some rows of a batch in a cache, [n] int64.

    Of `batch_select_indices`, layers with a recurrent state have none, or inherit one that leaves this state out. What
    reorders the rows for a beam search takes fewer rows than there are, too, and is complete in every kind of layer;
    only a cache that keeps states outside of its layers (MiniMax) has its own way.
    """
    if "batch_select_indices" in vars(type(cache)):
        cache.batch_select_indices(rows)
    else:
        cache.reorder_cache(rows)


def unlike(found_nV: Tensor, wanted_nV: Tensor) -> bool:
    """Whether logits differ by more than rounding, of which a batch, a cache and a kernel each have their own.

    Measured with 75 families of tiny random models: right ones are at most 6e-6 apart (relative) in float32 and 4e-2 in
    bfloat16, but for single tokens that are sent to another expert; wrong ones 0.3 and more. So most rows decide.
    """
    found, wanted = found_nV.double(), wanted_nV.double()
    apart_n = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)
    return not float(apart_n.median()) <= max(1e-3, 16 * torch.finfo(found_nV.dtype).eps)

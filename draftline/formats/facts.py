"""What a foreign checkpoint says about its drafter, gathered from wherever its format keeps it, and made complete.

A fact that a folder leaves out is asked for, never guessed: the same weights under another layout, block size or mask
token load without an error and are accepted a tenth as often.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from draftline.config import DFlashConfig
from draftline.errors import CheckpointError, ConfigError
from draftline.targets.layers import check_target_layer_ids
from draftline.targets.rope import rope_of_folder

T = TypeVar("T", int, bool)

LAYER_TYPES = ("full_attention", "sliding_attention")

_COPIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)

_OTHER_MODELS = {
    "attention_bias": (False, "biases in its attention"),
    "mlp_bias": (False, "biases in its MLP"),
    "hidden_act": ("silu", "another activation"),
    "quantization_config": (None, "quantised weights"),
    "projector_type": (None, "a correction head"),
    "markov_rank": (0, "the Markov head of DSpark"),
    "enable_confidence_head": (False, "the confidence head of DSpark"),
    "use_confidence_head": (False, "the confidence head of DSpark"),
    "attention_sink_bias": (False, "learned attention sinks"),
    "attention_value_scale": (1.0, "scaled attention values"),
    "conv_kernel_size": (0, "the convolutions of DFlash 2"),
    "selector_rank": (0, "the candidate selector of DFlash 2"),
    "enable_d2_feature": (False, "features of real prefix tokens"),
    "num_experts": (0, "a mixture of experts"),
}
"""Keys whose presence, with another value than this, means a model that `DFlashDraftModel` does not compute."""


@dataclass(frozen=True)
class Given:
    """Facts that the user states because a folder leaves them out."""

    sample_from_anchor: bool | None = None
    """Whether slot 0, the anchor, predicts too."""
    block_size: int | None = None
    mask_token_id: int | None = None
    num_target_layers: int | None = None
    """Depth of the target."""


@dataclass(frozen=True)
class Facts:
    """What one folder says; None where it says nothing.

    Attributes:
        stack: the keys that describe the layers, named as in a Qwen3 configuration.
        where: names the file in messages.
        target_layer_ids: convention A.
        num_target_layers: depth of the target.
        sliding_window_causal: whether slots of sliding layers see only earlier slots.
        draft_vocab_size: tokens that the drafter can say; None where it is all of them.
        scales: what the target does to embeddings and logits, where the folder says so.
    """

    stack: Mapping[str, Any]
    where: str
    target_layer_ids: tuple[int, ...]
    block_size: int | None
    mask_token_id: int | None
    num_target_layers: int | None
    sample_from_anchor: bool | None
    layer_types: tuple[str, ...]
    sliding_window: int | None
    sliding_window_causal: bool = True
    draft_vocab_size: int | None = None
    scales: Mapping[str, float | None] = field(default_factory=dict)


def resolve(facts: Facts, given: Given) -> DFlashConfig:
    """The complete shape: what the folder says, and what the user says where it says nothing.

    Raises:
        CheckpointError: a fact is missing, contradicts what the user says, or is out of range.
    """
    stack, where = facts.stack, facts.where
    refuse_other_models(stack, where)
    missing = [name for name in _COPIED if stack.get(name) is None]
    if missing:
        raise CheckpointError(f"{where} has no {missing[0]}: add it, or export the drafter again")
    heads = stack["num_attention_heads"]
    head_dim = stack.get("head_dim") or stack["hidden_size"] // heads
    if stack.get("v_head_dim") not in (None, head_dim):
        raise CheckpointError(f"{where}: v_head_dim {stack['v_head_dim']} differs from {head_dim}: not computed here")
    layout = _settled("sample_from_anchor", facts.sample_from_anchor, given.sample_from_anchor, where)
    try:
        config = DFlashConfig(
            **{name: stack[name] for name in _COPIED},
            head_dim=head_dim,
            rope_parameters=rope_of_folder(stack, where),
            layer_types=facts.layer_types,
            sliding_window=facts.sliding_window,
            sliding_window_causal=facts.sliding_window_causal,
            block_size=_settled("block_size", facts.block_size, given.block_size, where),
            mask_token_id=_settled("mask_token_id", facts.mask_token_id, given.mask_token_id, where),
            target_layer_ids=facts.target_layer_ids,
            num_target_layers=_settled("num_target_layers", facts.num_target_layers, given.num_target_layers, where),
            draft_vocab_size=facts.draft_vocab_size,
            sample_from_anchor=layout,
            bos_token_id=_token(stack, "bos_token_id"),
            eos_token_id=_token(stack, "eos_token_id"),
            **{name: stack[name] for name in ("initializer_range",) if name in stack},
            **facts.scales,
        )
        check_target_layer_ids(config.target_layer_ids, config.num_target_layers)
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(map(str, fault["loc"])) or "config"
        raise CheckpointError(f"{where}: {name}: {fault['msg']}: fix or export again") from error
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from error
    return config


def refuse_other_models(tree: Mapping[str, Any], where: str) -> None:
    """Refuse what would load and then compute something else.

    Raises:
        CheckpointError: a key announces parts that a DFlash drafter does not have.
    """
    for name, (neutral, what) in _OTHER_MODELS.items():
        found = tree.get(name)
        if found is not None and found != neutral:
            raise CheckpointError(f"{where}: {name} = {found!r}: this drafter has {what}, which are not computed here")


def agreed(name: str, places: Mapping[str, Any], where: str) -> Any:
    """The one value that is said in any of several places, or None.

    Raises:
        CheckpointError: two places disagree; readers would differ in which one they believe.
    """
    said = {place: value for place, value in places.items() if value is not None}
    values = list(said.values())
    if any(value != values[0] for value in values):
        listed = ", ".join(f"{value!r} in {place}" for place, value in said.items())
        raise CheckpointError(f"{where}: {name} is {listed}: readers differ in which they use; make them equal")
    return values[0] if values else None


_OPTIONS = {
    "sample_from_anchor": "--sample-from-anchor or --no-sample-from-anchor",
    "block_size": "--block-size",
    "mask_token_id": "--mask-token-id",
    "num_target_layers": "--target or --num-target-layers",
}
_MEANING = {
    "sample_from_anchor": "whether slot 0, the anchor, predicts a token (DSpark) or not (DFlash)",
    "block_size": "how many slots a block has",
    "mask_token_id": "which token stands for slots to be predicted",
    "num_target_layers": "how deep its target is",
}


def _settled(name: str, found: T | None, given: T | None, where: str) -> T:
    if isinstance(found, str):  # "false" is true to some readers and false to others
        raise CheckpointError(f"{where}: {name} is the text {found!r}: write the value itself, without quotes")
    if found is None and given is None:
        raise CheckpointError(
            f"{where} has no {name}, which says {_MEANING[name]}: state it to `draftline import` with {_OPTIONS[name]}"
        )
    if found is not None and given is not None and found != given:
        raise CheckpointError(f"{where}: {name} is {found!r} there and {given!r} was given: leave out {_OPTIONS[name]}")
    return given if found is None else found  # type: ignore[return-value]  # one of them is there


def _token(stack: Mapping[str, Any], name: str) -> int | None:
    """Some targets have several ends; which one stands here matters to no reader."""
    found: Any = stack.get(name)
    if isinstance(found, list):
        return int(found[0]) if found else None
    return None if found is None else int(found)

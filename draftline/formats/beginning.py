"""What a drafter's first step starts from: drawn weights, the target's own layers, or a drafter that is there already.

A drafter that is trained further keeps its whole shape, its rotary table and its vocabulary among it. Settings that say
something else are an error and not overruled: they are what the run records of itself.
"""

from __future__ import annotations

from draftline.config import DFlashConfig, DrafterConfig
from draftline.draft.model import DFlashDraftModel
from draftline.errors import ConfigError
from draftline.formats.load import load_drafter
from draftline.targets.model import Target


def drafter_to_continue(drafter: DrafterConfig, target: Target) -> DFlashDraftModel | None:
    """The drafter in `drafter.init_from`, in float32 on the CPU; None where a run begins one of its own.

    Raises:
        CheckpointError: there is none, or it is not computed here.
        TargetError: it was trained for another target.
        ConfigError: the settings ask for another shape.
    """
    if drafter.init_from is None:
        return None
    model = load_drafter(drafter.init_from, target=target).draft_model
    words = _contradicted(drafter, settings_of(model.config))
    if words:
        raise ConfigError(f"{drafter.init_from} has another shape than the settings: set {' '.join(words)}")
    scales = {  # trained on the target's own modules from now on, whatever its format could say of them
        "input_embedding_scale": target.input_embedding_scale,
        "output_multiplier": target.head.output_multiplier,
        "final_logit_softcapping": target.head.final_logit_softcapping,
    }
    model.config = model.config.model_copy(update=scales)
    return model


def set_first_weights(
    model: DFlashDraftModel, drafter: DrafterConfig, target: Target, continued: DFlashDraftModel | None
) -> None:
    """Replace drawn weights by what the settings say the first step starts from.

    Args:
        continued: what `drafter_to_continue` gave for the same settings.

    Raises:
        ConfigError: the target's layers are of another form than the drafter's.
    """
    if continued is not None:
        model.load_state_dict(continued.state_dict())
    elif drafter.start_from == "target_layers":
        model.start_from_layers(target.decoder_layers, target.final_norm)


def settings_of(shape: DFlashConfig) -> DrafterConfig:
    """Settings under which a drafter of this shape would be trained."""
    sliding = sum(kind == "sliding_attention" for kind in shape.layer_types)
    return DrafterConfig(
        num_layers=shape.num_hidden_layers,
        block_size=shape.block_size,
        num_captured_layers=len(shape.target_layer_ids),
        target_layer_ids=shape.target_layer_ids,
        mask_token_id=shape.mask_token_id,
        sample_from_anchor=shape.sample_from_anchor,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        sliding_window=shape.sliding_window if sliding else None,
        num_sliding_layers=sliding,
        draft_vocab_size=shape.draft_vocab_size,
    )


def _contradicted(drafter: DrafterConfig, shape: DrafterConfig) -> list[str]:
    """The settings that would agree with the shape, as words; what is left open contradicts nothing."""
    said, true = drafter.model_dump(mode="json"), shape.model_dump(mode="json")
    if drafter.target_layer_ids is not None:
        del said["num_captured_layers"]  # has no say then
    return [
        f"drafter.{name}={'null' if true[name] is None else str(true[name]).replace(' ', '')}"
        for name, value in said.items()
        if name != "init_from"
        and value != true[name]
        and (value is not None or name in ("sliding_window", "draft_vocab_size"))
    ]

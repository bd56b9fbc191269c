"""What a target costs, read from its modules without their weights: a `config.json` is enough."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from draftline.config import TargetConfig
from draftline.errors import TargetError
from draftline.targets.drafter_shape import EXPERT_FIELDS
from draftline.targets.head import TargetHead, find_parts, setting_of
from draftline.targets.model import Target, build_target, load_target_config, model_class

_CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")
"""Names under which configurations say how many experts a token goes through."""
_NO_ATTENTION = ("linear_attention", "mamba", "conv", "recurrent")


@dataclass(frozen=True)
class TargetSizes:
    """Numbers that memory and time follow from.

    Attributes:
        name: of the target.
        parameters: all of them, tied ones once.
        itemsize: bytes of one number, of weights and states alike.
        used: numbers of the decoder layers' matrices that a token is multiplied with; of experts, those it goes to.
        head: numbers of the output head.
        embedding: numbers of the input table.
        tied: whether head and table are one.
        attention_width: heads times head dimension.
        reach: by layer, how far back a token looks: None for all, a window, 0 without attention.
        hidden: D.
        mlp: widest inner state of a layer.
    """

    name: str
    parameters: int
    itemsize: int
    used: float
    head: int
    embedding: int
    tied: bool
    attention_width: int
    reach: tuple[int | None, ...]
    hidden: int
    mlp: int

    @property
    def weight_bytes(self) -> int:
        """Of the whole model."""
        return self.parameters * self.itemsize

    @property
    def borrowed_bytes(self) -> int:
        """Of a copy of table and head on another device; each is copied, tied or not."""
        return (self.embedding + self.head) * self.itemsize

    @staticmethod
    def of(target: Target, itemsize: int | None = None) -> TargetSizes:
        """Sizes of a target, live or described.

        Args:
            itemsize: bytes of a number where the target will run; none: as it is.
        """
        config, weight = target.config, target.embedding.get_parameter("weight")
        head = sum(p.numel() for p in target.head.lm_head.parameters())
        heads = setting_of(config, "num_attention_heads") or 1
        return TargetSizes(
            name=target.name,
            parameters=sum(p.numel() for p in target.model.parameters()),
            itemsize=itemsize or weight.element_size(),
            used=_used_numbers(target),
            head=head,
            embedding=weight.numel(),
            tied=any(p is weight for p in target.head.lm_head.parameters()),
            attention_width=int(heads * (setting_of(config, "head_dim") or target.hidden_size // heads)),
            reach=_reach(target),
            hidden=target.hidden_size,
            mlp=_widest(target),
        )


def described_target(config: TargetConfig) -> Target:
    """A target without weights (meta device), from its configuration alone; no tokenizer.

    Args:
        config: names it: a folder that need not hold more than `config.json`, or that file.

    Raises:
        TargetError: the configuration cannot be read, lacks sizes, or is of a family that cannot be hooked.
    """
    model = _model_from_config(config, None, "meta")
    parts = find_parts(model)
    return Target(config.name, model, None, parts, TargetHead(parts.final_norm, parts.lm_head), 1.0, 1.0)


def drawn_target(config: TargetConfig, layers: int | None) -> Target:
    """A target with random weights on the CPU, from its configuration alone; no tokenizer.

    Args:
        layers: keep only so many of its decoder layers; none: all.

    Raises:
        TargetError: as `described_target`.
    """
    return build_target(config.name, _model_from_config(config, layers, "cpu"), None)


def _model_from_config(config: TargetConfig, layers: int | None, device: str) -> PreTrainedModel:
    found = copy.deepcopy(load_target_config(config))
    try:
        if layers is not None:
            _keep_layers(found.get_text_config(decoder=True), layers)
        with torch.device(device):
            model: PreTrainedModel = model_class(config.name, found).from_config(
                found,
                dtype=torch.bfloat16 if config.dtype in ("bfloat16", "float16") else torch.float32,
                trust_remote_code=config.trust_remote_code,
            )
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise TargetError(
            f"target {config.name}: its configuration does not describe a model ({reason}): complete its config.json"
        ) from error
    return model.eval().requires_grad_(False)


def _keep_layers(config: object, layers: int) -> None:
    """Cut what a configuration says by layer, and the number itself."""
    depth = vars(config)["num_hidden_layers"]
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(config, name, value[:layers])
    setattr(config, "num_hidden_layers", layers)  # noqa: B010  # mypy does not know the attribute


def _used_numbers(target: Target) -> float:
    config = target.config
    experts = next((n for name in EXPERT_FIELDS if (n := setting_of(config, name))), 0)
    chosen = next((n for name in _CHOSEN_EXPERTS if (n := setting_of(config, name))), experts)
    share = chosen / experts if isinstance(chosen, int) and isinstance(experts, int) and experts else 1.0
    used = 0.0
    for name, parameter in target.decoder_layers.named_parameters():
        if parameter.ndim >= 2:
            used += parameter.numel() * (share if "experts" in name and "shared" not in name else 1.0)
    return used


def _reach(target: Target) -> tuple[int | None, ...]:
    kinds = setting_of(target.config, "layer_types") or ["full_attention"] * target.num_layers
    window = setting_of(target.config, "sliding_window")
    return tuple(
        0 if any(word in kind for word in _NO_ATTENTION) else window if "sliding" in kind else None for kind in kinds
    )


def _widest(target: Target) -> int:
    widths = [m.out_features for m in target.decoder_layers.modules() if isinstance(m, nn.Linear)]
    return max(widths, default=target.hidden_size)

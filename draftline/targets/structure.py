"""Where the parts of a causal language model are, found by looking at the modules instead of by family name.

A Llama, a Gemma inside a vision-language wrapper and a hybrid with linear attention store their decoder layers, final
norm, embedding and head under different names. What they share: one module (the backbone) owns the input embedding,
a list of `num_hidden_layers` decoder layers, and after it a norm.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from draftline.errors import TargetError


@dataclass(frozen=True, eq=False)
class TargetParts:
    """The modules that the rest of Draftline touches.

    Attributes:
        config: the text configuration, taken out of a multimodal wrapper's.
        backbone: the text model without its head; its forward takes ids and gives normed states.
        decoder_layers: one module per layer, in order.
        final_norm: what the output of the last layer goes through before the head.
        embedding: the table of input embeddings.
        lm_head: states to logits.
    """

    config: PretrainedConfig
    backbone: nn.Module
    decoder_layers: nn.ModuleList
    final_norm: nn.Module
    embedding: nn.Module
    lm_head: nn.Module


def find_parts(model: PreTrainedModel) -> TargetParts:
    """Find the parts of a live model.

    Raises:
        TargetError: one of them is not there; the message says which.
    """
    kind = type(model).__name__
    config = text_config(model.config)
    embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Module):
        raise TargetError(f"{kind}: no input embedding was found: give a causal language model")
    if not isinstance(lm_head, nn.Module):
        raise TargetError(f"{kind}: no output head (lm_head) was found: give a causal language model")
    backbone = _backbone(model, embedding)
    if backbone is None:
        raise TargetError(f"{kind}: no module owns the input embedding next to decoder layers: it cannot be hooked")
    depth = config.num_hidden_layers
    lists = [child for child in backbone.children() if isinstance(child, nn.ModuleList) and len(child) == depth]
    if not lists:
        raise TargetError(f"{kind}: no list of {depth} decoder layers was found in {type(backbone).__name__}")
    norms = [child for child in backbone.children() if _is_norm(child, config.hidden_size)]
    if not norms:
        raise TargetError(f"{kind}: no final norm was found in {type(backbone).__name__}")
    return TargetParts(config, backbone, lists[0], norms[-1], embedding, lm_head)


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the language model inside `config`: a wrapper's nested one, else `config` itself.

    Raises:
        TargetError: there are several, or the one found describes no stack of decoder layers.
    """
    try:
        found = config.get_text_config(decoder=True)
    except ValueError as error:
        raise TargetError(f"{config.model_type}: more than one nested text configuration: not supported") from error
    for name in ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"):
        if not hasattr(found, name):
            raise TargetError(f"{config.model_type}: its text configuration has no {name}: it is not a language model")
    return found


def _backbone(model: nn.Module, embedding: nn.Module) -> nn.Module | None:
    """The module that has the embedding and a list of layers as direct children."""
    for module in model.modules():
        children = list(module.children())
        if any(child is embedding for child in children) and any(isinstance(c, nn.ModuleList) for c in children):
            return module
    return None


def _is_norm(module: nn.Module, hidden_size: int) -> bool:
    """Told by its class and width: Gemma 4 keeps a norm of per-layer embeddings beside the final one."""
    widths = [parameter.shape for parameter in module.parameters()]
    return "norm" in type(module).__name__.lower() and all(width == (hidden_size,) for width in widths)

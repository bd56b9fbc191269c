"""The parts of a target, from its states to its logits, and from its ids to what its first layer receives.

A Llama, a Gemma inside a vision-language wrapper and a hybrid with linear attention store their decoder layers, final
norm, embedding and head under different names, so the parts are found by looking at the modules. What all share: one
module (the backbone) owns the input embedding, a list of `num_hidden_layers` decoder layers, and after it a norm.

Both ways are the target's own modules plus the constants that families apply around them: Granite divides its logits,
Cohere multiplies them, Gemma 2 caps them; Granite scales its embeddings outside the embedding module, Gemma inside.
The configuration names the candidates, and a forward on a few tokens decides: a head that does not reproduce the
model's real logits is refused when the target is loaded, not discovered as a drafter that learns the wrong thing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from draftline.config import slots_per_chunk
from draftline.errors import TargetError

PROBE_SHAPE = (2, 6)
"""Rows and tokens of the forward on which head and embedding are checked."""

_FEW_COLUMNS, _COLUMNS_AT_ONCE = 16, 8
"""As many states as a block has slots, in eights: by columns, their product with a head of 49,152 or 151,936 rows takes
0.5 to 0.7 of the time that it takes by rows in float32 on a CPU."""


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


def setting_of(config: PretrainedConfig, name: str) -> Any:
    """What a configuration says under a name, None where it says nothing.

    Where layers differ (Gemma 4 has other heads in its global layers), what most layers have; of two, the first.
    """
    if not hasattr(config, "per_layer_config"):  # of transformers before layers could differ
        return getattr(config, name) if hasattr(config, name) else None
    values = [getattr(layer, name) if hasattr(layer, name) else None for layer in config.per_layer_config]
    return max(values, key=values.count) if values else None


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


class TargetHead(nn.Module):
    """Final norm, output head and what the model does to the logits after it.

    Args:
        norm: the target's final norm module.
        lm_head: the target's output head module.
        output_multiplier: what the logits are multiplied with.
        final_logit_softcapping: cap c of c * tanh(logits / c), after the multiplication.
    """

    def __init__(
        self,
        norm: nn.Module,
        lm_head: nn.Module,
        output_multiplier: float = 1.0,
        final_logit_softcapping: float | None = None,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.lm_head = lm_head
        self.output_multiplier = output_multiplier
        self.final_logit_softcapping = final_logit_softcapping

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] states that are already normed -> [..., V]. Differentiable with respect to `hidden`."""
        logits = self._product(hidden.to(next(self.lm_head.parameters()).dtype))
        if self.output_multiplier != 1.0:
            logits = logits * self.output_multiplier
        if self.final_logit_softcapping is not None:
            logits = torch.tanh(logits / self.final_logit_softcapping) * self.final_logit_softcapping
        return logits

    def _product(self, hidden: Tensor) -> Tensor:
        """What `lm_head` gives; a block of slots on a CPU by the columns of the product, in half the time."""
        count, head = hidden.shape[:-1].numel(), self.lm_head
        plain = type(head) is nn.Linear and head.bias is None
        if not plain or hidden.device.type != "cpu" or not 1 < count <= _FEW_COLUMNS:
            result: Tensor = head(hidden)
            return result
        columns_Dn = nn.functional.pad(hidden.flatten(0, -2), (0, 0, 0, -count % _COLUMNS_AT_ONCE)).mT
        return (head.get_parameter("weight") @ columns_Dn)[:, :count].mT.reshape(*hidden.shape[:-1], -1)

    @property
    def rows(self) -> int:
        """How many tokens it can say: the size of its logits."""
        return int(self.lm_head.get_parameter("weight").shape[0])

    @property
    def whole(self) -> TargetHead:
        """The target's own head: this one."""
        return self

    def of_rows(self, kept_ids: Tensor | None) -> TargetHead:
        """The head that a drafter with a reduced vocabulary speaks through; this one if it can say every token.

        Args:
            kept_ids: [Vd] int64, target id of each of its rows.

        Raises:
            TargetError: the head is not a plain matrix, or an id is none of its rows.
        """
        return self if kept_ids is None else ReducedHead(self, kept_ids)

    def to_target_ids(self, rows: Tensor) -> Tensor:
        """Token of each row of the head: the row itself."""
        return rows

    def label_rows(self, target_ids: Tensor, last_hidden: Tensor | None, chunk_size: int | None = None) -> Tensor:
        """Row of the best token that there is a row for, where the target says `target_ids`: the ids themselves."""
        del last_hidden, chunk_size
        return target_ids

    def to_whole(self, values: Tensor) -> Tensor:
        """Values of rows as values of tokens."""
        return values

    def forward(self, last_hidden: Tensor) -> Tensor:
        """[..., D] output of the last decoder layer, before the final norm -> [..., V]."""
        # not self.norm(...): a HookCapture that is active on the target must not take this for a forward of the target
        return self.logits(self.norm.forward(last_hidden))

    @torch.no_grad()
    def target_ids(self, last_hidden: Tensor, chunk_size: int | None = None) -> Tensor:
        """The target's greedy next token at each position: [..., D] -> [...] int64.

        Logits of `chunk_size` positions exist at a time, or of as many as `slots_per_chunk` allows.
        """
        return self.whole.best_rows(last_hidden, chunk_size)

    @torch.no_grad()
    def best_rows(self, last_hidden: Tensor, chunk_size: int | None) -> Tensor:
        """Row with the largest logit at each position: [..., D] -> [...] int64."""
        states = last_hidden.reshape(-1, last_hidden.shape[-1])
        rows = [self(chunk).argmax(-1) for chunk in states.split(chunk_size or slots_per_chunk(self.rows))]
        return torch.cat(rows).reshape(last_hidden.shape[:-1]) if rows else states.new_empty(0, dtype=torch.int64)


class ReducedHead(TargetHead):
    """Rows of a target's head, for a drafter that can say only some tokens. Its outputs are numbered by row.

    Args:
        head: the target's.
        kept_ids: [Vd] int64, target id of each row.

    Raises:
        TargetError: the head is not a plain matrix, or an id is none of its rows.
    """

    kept_ids: Tensor

    def __init__(self, head: TargetHead, kept_ids: Tensor) -> None:
        whole = head.lm_head
        if not isinstance(whole, nn.Linear):
            raise TargetError(f"{type(whole).__name__} as output head has no rows to choose from: use all tokens")
        if len(kept_ids) and not (kept_ids.min() >= 0 and kept_ids.max() < whole.out_features):
            raise TargetError(f"the drafter's vocabulary (d2t) has ids outside 0..{whole.out_features - 1}: fix it")
        rows = kept_ids.to(whole.weight.device)
        some = nn.Linear(whole.in_features, len(rows), whole.bias is not None, device="meta")
        some.weight = nn.Parameter(whole.weight.detach()[rows], requires_grad=False)
        if whole.bias is not None:
            some.bias = nn.Parameter(whole.bias.detach()[rows], requires_grad=False)
        super().__init__(head.norm, some, head.output_multiplier, head.final_logit_softcapping)
        self.register_buffer("kept_ids", rows)
        self._whole, self._vocab_size = head, whole.out_features

    @property
    def whole(self) -> TargetHead:
        """The target's own head, with all rows."""
        return self._whole

    def label_rows(self, target_ids: Tensor, last_hidden: Tensor | None, chunk_size: int | None = None) -> Tensor:
        """What the target would say if it had only these tokens, by row: [..., D] -> [...] int64."""
        del target_ids
        assert last_hidden is not None, "a reduced vocabulary is trained with send = last_hidden"
        return self.best_rows(last_hidden, chunk_size)

    def to_target_ids(self, rows: Tensor) -> Tensor:
        """Token of each row: row + d2t[row]."""
        return self.kept_ids[rows]

    def to_whole(self, values: Tensor) -> Tensor:
        """[..., Vd] values of rows -> [..., V] of tokens, zero elsewhere."""
        whole = values.new_zeros(*values.shape[:-1], self._vocab_size)
        return whole.index_copy_(-1, self.kept_ids, values)


@dataclass(frozen=True, eq=False)
class _Probe:
    """What one small forward showed: ids [B, T], the first layer's input, the final norm's input and the logits."""

    input_ids: Tensor
    first_input: Tensor
    last_hidden: Tensor
    logits: Tensor


@torch.no_grad()
def build_head(model: PreTrainedModel, parts: TargetParts) -> tuple[TargetHead, float]:
    """Assemble the head and find the factor that the model applies to its embedding module's output.

    Returns:
        The head, which gives the model's own logits on a probe, and the factor (1 for most families).

    Raises:
        TargetError: the modules found do not reproduce the model.
    """
    probe = _run_probe(model, parts)
    return _matching_head(probe, parts), _embedding_multiplier(probe, parts)


def row_scale(embedding: nn.Module) -> float:
    """What the embedding module multiplies its rows with: sqrt(D) in Gemma, 1 elsewhere.

    Raises:
        TargetError: the module does something else with its rows.
    """
    weight: Tensor = embedding.get_parameter("weight")
    ids = weight.norm(dim=1).topk(min(8, len(weight))).indices
    rows = weight[ids].double()
    out = embedding(ids).double()
    scale = ((out * rows).sum() / rows.square().sum()).item()
    root = weight.shape[1] ** 0.5
    # bf16 rounds sqrt(D); the number meant is the unrounded one
    exact = next((value for value in (1.0, root) if abs(scale / value - 1) < 1e-2), scale)
    if not _close(rows * exact, out, weight.dtype):
        raise TargetError(f"{type(embedding).__name__} does more than scale its rows: drafters cannot reproduce it")
    return exact


def _run_probe(model: PreTrainedModel, parts: TargetParts) -> _Probe:
    seen: dict[str, list[Tensor]] = {"first": [], "last": []}

    def keep(name: str, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        seen[name].append(args[0] if args else kwargs["hidden_states"])

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(parts.config.vocab_size, PROBE_SHAPE, generator=generator).to(model.device)
    handles = [
        parts.decoder_layers[0].register_forward_pre_hook(lambda _, a, k: keep("first", a, k), with_kwargs=True),
        parts.final_norm.register_forward_pre_hook(lambda _, a, k: keep("last", a, k), with_kwargs=True),
    ]
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise TargetError(f"{type(model).__name__}: a forward on a few tokens failed: {reason}") from error
    finally:
        for handle in handles:
            handle.remove()
    wanted = (*PROBE_SHAPE, parts.config.hidden_size)
    for name, place in (("first", "first decoder layer"), ("last", "final norm")):
        if [tuple(states.shape) for states in seen[name]] != [wanted]:
            shapes = [list(states.shape) for states in seen[name]]
            raise TargetError(
                f"{type(model).__name__}: its {place} received {shapes} in one forward, expected {[list(wanted)]}: "
                "this family is not supported"
            )
    return _Probe(ids, seen["first"][0], seen["last"][0], logits)


def _matching_head(probe: _Probe, parts: TargetParts) -> TargetHead:
    for multiplier, cap in itertools.product(_output_multipliers(parts.config), _soft_caps(parts.config)):
        head = TargetHead(parts.final_norm, parts.lm_head, multiplier, cap)
        found = head(probe.last_hidden)
        if found.shape == probe.logits.shape and _close(found, probe.logits, found.dtype):
            return head
    raise TargetError(
        f"{parts.config.model_type}: norm and lm_head of the last layer's output do not give the model's own logits: "
        "this family does something between them that Draftline does not know"
    )


def _embedding_multiplier(probe: _Probe, parts: TargetParts) -> float:
    rows = parts.embedding(probe.input_ids)
    names = ("embedding_multiplier", "scale_emb")
    # AFMoE has a switch instead of a factor
    for multiplier in [*_present(parts.config, names), 1.0, rows.shape[-1] ** 0.5]:
        if _close(rows * multiplier, probe.first_input, rows.dtype):
            return multiplier
    added = probe.first_input - rows
    if _close(added[0], added[1], rows.dtype):
        # learned absolute positions: the same at a position whatever the token; the drafter has rotary ones instead
        return 1.0
    raise TargetError(
        f"{parts.config.model_type}: its first decoder layer does not receive scaled embedding rows: "
        "this family is not supported"
    )


def _output_multipliers(config: PretrainedConfig) -> list[float]:
    """Factors on the logits that the configuration may mean, the likeliest first."""
    # Granite divides by logits_scaling, HyperCLOVA X multiplies with a field of the same name
    divided = [1.0 / value for value in _present(config, ("logits_scaling",))]
    return [*divided, *_present(config, ("logits_scaling", "logit_scale", "lm_head_multiplier")), 1.0]


def _soft_caps(config: PretrainedConfig) -> list[float | None]:
    return [*_present(config, ("final_logit_softcapping", "logits_soft_cap")), None]


def _present(config: PretrainedConfig, names: tuple[str, ...]) -> list[float]:
    values = [setting_of(config, name) for name in names]
    return [float(value) for value in values if value]


def _close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Equal up to the rounding of `dtype`, relative to the largest entry."""
    tolerance = 1e-4 if dtype in (torch.float32, torch.float64) else 3e-2
    difference = (found.double() - wanted.double()).abs().max()
    return bool(difference <= tolerance * wanted.double().abs().max())

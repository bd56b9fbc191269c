"""What is right, computed without the code under examination: slowly, in float64, one conversation at a time.

Nothing here uses hooks, packing, batching, masks or chunks, or imports what it judges. The target is run as its users
run it, and watched by wrapping its modules' `forward`; blocks, labels, weights and losses follow the definitions in
nested loops. Source of the definitions: `docs/concepts/semantics.md`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class HasModel(Protocol):
    """Whatever holds a target as transformers made it."""

    @property
    def model(self) -> PreTrainedModel: ...


class HasRoles(HasModel, Protocol):
    """Whatever holds the places that may give a token a role."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def config(self) -> Any: ...


class HasMask(Protocol):
    """A conversation: [S] bool, true on tokens that the assistant wrote."""

    @property
    def loss_mask(self) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class ReferenceForward:
    """One conversation through the target alone.

    Attributes:
        layers: [S, D] output of each decoder layer, in the order in which they ran; the last is not normed yet.
        first_input: [S, D] what the first decoder layer received.
        normed: [S, D] what the output head received.
        logits: [S, V] what `ForCausalLM.forward` returned.
    """

    layers: list[Tensor]
    first_input: Tensor
    normed: Tensor
    logits: Tensor

    @property
    def next_ids(self) -> Tensor:
        """[S] the target's own greedy next token."""
        return self.logits.argmax(-1)

    @property
    def gaps(self) -> Tensor:
        """[S] float64, distance of the two best logits: where it is within rounding, either may be said."""
        best, second = self.logits.double().topk(2, dim=-1).values.unbind(-1)
        return best - second

    @property
    def rounding(self) -> Tensor:
        """[S] float64, what batches, caches and kernels may move the distance of two logits by.

        Measured with nine families in bfloat16, prompts read at once, in parts and token by token: up to 7.8 times the
        last bit of the largest logit. In float32 sums of the length of a vocabulary count more.
        """
        relative = max(1e-4, 8 * torch.finfo(self.logits.dtype).eps / 2)
        return relative * self.logits.double().abs().amax(-1)

    @property
    def ties(self) -> Tensor:
        """[S] bool, where the two best logits are so near that either token may be said."""
        return self.gaps <= self.rounding

    def best_of(self, kept_ids: Tensor) -> Tensor:
        """[S] the best token by the target's logits among some, [Vd] increasing ids."""
        kept_ids = kept_ids.to(self.logits.device)
        return kept_ids[self.logits[:, kept_ids].argmax(-1)]

    def states(self, layer_ids: Sequence[int]) -> Tensor:
        """[S, L*D] outputs of some layers side by side, by their number from 0."""
        return torch.cat([self.layers[index] for index in layer_ids], dim=-1)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of the text model, found as transformers names them: its decoder's list of `num_hidden_layers`.

    Some families (Llama 4) name the whole model as its own decoder: the list is then further down.
    """
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    children = (child for module in model.get_decoder().modules() for child in module.children())
    return list(next(child for child in children if isinstance(child, nn.ModuleList) and len(child) == depth))


@torch.no_grad()
def model_forward(model: PreTrainedModel, input_ids: Tensor) -> ReferenceForward:
    """Run one conversation, [S] ids, without padding, cache and company."""
    seen: list[tuple[Tensor, Tensor]] = []
    seen_by_head: list[tuple[Tensor, Tensor]] = []
    with _watched(decoder_layers(model), seen), _watched([model.get_output_embeddings()], seen_by_head):
        logits = model(input_ids=input_ids[None].to(model.device), use_cache=False).logits
    return ReferenceForward(
        layers=[output[0] for _, output in seen],
        first_input=seen[0][0][0],
        normed=seen_by_head[-1][0][0],
        logits=logits[0],
    )


def target_forward(target: HasModel, input_ids: Tensor) -> ReferenceForward:
    """The same for a target that is held by a record."""
    return model_forward(target.model, input_ids)


@contextmanager
def _watched(modules: list[nn.Module], seen: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Note first input and first output of every call, by standing in for each module's `forward`."""
    originals = [(module, module.__dict__.get("forward")) for module in modules]

    def watch(module: nn.Module) -> None:
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = inner(*args, **kwargs)
            given = args[0] if args else kwargs["hidden_states"]
            seen.append((given.detach().clone(), (output[0] if isinstance(output, tuple) else output).detach().clone()))
            return output

        module.forward = forward

    for module in modules:
        watch(module)
    try:
        yield
    finally:
        for module, original in originals:
            if original is None:
                del module.__dict__["forward"]
            else:
                module.forward = original


_CLEAR = 0.1
"""Distance of the best logit from all others, relative to the largest, that no rounding bridges."""


@torch.no_grad()
def clear_states(
    model: PreTrainedModel, normed_nD: Tensor, ids_n: Sequence[int], kept_ids: Tensor, most: float
) -> Tensor:
    """States near the given ones in which the output matrix clearly prefers the given tokens, [n, D] float32.

    Each is moved towards the row of its token and away from the best other one until the distance is clear, or a token
    turns out to be never far from another.

    Args:
        kept_ids: [Vd] increasing ids of the rows that count; each of `ids_n` is one of them.
        most: size of logits beyond which the model caps them.
    """
    head: Any = model.get_output_embeddings()
    weight, bias = head.weight[kept_ids.to(head.weight.device)], head.bias if hasattr(head, "bias") else None
    bias = None if bias is None else bias[kept_ids.to(weight.device)]
    wanted = torch.searchsorted(kept_ids, torch.tensor(ids_n)).to(weight.device)[:, None]
    states = normed_nD.to(weight.device).float().clone()
    for _ in range(_MOST_MOVES):
        logits = nn.functional.linear(states.to(weight.dtype), weight, bias).float()
        others = logits.scatter(1, wanted, -math.inf).max(-1)
        missing = _CLEAR * logits.abs().amax(-1) - (logits.gather(1, wanted)[:, 0] - others.values)
        if not (missing > 0).any():
            break
        towards = weight[wanted[:, 0]].float() - weight[others.indices].float()
        states += (1.1 * missing.clamp_min(0.0) / towards.square().sum(-1).clamp_min(1e-30))[:, None] * towards
    return states * (most / logits.abs().amax(-1, keepdim=True)).clamp(max=1.0)


_MOST_MOVES = 40
"""Corrections of a state; a handful suffices where there are more features than tokens close to each other."""


def role_ids(target: HasRoles, role: str) -> set[int]:
    """Ids that the tokenizer or a configuration names as `pad`, `eos` or `bos`."""
    name = f"{role}_token_id"
    holders = (target.tokenizer, target.config, target.model.config, target.model.generation_config)
    values = [getattr(holder, name) for holder in holders if hasattr(holder, name)]
    listed = [value if isinstance(value, list) else [value] for value in values]
    return {int(token) for tokens in listed for token in tokens if token is not None}


def naive_anchors(samples: Sequence[HasMask]) -> list[int]:
    """Row positions where a block may start, for samples packed one after another."""
    anchors, start = [], 0
    for sample in samples:
        mask = sample.loss_mask.tolist()
        anchors += [start + t for t in range(len(mask) - 1) if mask[t] and mask[t + 1]]
        start += len(mask)
    return anchors


def naive_slots(
    samples: Sequence[HasMask], anchors: Sequence[int], block_size: int, first: int
) -> list[tuple[int, int, int]]:
    """Supervised slots as (index of the anchor, slot, row position predicted).

    Args:
        first: 1 if the anchor's slot predicts nothing, 0 if every slot predicts the token after its own.
    """
    mask = [bool(m) for sample in samples for m in sample.loss_mask.tolist()]
    owner = [i for i, sample in enumerate(samples) for _ in sample.loss_mask]
    slots = []
    for index, anchor in enumerate(anchors):
        for slot in range(first, block_size):
            position = anchor + slot + (1 - first)
            if position >= len(mask) or owner[position] != owner[anchor] or not mask[position]:
                break
            slots.append((index, slot, position))
    return slots


@dataclass(frozen=True)
class BlockPlace:
    """Where one block of a row sits: its number, and row positions of its anchor and its document's first token."""

    index: int
    anchor: int
    start: int


def visible(query: int, key: int, key_block: int | None, place: BlockPlace, causal: bool, window: int | None) -> bool:
    """Whether a slot sees a key. The one place that says so in words of positions.

    Args:
        query: slot of the query in its block, which sits at `place`.
        key: row position of a context key, or slot of a block's key if `key_block` is the index of that block.
    """
    if key_block is None:
        in_window = window is None or place.anchor + query - key < window
        return place.start <= key < place.anchor and in_window
    if key_block != place.index or (causal and key > query):
        return False
    return window is None or query - key < window


def naive_weights(block_size: int, gamma: float, first: int) -> list[float]:
    """exp(-(k - first) / gamma) for each slot; 0 before the first that predicts."""
    return [0.0 if k < first else math.exp(-(k - first) / gamma) for k in range(block_size)]


def naive_dpace(blocks: Sequence[int], confidences: Sequence[float], alpha: float) -> Tensor:
    """D-PACE weights (arXiv 2605.18810), [n] float64, by its formula.

    Args:
        blocks, confidences: of each supervised slot, block after block: which one, and how sure the drafter is of the
            label.
    """
    weights = []
    for slot, block in enumerate(blocks):
        weight, product = 0.0, 1.0
        for other in (i for i, same in enumerate(blocks) if same == block):
            product *= (1 - alpha) * confidences[other] + alpha
            weight += product if other >= slot else 0.0
        weights.append(weight)
    return torch.tensor(weights, dtype=torch.float64)


def best_alone(probabilities_nV: Tensor, top_k: int | None) -> tuple[Tensor, Tensor]:
    """A distribution of its K best tokens, and those as good as the last, scaled to sum 1; and [n] what is lost.

    None: as it is.
    """
    if top_k is None or top_k >= probabilities_nV.shape[1]:
        return probabilities_nV, torch.zeros(len(probabilities_nV), dtype=probabilities_nV.dtype)
    least = probabilities_nV.sort(dim=-1, descending=True).values[:, top_k - 1 : top_k]
    kept = torch.where(probabilities_nV >= least, probabilities_nV, 0.0)
    return kept / kept.sum(-1, keepdim=True), 1.0 - kept.sum(-1)


def naive_distances(
    logits_nV: Tensor, labels_n: Tensor, teacher_nV: Tensor | None, shares: tuple[float, float, float]
) -> tuple[Tensor, Tensor]:
    """Mixture of the distances of what is said from what is taught, [n], and the cross entropy with the labels alone.

    Args:
        teacher_nV: probabilities of the target; None where labels alone are taught.
        shares: of cross entropy, of KL(target || drafter), and of the total variation.
    """
    logs_nV = logits_nV.log_softmax(-1)
    nats_n = -logs_nV.gather(1, labels_n[:, None])[:, 0]
    ce, kl, tv = shares
    distance_n = ce * nats_n
    if teacher_nV is not None:
        relative_n = (torch.special.xlogy(teacher_nV, teacher_nV) - teacher_nV * logs_nV).sum(-1)
        variation_n = (logs_nV.exp() - teacher_nV).abs().sum(-1) / 2
        distance_n = distance_n + kl * relative_n + tv * variation_n
    return distance_n, nats_n

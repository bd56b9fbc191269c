"""Tokens from logits: the most likely one, or one drawn from the filtered distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from draftline.options import Sampling


def probabilities(sampling: Sampling, logits: Tensor) -> Tensor:
    """Filtered distribution over the last dimension, [..., V] float64: residuals p - q are small differences."""
    if sampling.greedy:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    scores = logits.double() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        # tokens that tie with the last one kept stay too, as in transformers: in 16 bits such ties are frequent
        least = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    likely = scores.softmax(-1)
    if sampling.top_p < 1.0:
        ranked, order = likely.sort(dim=-1, descending=True)
        ranked[ranked.cumsum(-1) - ranked >= sampling.top_p] = 0.0
        likely = torch.zeros_like(likely).scatter(-1, order, ranked)
        likely = likely / likely.sum(-1, keepdim=True)
    return likely


def choose(sampling: Sampling, logits_nV: Tensor, generator: torch.Generator | None) -> Tensor:
    """One token per row, [n] int64."""
    if sampling.greedy:
        return logits_nV.argmax(-1)
    return draw(probabilities(sampling, logits_nV), generator)


def draw(probabilities_nV: Tensor, generator: torch.Generator | None) -> Tensor:
    """One token per row of a table of distributions, [n] int64."""
    return torch.multinomial(probabilities_nV, 1, generator=generator)[:, 0]

"""How a token is chosen from logits, and how many drafted tokens the target lets stand.

Both halves of speculative decoding use one `Sampling`: the drafter proposes from its own filtered distribution q, the
target decides with its filtered distribution p. Rejection sampling (Leviathan et al., arXiv 2211.17192; Chen et al.,
arXiv 2302.01318) then gives tokens distributed exactly as p, whatever q is:

    accept x ~ q with probability min(1, p(x) / q(x)); on the first rejection draw from max(p - q, 0), normalised.

At temperature 0 both distributions are single points and the rule becomes: accept while the drafted token is the
target's argmax, then take the argmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """Temperature first, then top-k, then top-p over what is left, as transformers' generation does.

    Attributes:
        temperature: 0 is greedy.
        top_p: smallest set of most likely tokens whose probability reaches this; 1 keeps all.
        top_k: this many most likely tokens; 0 keeps all.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature {self.temperature} is not a temperature: give 0 (greedy) or a positive number"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p {self.top_p} is not a probability: give a number above 0, at most 1 (keeps all)")
        if self.top_k < 0:
            raise ConfigError(f"top_k {self.top_k} is negative: give 0 (keeps all) or a number of tokens")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    def describe(self) -> str:
        """In words, without what has no effect."""
        if self.greedy:
            return "greedy"
        top_k = f", top-k {self.top_k}" if self.top_k else ""
        return f"temperature {self.temperature:g}" + (f", top-p {self.top_p:g}" if self.top_p < 1 else "") + top_k

    def probabilities(self, logits: Tensor) -> Tensor:
        """Filtered distribution over the last dimension, [..., V] float64: residuals p - q are small differences."""
        if self.greedy:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        scores = logits.double() / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            best = scores.topk(self.top_k, dim=-1)
            scores = torch.full_like(scores, float("-inf")).scatter(-1, best.indices, best.values)
        probabilities = scores.softmax(-1)
        if self.top_p < 1.0:
            ranked, order = probabilities.sort(dim=-1, descending=True)
            ranked[ranked.cumsum(-1) - ranked >= self.top_p] = 0.0
            probabilities = torch.zeros_like(probabilities).scatter(-1, order, ranked)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities

    def choose(self, logits_nV: Tensor, generator: torch.Generator | None) -> Tensor:
        """One token per row, [n] int64."""
        if self.greedy:
            return logits_nV.argmax(-1)
        return draw(self.probabilities(logits_nV), generator)


GREEDY = Sampling()


def draw(probabilities_nV: Tensor, generator: torch.Generator | None) -> Tensor:
    """One token per row of a table of distributions, [n] int64."""
    return torch.multinomial(probabilities_nV, 1, generator=generator)[:, 0]


def verify_greedy(drafted_K: Tensor, target_logits_MV: Tensor) -> tuple[int, int]:
    """The longest prefix that the target would have written itself, and its own next token; M = K + 1."""
    chosen_M = target_logits_MV.argmax(-1)
    accepted = int((drafted_K == chosen_M[:-1]).cumprod(0).sum())
    return accepted, int(chosen_M[accepted])


def verify_sampled(
    drafted_K: Tensor,
    draft_probabilities_KV: Tensor,
    target_probabilities_MV: Tensor,
    generator: torch.Generator | None,
) -> tuple[int, int]:
    """Rejection sampling over one block.

    Args:
        drafted_K: tokens, each drawn from its row of `draft_probabilities_KV`.
        draft_probabilities_KV: the filtered distributions of the drafter.
        target_probabilities_MV: those of the target at the anchor and after each drafted token, M = K + 1 rows.

    Returns:
        Number of accepted tokens, and the token that follows them.
    """
    rows = torch.arange(len(drafted_K), device=drafted_K.device)
    p_K = target_probabilities_MV[rows, drafted_K]
    q_K = draft_probabilities_KV[rows, drafted_K]
    uniform_K = torch.rand(len(drafted_K), generator=generator, device=drafted_K.device, dtype=torch.float64)
    accepted = int((uniform_K * q_K < p_K).long().cumprod(0).sum())
    next_V = target_probabilities_MV[accepted]
    if accepted < len(drafted_K):
        residual_V = (next_V - draft_probabilities_KV[accepted]).clamp_min(0.0)
        # A rejection with p = q has probability zero; rounding can still bring it about, and then p is the answer.
        next_V = residual_V if residual_V.sum() > 0 else next_V
    return accepted, int(draw(next_V[None], generator)[0])

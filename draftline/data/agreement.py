"""How much of the given answers the target would have written itself.

A drafter learns to predict the target. Where the answers come from somebody else, it is shown contexts that the target
never produces, and its accuracy on them says little about serving. The share of answer tokens that are the target's own
greedy choice tells the two apart: near 1 for its own greedy answers, clearly lower for anybody else's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from draftline.records import Sample

OWN_ANSWERS_AGREEMENT = 0.95
"""Above this share the answers are taken for the target's own; ties and re-tokenised texts explain the rest."""


@dataclass(frozen=True)
class Agreement:
    """Supervised tokens looked at, and how many of them are the target's greedy choice."""

    tokens: int
    agreeing: int

    @property
    def share(self) -> float:
        """Agreeing share; NaN without tokens."""
        return self.agreeing / self.tokens if self.tokens else float("nan")

    @property
    def advice(self) -> str:
        """One line on what to do."""
        if not self.tokens:
            return "no supervised token to compare with the target"
        percent = f"{self.share:.1%} of {self.tokens} answer tokens are the target's own greedy choice"
        if self.share >= OWN_ANSWERS_AGREEMENT:
            return f"{percent}: the answers are its own, train on them as they are"
        return (
            f"{percent}: the answers are not its own; add --regenerate, so that the drafter learns what it will serve"
        )


@torch.no_grad()
def measure_agreement(model: PreTrainedModel, samples: Sequence[Sample]) -> Agreement:
    """Compare the supervised tokens of some samples with the target's argmax; one forward a sample."""
    tokens = agreeing = 0
    for sample in samples:
        supervised_S = sample.loss_mask[1:].to(model.device)
        ids_1S = sample.input_ids[None].to(model.device)
        greedy_S = model(input_ids=ids_1S, use_cache=False).logits[0, :-1].argmax(-1)
        tokens += int(supervised_S.sum())
        agreeing += int((supervised_S & (greedy_S == ids_1S[0, 1:])).sum())
    return Agreement(tokens, agreeing)

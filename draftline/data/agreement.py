"""How much of the given answers the target would have written itself.

A drafter learns to predict the target. Where the answers come from somebody else, it is shown contexts that the target
never produces, and its accuracy on them says little about serving. The share of answer tokens that are the target's own
greedy choice tells the two apart: near 1 for its own greedy answers, clearly lower for anybody else's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftline.data.checks import check_answers, settle_roles
from draftline.data.pipeline import PrepareOptions
from draftline.data.readers import STDIN, read_rows, resolve_sources
from draftline.data.render import RenderedConversation, render_conversation
from draftline.data.rows import Chat
from draftline.data.shapes import parse_row
from draftline.data.template import ChatTemplate
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
        return f"{percent}: the answers are not its own; only --regenerate teaches the drafter what will be served"


def given_samples(
    tokenizer: PreTrainedTokenizerBase, data: Sequence[str], options: PrepareOptions, count: int
) -> list[Sample]:
    """The first `count` conversations of the data that have answers, with the answers as they are.

    Standard input is left alone, because it can be read only once.
    """
    template = ChatTemplate(tokenizer, options.template_options)
    samples: list[Sample] = []
    for raw in read_rows([source for source in resolve_sources(data) if source != STDIN], options.split):
        if len(samples) == count:
            break
        parsed = parse_row(raw.value, strip_images=options.strip_images)
        parsed = settle_roles(template, parsed) if isinstance(parsed, Chat) else parsed
        parsed = check_answers(parsed, answered_later=False) if isinstance(parsed, Chat) else parsed
        if not isinstance(parsed, Chat):
            continue
        rendered = render_conversation(template, parsed.conversation, options.mask)
        if isinstance(rendered, RenderedConversation):
            ids, mask = rendered.input_ids[: options.max_length], rendered.loss_mask[: options.max_length]
            samples.append(Sample(len(samples), torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(mask)))
    return samples


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

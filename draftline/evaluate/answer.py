"""One prompt, one answer: what `draftline generate` does."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from draftline.data.conversations import Conversation, Message
from draftline.data.template import render_prompt
from draftline.draft.model import DFlashDraftModel
from draftline.errors import DataError
from draftline.evaluate.generate import generate
from draftline.evaluate.sampling import Sampling
from draftline.targets.model import Target, stop_token_ids


@dataclass(frozen=True)
class PromptAnswer:
    """A decoded answer.

    Attributes:
        text: without special tokens.
        output_ids: with the stop token, if the answer ended by itself.
        target_forwards: after the prompt's own.
        accepted_per_forward: drafted tokens that stood, per forward.
    """

    text: str
    output_ids: list[int]
    target_forwards: int
    accepted_per_forward: list[int]

    def counts(self) -> str:
        """One line for people."""
        accepted = sum(self.accepted_per_forward)
        return f"{len(self.output_ids)} tokens, {self.target_forwards} target forwards, {accepted} drafted tokens kept"

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return asdict(self)


def answer_prompt(
    target: Target,
    draft_model: DFlashDraftModel,
    text: str,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
) -> PromptAnswer:
    """Answer what a user says, through the target's chat template.

    Raises:
        DataError: the prompt is empty or too long.
        TemplateError: the target has no chat template.
    """
    if not text.strip():
        raise DataError("the prompt is empty: give a text with --prompt")
    target.require_chat_template()
    tokenizer = target.require_tokenizer()
    ids = render_prompt(tokenizer, Conversation(messages=(Message(role="user", content=text),)), {})
    generation = generate(
        target,
        draft_model,
        torch.tensor([ids], device=target.device),
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids(target.model, tokenizer),
        sampling=sampling,
        generator=torch.Generator(target.device).manual_seed(seed),
    )
    return PromptAnswer(
        text=str(tokenizer.decode(generation.output_ids, skip_special_tokens=True)),
        output_ids=generation.output_ids,
        target_forwards=generation.target_forwards,
        accepted_per_forward=generation.accepted_per_forward,
    )

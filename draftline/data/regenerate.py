"""The target answers the prompts itself, in process.

A drafter is trained to predict what the target would say, so the answers in the data should be the target's own. They
are generated greedily in batches of similar length, padded on the left; a row leaves the batch as soon as it ends, is
stored at once, and no longer costs anything. Each turn of a conversation is answered given the answers before it,
never given the history that the file had.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftline.data.answers import Answer, AnswerStore, answer_key
from draftline.data.conversations import Conversation
from draftline.data.dialogue import Dialogue
from draftline.data.parse_answer import parse_answer
from draftline.data.rows import Unusable
from draftline.data.template import TEMPLATE_FAULTS, Refused
from draftline.errors import TemplateError

Progress = Callable[[int, int], None]
"""Called with answered turns and all turns."""


@dataclass(frozen=True)
class GenerationSettings:
    """How the target answers; greedy always.

    Attributes:
        max_new_tokens: longest answer, tokens; an answer that reaches it is kept as cut (`finish_reason: length`).
        batch_size: answers in flight; determines speed and memory only.
        template_options: keyword arguments of the chat template for all rows; a row's own come on top.
    """

    max_new_tokens: int = 1024
    batch_size: int = 16
    template_options: dict[str, Any] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """The part that can change an answer. Template options act through the prompt ids."""
        return {"max_new_tokens": self.max_new_tokens, "temperature": 0}


@dataclass(frozen=True)
class TargetAnswers:
    """Answers conversations with a live target; what `prepare` takes as its answerer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    store: AnswerStore
    settings: GenerationSettings
    progress: Progress | None = None

    def __call__(self, conversations: Sequence[Conversation]) -> list[Conversation | Unusable]:
        """The conversations with the target's own answers, in the order given."""
        return generate_answers(
            self.model, self.tokenizer, conversations, self.store, self.settings, progress=self.progress
        )

    def identity(self) -> dict[str, Any]:
        """What determines the answers."""
        return {
            **self.settings.identity(),
            "template_options": self.settings.template_options,
            "target": weights_fingerprint(self.model),
        }


def generate_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    store: AnswerStore,
    settings: GenerationSettings,
    progress: Progress | None = None,
) -> list[Conversation | Unusable]:
    """Answer every conversation with `model`, and return them in the order given.

    One that the template refuses, or that fills the target's context, is `Unusable` with its reason. Answers that the
    store has are taken from it. Costs one prefill and at most `max_new_tokens` forwards a batch.
    """
    fingerprint = weights_fingerprint(model)
    stop_ids = stop_token_ids(model, tokenizer)
    dialogues = [Dialogue(conversation) for conversation in conversations]
    total = sum(dialogue.remaining for dialogue in dialogues)

    def report() -> None:
        if progress is not None:
            progress(total - sum(dialogue.remaining for dialogue in dialogues), total)

    while any(not dialogue.done for dialogue in dialogues):
        waiting: list[tuple[list[int], str, Dialogue]] = []
        for dialogue in dialogues:
            if dialogue.done:
                continue
            try:
                prompt_ids = _render_prompt(tokenizer, dialogue.prompt(), settings.template_options)
            except Refused as refused:
                dialogue.drop(f"template_refused: {refused}")
                continue
            if len(prompt_ids) >= context_limit(model):
                dialogue.drop("prompt_fills_context")
                continue
            key = answer_key(prompt_ids, settings.identity(), fingerprint)
            known = store.get(key)
            if known is None:
                waiting.append((prompt_ids, key, dialogue))
            else:
                dialogue.add(known)
        report()
        waiting.sort(key=lambda item: len(item[0]))
        for start in range(0, len(waiting), settings.batch_size):
            batch = waiting[start : start + settings.batch_size]
            prompts = [prompt_ids for prompt_ids, _, _ in batch]
            for row, output_ids in generate_batch(model, prompts, stop_ids, settings.max_new_tokens):
                _, key, dialogue = batch[row]
                with_tools = bool(dialogue.prompt().tools)
                answer = make_answer(tokenizer, key, output_ids, stop_ids, with_tools=with_tools)
                store.add(answer)
                dialogue.add(answer)
                report()
    return [dialogue.result() for dialogue in dialogues]


@torch.no_grad()
def generate_batch(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], stop_ids: frozenset[int], max_new_tokens: int
) -> Iterator[tuple[int, list[int]]]:
    """Greedy answers of one batch, each yielded as `(row, output ids with the stop token)` when it ends.

    The prompts are padded on the left, so that all rows write their next token into the same column; positions are
    counted from each row's first real token. Rows that ended are taken out of the cache. An answer ends where the
    target's context does.
    """
    budgets = [min(max_new_tokens, context_limit(model) - len(prompt)) for prompt in prompts]
    longest = max(len(prompt) for prompt in prompts)
    # The value of a padding id does not matter: it is masked everywhere.
    ids_BS = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=model.device)
    mask_BS = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    positions_BS = (mask_BS.cumsum(-1) - 1).clamp(min=0)
    rows = list(range(len(prompts)))
    outputs: list[list[int]] = [[] for _ in prompts]
    # transformers renamed the argument, and the field of the result, within the range of supported versions.
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache: Any = None
    for _ in range(max(budgets)):
        step = model(
            input_ids=ids_BS,
            attention_mask=mask_BS,
            position_ids=positions_BS,
            use_cache=True,
            logits_to_keep=1,
            **{cache_name: cache},
        )
        cache = step[cache_name]
        next_B = step.logits[:, -1].argmax(-1)
        going = []
        for place, (row, token) in enumerate(zip(rows, next_B.tolist(), strict=True)):
            outputs[row].append(token)
            if token in stop_ids or len(outputs[row]) == budgets[row]:
                yield row, outputs[row]
            else:
                going.append(place)
        if not going:
            return
        if len(going) < len(rows):
            keep = torch.tensor(going, device=model.device)
            cache.batch_select_indices(keep)
            rows = [rows[place] for place in going]
            next_B, mask_BS, positions_BS = next_B[keep], mask_BS[keep], positions_BS[keep]
        ids_BS = next_B[:, None]
        mask_BS = torch.cat([mask_BS, torch.ones_like(ids_BS)], dim=1)
        positions_BS = positions_BS[:, -1:] + 1


def make_answer(
    tokenizer: PreTrainedTokenizerBase,
    key: str,
    output_ids: Sequence[int],
    stop_ids: frozenset[int],
    *,
    with_tools: bool,
) -> Answer:
    """Turn generated ids into an answer: the stop token taken off, reasoning and tool calls in their own fields."""
    stopped = output_ids[-1] in stop_ids
    written = list(output_ids[:-1] if stopped else output_ids)
    text = str(tokenizer.decode(written, clean_up_tokenization_spaces=False))
    content, reasoning, calls = parse_answer(text, with_tools=with_tools and stopped)
    return Answer(
        key=key,
        content=content,
        reasoning_content=reasoning,
        tool_calls=calls,
        finish_reason=("tool_calls" if calls else "stop") if stopped else "length",
        output_ids=tuple(output_ids),
    )


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, template_options: dict[str, Any]
) -> list[int]:
    """Token ids of the conversation with the opening of an answer after it.

    Raises:
        TemplateError: the chat template takes no such conversation.
    """
    try:
        return _render_prompt(tokenizer, conversation, template_options)
    except Refused as refused:
        roles = ", ".join(message.role for message in conversation.messages)
        raise TemplateError(
            f"the target's chat template refuses the roles {roles} ({refused}): change the conversation"
        ) from refused


def _render_prompt(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, template_options: dict[str, Any]
) -> list[int]:
    try:
        rendered: Any = tokenizer.apply_chat_template(
            conversation.for_template(),
            tools=list(conversation.tools) or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **{**template_options, **conversation.template_options},
        )
    except TEMPLATE_FAULTS as error:
        raise Refused(" ".join(str(error).split()) or type(error).__name__) from error
    return list(rendered["input_ids"])


def context_limit(model: PreTrainedModel) -> int:
    """Most tokens that a prompt and its answer may have together."""
    return int(model.config.get_text_config().max_position_embeddings)


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends an answer, by the model's generation settings and by the tokenizer."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = set(configured) if isinstance(configured, list) else {configured}
    ids.add(tokenizer.eos_token_id)
    return frozenset(token_id for token_id in ids if token_id is not None)


def weights_fingerprint(model: torch.nn.Module) -> str:
    """Identity of the weights from 64 evenly spaced values of each parameter; milliseconds, even for large models."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        digest.update(_spread_values(parameter.detach()).numpy().tobytes())
    return digest.hexdigest()


def _spread_values(parameter: Tensor) -> Tensor:
    flat = parameter.flatten()
    return flat[:: max(1, flat.numel() // 64)][:64].cpu().float()

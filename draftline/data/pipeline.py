"""From rows to samples: tell the shape, let the target answer, render, cut, count, write; chunk by chunk."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

from transformers import PreTrainedTokenizerBase

from draftline.data.checks import check_answers, settle_roles, special_pattern
from draftline.data.conversations import Chat, Conversation, FormattedText, ParsedRow, TokenRow, Unusable, hash_json
from draftline.data.heldout import HeldoutPrompts
from draftline.data.readers import RawRow, read_rows, total_bytes
from draftline.data.render import MaskOptions, RenderedConversation, check_tokens, render_conversations, render_text
from draftline.data.report import Accounting
from draftline.data.shapes import parse_row
from draftline.data.template import ChatTemplate
from draftline.data.writer import SEEN_ANSWERS, SEEN_ROWS, DatasetWriter

_CHUNK_ROWS = 512
_SECONDS_BETWEEN_CHECKPOINTS = 5.0
_QUOTING_REASONS = 20
"""Distinct messages of a template, a server, or role names that are counted apart; further ones together."""

Progress = Callable[[int, int | None, int, int], None]
"""Called with bytes read, all bytes (None if unknown), rows read and tokens written."""


class Answerer(Protocol):
    """Lets the target answer conversations."""

    def __call__(self, conversations: Sequence[Conversation]) -> Sequence[Conversation | Unusable]:
        """The conversations with the target's own answers, in the order given, or why one cannot be answered."""

    def identity(self) -> dict[str, Any]:
        """What determines the answers, for the key of the prepared data."""


@dataclass(frozen=True)
class PrepareOptions:
    """How data is prepared.

    Attributes:
        max_length: longest sample, tokens; longer ones are cut.
        truncation: the side on which they are cut.
        mask: what is supervised.
        template_options: keyword arguments of the chat template.
        strip_images: take images and other media out of messages instead of dropping the row.
        deduplicate: drop rows that are equal to an earlier one.
        heldout: number of prompts whose rows go to `OUT/heldout` instead of training.
        min_supervised: fewest supervised tokens of a sample.
        split: split of Hugging Face data sets; None: train.
        strict: fail if any row is dropped.
        max_unreadable: largest share of rows that may be unreadable.
    """

    max_length: int = 3072
    truncation: Literal["right", "left"] = "right"
    mask: MaskOptions = field(default_factory=MaskOptions)
    template_options: dict[str, Any] = field(default_factory=dict)
    strip_images: bool = False
    deduplicate: bool = True
    heldout: int = 0
    min_supervised: int = 1
    split: str | None = None
    strict: bool = False
    max_unreadable: float = 0.01


@dataclass(frozen=True)
class _Item:
    """A row with what it has become so far."""

    raw: RawRow
    parsed: ParsedRow


class Preparation:
    """One run over the data; goes on from the writer's state if it has one."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: PrepareOptions,
        answerer: Answerer | None,
        writer: DatasetWriter,
    ) -> None:
        self.options, self._answerer, self._writer = options, answerer, writer
        self.template = ChatTemplate(tokenizer, options.template_options)
        state = writer.state or {}
        self.accounting = Accounting.from_state(state["accounting"]) if state else Accounting()
        self.heldout = HeldoutPrompts(options.heldout, state.get("heldout"))
        self._sources: list[str] = state.get("sources", [])
        self._max_id: int = state.get("max_id", -1)
        self._seen_rows, self._seen_answers = writer.seen(SEEN_ROWS), writer.seen(SEEN_ANSWERS)
        self._special = special_pattern(tokenizer)
        self.saved_rows = self.accounting.rows_in
        self.first_refusal = ""

    def run(self, sources: Sequence[str | Path], progress: Progress | None) -> None:
        """Go through all rows that the state does not have yet."""
        rows = islice(read_rows(sources, self.options.split), self.saved_rows, None)
        size = total_bytes(sources)
        saved = time.monotonic()
        while chunk := list(islice(rows, _CHUNK_ROWS)):
            self._take(chunk)
            self.accounting.check()
            if time.monotonic() - saved > _SECONDS_BETWEEN_CHECKPOINTS:
                self._save()
                saved = time.monotonic()
            if progress is not None:
                progress(chunk[-1].bytes_read, size, self.accounting.rows_in, self.accounting.tokens)
        self._save()

    def _save(self) -> None:
        state = {
            "accounting": self.accounting.as_state(),
            "heldout": self.heldout.as_state(),
            "sources": self._sources,
            "max_id": self._max_id,
        }
        self._writer.checkpoint(state)
        self.saved_rows = self.accounting.rows_in

    def _take(self, chunk: Sequence[RawRow]) -> None:
        items = self._answer([self._parse(raw) for raw in chunk])
        chats = [item.parsed.conversation for item in items if isinstance(item.parsed, Chat)]
        rendered = iter(render_conversations(self.template, chats, self.options.mask))
        for item in items:
            self.accounting.rows_in += 1
            result = self._render(item.parsed, rendered)
            if isinstance(result, RenderedConversation):
                result = self._cut(result)
            if isinstance(result, Unusable):
                self.accounting.dropped.add(self._bounded(result.reason), item.raw.line, item.raw.source)
            else:
                self._keep(item, result)

    def _parse(self, raw: RawRow) -> _Item:
        if raw.fault is not None:
            return _Item(raw, Unusable(raw.fault))
        try:
            content = json.dumps(raw.value, sort_keys=True, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            return _Item(raw, Unusable("lone_surrogate"))
        known = self._known(content, self._seen_rows, SEEN_ROWS)
        if known and self.options.deduplicate:
            return _Item(raw, Unusable("duplicate"))
        parsed = parse_row(raw.value, strip_images=self.options.strip_images)
        if isinstance(parsed, Chat) and not self.template.tokenizer.chat_template:
            parsed = Unusable("no_chat_template")
        if isinstance(parsed, Chat):
            parsed = settle_roles(self.template, parsed)
        if isinstance(parsed, Chat):
            parsed = check_answers(parsed, answered_later=self._answerer is not None)
        return _Item(raw, parsed)

    def _answer(self, items: list[_Item]) -> list[_Item]:
        """Let the target answer all conversations of a chunk."""
        if self._answerer is None:
            return items
        chats = [item for item in items if isinstance(item.parsed, Chat)]
        answered = iter(self._answerer([item.parsed.conversation for item in chats if isinstance(item.parsed, Chat)]))
        return [
            replace(item, parsed=self._check_answered(next(answered), item.parsed.notes))
            if isinstance(item.parsed, Chat)
            else item
            for item in items
        ]

    def _check_answered(self, answered: Conversation | Unusable, notes: tuple[str, ...]) -> Chat | Unusable:
        if isinstance(answered, Unusable):
            return answered
        return check_answers(Chat(answered, notes), answered_later=False)

    def _render(
        self, parsed: ParsedRow, rendered: Iterator[RenderedConversation | Unusable]
    ) -> RenderedConversation | Unusable:
        if isinstance(parsed, Unusable):
            return parsed
        if isinstance(parsed, TokenRow):
            return check_tokens(parsed, len(self.template.tokenizer), self.options.mask)
        if isinstance(parsed, FormattedText):
            return render_text(self.template, parsed, self.options.mask)
        result = next(rendered)
        if isinstance(result, RenderedConversation):
            return result
        self.first_refusal = self.first_refusal or result.detail
        return Unusable(result.reason)

    def _bounded(self, message: str) -> str:
        """A reason of the report; of those that quote something, only some of a kind are told apart."""
        reason = message[:160]
        kind, quotes, _ = reason.partition(":")
        known = self.accounting.dropped.reasons
        full = bool(quotes) and sum(name.startswith(f"{kind}:") for name in known) >= _QUOTING_REASONS
        return kind if full and reason not in known else reason

    def _cut(self, result: RenderedConversation) -> RenderedConversation | Unusable:
        """Cut to `max_length`; the supervised tokens are counted after that."""
        limit = self.options.max_length
        if not result.loss_mask.any():
            return Unusable("nothing_supervised")
        if len(result.input_ids) > limit:
            part = slice(0, limit) if self.options.truncation == "right" else slice(-limit, None)
            result = replace(
                result,
                input_ids=result.input_ids[part],
                loss_mask=result.loss_mask[part],
                notes=(*result.notes, "truncated"),
            )
            if not result.loss_mask.any():
                return Unusable("all_supervision_truncated")
        if result.loss_mask.sum() < self.options.min_supervised:
            return Unusable("too_few_supervised_tokens")
        return result

    def _keep(self, item: _Item, result: RenderedConversation) -> None:
        raw, conversation = item.raw, item.parsed.conversation if isinstance(item.parsed, Chat) else None
        notes = [*result.notes, *(item.parsed.notes if isinstance(item.parsed, Chat) else ())]
        if conversation is not None:
            notes += self._content_notes(conversation)
            prompt_hash = int(conversation.prompt_hash()[:16], 16)
            self.heldout.offer(prompt_hash, conversation)
        else:
            first = int(result.loss_mask.argmax())
            prompt_hash = int(hash_json(result.input_ids[:first].tolist())[:16], 16)
        for note in dict.fromkeys(notes):
            self.accounting.flagged.add(note, raw.line, raw.source)
        if not self._sources or self._sources[-1] != raw.source:
            self._sources.append(raw.source)
        self._max_id = max(self._max_id, int(result.input_ids.max()))
        self._writer.add(result.input_ids, result.loss_mask, len(self._sources) - 1, raw.line, prompt_hash)
        self.accounting.keep(len(result.input_ids), int(result.loss_mask.sum()), conversation)

    def _content_notes(self, conversation: Conversation) -> list[str]:
        notes = []
        for message in conversation.messages:
            if self._special is not None and self._special.search(message.content):
                notes.append("special_token_in_text")
            if message.role == "assistant" and message.finish_reason == "length":
                notes.append("answer_cut")
        answer = " ".join(message.content for message in conversation.messages if message.role == "assistant")
        if answer and self._known(answer.encode(), self._seen_answers, SEEN_ANSWERS):
            notes.append("repeated_answer")
        return notes

    def _known(self, content: bytes, seen: set[int], name: str) -> bool:
        """Whether this content occurred before; it is remembered by 8 bytes of its hash."""
        content_hash = int.from_bytes(hashlib.sha256(content).digest()[:8])
        if content_hash in seen:
            return True
        seen.add(content_hash)
        self._writer.add_seen(name, content_hash)
        return False

    def meta(self) -> dict[str, Any]:
        """What the samples were made with."""
        tokenizer = self.template.tokenizer
        return {
            "sources": self._sources,
            "max_id": self._max_id,
            "vocab_size": len(tokenizer),
            "template_hash": hash_json(tokenizer.chat_template),
            "template_options": self.options.template_options,
            "max_length": self.options.max_length,
            "supervise": self.options.mask.supervise,
        }

    def report(self) -> dict[str, Any]:
        """The accounting with the shares that people ask for."""
        counts = self.accounting.as_state()
        duplicates = counts["dropped"].get("duplicate", {"count": 0})["count"]
        return {
            **counts,
            "supervising": {"answers": "assistant answers", "last": "last assistant answer", "all": "all text"}[
                self.options.mask.supervise
            ],
            "supervised_share": counts["supervised_tokens"] / counts["tokens"],
            "duplicate_share": duplicates / counts["rows_in"],
            "heldout_prompts": len(self.heldout.hashes),
        }

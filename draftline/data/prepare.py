"""Prepares a data set: the call behind `draftline prepare`.

From rows to samples, chunk by chunk: tell the shape, let the target answer, render, cut, count, write. What is prepared
has a key that changes with everything that can change a token or a mask, so that the same call finds it done.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from draftline.data.accounting import Accounting, refuse_bad_data
from draftline.data.answers import answer_slots
from draftline.data.conversations import Chat, Conversation, FormattedText, ParsedRow, TokenRow, Unusable, hash_json
from draftline.data.dataset import (
    PARTIAL,
    SEEN_ANSWERS,
    SEEN_ROWS,
    TOKENIZER_KEY,
    TOKENS_FORM,
    DatasetWriter,
    PreparedDataset,
    discard_partial,
    is_own_folder,
)
from draftline.data.readers import STDIN, RawRow, is_dataset, read_rows, resolve_sources, total_bytes
from draftline.data.render import (
    RenderedConversation,
    check_tokens,
    render_conversation,
    render_conversations,
    render_text,
)
from draftline.data.shapes import parse_row
from draftline.data.split import HeldoutPrompts
from draftline.data.template import ChatTemplate, tokenizer_hash
from draftline.errors import DataError, Interrupted, StorageError, TemplateError
from draftline.options import GenerationSettings, PrepareOptions
from draftline.progress import OnReading
from draftline.records import Sample
from draftline.storage import storage_errors

_CHUNK_ROWS = 512
_CHUNK_BYTES = 1 << 24
"""Rows and bytes of the data that are in memory at the same time, at most; one row may have more bytes."""
_SECONDS_BETWEEN_CHECKPOINTS = 5.0
_QUOTING_REASONS = 20
"""Distinct messages of a template, a server, or role names that are counted apart; further ones together."""
_ROLES = ("system", "user", "assistant", "tool")


class Answerer(Protocol):
    """Lets the target answer conversations."""

    def __call__(self, conversations: Sequence[Conversation]) -> Sequence[Conversation | Unusable]:
        """The conversations with the target's own answers, in the order given, or why one cannot be answered."""

    @property
    def settings(self) -> GenerationSettings:
        """How they are made."""

    def identity(self) -> dict[str, Any]:
        """What determines the answers, for the key of the prepared data."""


def prepare(
    tokenizer: PreTrainedTokenizerBase,
    data: Sequence[str],
    out: Path,
    options: PrepareOptions,
    answerer: Answerer | None = None,
    progress: OnReading | None = None,
) -> dict[str, Any]:
    """Prepare `data` into the folder `out`, and return the report that is also written there.

    A folder that holds the result of the same call already is left as it is. An interrupted call goes on where it
    stopped when it is repeated. With an `answerer`, its answers replace those of the data.

    Raises:
        DataError: no row can be used, too many are unreadable, (`strict`) any is dropped, or `out` holds other data.
        StorageError: the disk is full or refuses; what was done is kept.
        Interrupted: Ctrl-C; what was done is kept.
    """
    sources = resolve_sources(data)
    if options.split is not None and not any(is_dataset(source) for source in sources):
        raise DataError(f"--split {options.split} is for Hugging Face data sets, and the data has none: leave it out")
    tokenizer_identity = tokenizer_hash(tokenizer)
    answers = {**answerer.identity(), "per_prompt": answerer.settings.answers_per_prompt} if answerer else None
    key = _dataset_key(tokenizer_identity, sources, options.model_dump(mode="json"), answers)
    done = _finished_report(out, key)
    if done is not None:
        discard_partial(out)
        return done
    try:
        with closing(DatasetWriter(out, key)) as writer:
            preparation = Preparation(tokenizer, options, answerer, writer)
            _go_through(preparation, sources, progress)
        report = preparation.report()
        with storage_errors(out / TOKENIZER_KEY):
            tokenizer.save_pretrained(out / TOKENIZER_KEY)
        meta = {"key": key, TOKENIZER_KEY: TOKENIZER_KEY, "tokenizer_hash": tokenizer_identity, **preparation.meta()}
        writer.complete(preparation.heldout, meta, report)
    except DataError:
        discard_partial(out)
        raise
    except StorageError as error:
        if not (out / PARTIAL).exists():
            raise
        raise StorageError(
            f"{error}; what is done is kept in {out / PARTIAL}, and the same command goes on from there"
        ) from error
    return report


def _go_through(preparation: Preparation, sources: Sequence[str | Path], progress: OnReading | None) -> None:
    """Run to the end of the data, and refuse data that is not fit to be trained on."""
    try:
        preparation.run(sources, progress)
    except KeyboardInterrupt as interrupt:
        raise Interrupted(
            f"stopped; {preparation.saved_rows} prepared rows and all finished answers are kept, "
            "and the same command goes on from there"
        ) from interrupt
    if preparation.accounting.rows_out == 0 and preparation.first_refusal:
        raise TemplateError(preparation.first_refusal)
    options = preparation.options
    refuse_bad_data(preparation.accounting, strict=options.strict, max_unreadable=options.max_unreadable)


def _finished_report(out: Path, key: str) -> dict[str, Any] | None:
    """The report of an earlier call with this key; None if `out` may be written.

    A data set of another format, which no command can read, may be replaced.
    """
    if not out.is_dir() or not any(out.iterdir()):
        return None
    if not is_own_folder(out):
        raise DataError(f"{out} is not empty and holds no prepared data; give a new folder with --out")
    try:
        done = PreparedDataset.open(out)
    except DataError:
        return None
    if done.meta["key"] != key:
        raise DataError(
            f"{out} holds data that was prepared from other files, with other options or by another version; "
            "delete it, or give a new folder with --out"
        )
    return done.report


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
        self.template.require_offsets()
        state = writer.state or {}
        self.accounting = Accounting.from_state(state["accounting"]) if state else Accounting()
        self.heldout = HeldoutPrompts(options.heldout, state.get("heldout"))
        self._sources: list[str] = state.get("sources", [])
        self._forms: list[list[str]] = state.get("forms", [])
        self._max_id: int = state.get("max_id", -1)
        self._seen_rows, self._seen_answers = writer.seen(SEEN_ROWS), writer.seen(SEEN_ANSWERS)
        self._special = _special_pattern(tokenizer)
        self.saved_rows = self.accounting.rows_in
        self.first_refusal = ""

    def run(self, sources: Sequence[str | Path], progress: OnReading | None) -> None:
        """Go through all rows that the state does not have yet."""
        each = 1 if self._answerer is None else self._answerer.settings.answers_per_prompt
        read = read_rows(sources, self.options.split)
        rows = islice((replace(raw, sample=n) for raw in read for n in range(each)), self.saved_rows, None)
        size = total_bytes(sources)
        saved = time.monotonic()
        while chunk := _chunk(rows):
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
            "forms": self._forms,
            "max_id": self._max_id,
        }
        self._writer.checkpoint(state)
        self.saved_rows = self.accounting.rows_in

    def _take(self, chunk: Sequence[RawRow]) -> None:
        rows = self._answer([self._parse(raw) for raw in chunk])
        chats = [parsed.conversation for parsed in rows if isinstance(parsed, Chat)]
        most = self.options.max_length if self.options.truncation == "right" else None
        rendered = iter(render_conversations(self.template, chats, self.options.mask, most))
        for raw, parsed in zip(chunk, rows, strict=True):
            self.accounting.rows_in += 1
            result = self._render(parsed, rendered)
            if isinstance(result, RenderedConversation):
                result = self._cut(result)
            if isinstance(result, Unusable):
                self.accounting.dropped.add(self._bounded(result.reason), raw.line, raw.source)
            else:
                self._keep(raw, parsed, result)

    def _parse(self, raw: RawRow) -> ParsedRow:
        if raw.fault is not None:
            return Unusable(raw.fault)
        try:
            content = json.dumps(raw.value, sort_keys=True, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            return Unusable("lone_surrogate")
        except RecursionError:
            return Unusable("nested_too_deep")
        parsed = _parsed(raw, self.options)
        if isinstance(parsed, Chat):
            self.accounting.unread.update(parsed.unread)
            if self._answerer is not None:
                content = parsed.conversation.without_answers().model_dump_json().encode()
        known = self._known(content, self._seen_rows, SEEN_ROWS)
        if known and self.options.deduplicate:
            return Unusable("duplicate")
        return usable(self.template, parsed, answered_later=self._answerer is not None)

    def _answer(self, rows: list[ParsedRow]) -> list[ParsedRow]:
        """Let the target answer all conversations of a chunk."""
        if self._answerer is None:
            return rows
        answered = iter(self._answerer([row.conversation for row in rows if isinstance(row, Chat)]))
        return [_answered(row, next(answered)) if isinstance(row, Chat) else row for row in rows]

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
        if isinstance(result, Unusable):
            self.first_refusal = self.first_refusal or result.detail
        return result

    def _bounded(self, message: str) -> str:
        """A reason of the report; of those that quote something, only some of a kind are told apart."""
        reason = message[:160]
        kind, quotes, _ = reason.partition(":")
        known = self.accounting.dropped
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

    def _keep(self, raw: RawRow, parsed: ParsedRow, result: RenderedConversation) -> None:
        conversation, notes = None, list(result.notes)
        if isinstance(parsed, Chat):
            conversation = parsed.conversation
            notes += [*parsed.notes, *self._content_notes(conversation)]
            prompt_hash = int(conversation.prompt_hash()[:16], 16)
            self.heldout.offer(prompt_hash, conversation)
        else:
            first = int(result.loss_mask.argmax())
            prompt_hash = int(hash_json(result.input_ids[:first].tolist())[:16], 16)
        for note in dict.fromkeys(notes):
            self.accounting.flagged.add(note, raw.line, raw.source)
        if not self._sources or self._sources[-1] != raw.source:
            self._sources.append(raw.source)
            self._forms.append([])
        form = "chat" if isinstance(parsed, Chat) else TOKENS_FORM if isinstance(parsed, TokenRow) else "text"
        if form not in self._forms[-1]:
            self._forms[-1].append(form)
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
            if message.note is not None:
                notes.append(message.note)
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
        tokenizer, answering = self.template.tokenizer, self._answerer.settings if self._answerer else None
        return {
            "sources": self._sources,
            "forms": self._forms,
            "max_id": self._max_id,
            "vocab_size": len(tokenizer),
            "template_hash": hash_json(tokenizer.chat_template),
            "template_options": self.options.template_options,
            "max_length": self.options.max_length,
            "truncation": self.options.truncation,
            "supervise": self.options.mask.supervise,
            "reasoning": self.options.mask.reasoning,
            "sampling": answering.sampling.model_dump() if answering and not answering.sampling.greedy else None,
            "answers_per_prompt": answering.answers_per_prompt if answering else 1,
        }

    def report(self) -> dict[str, Any]:
        """The accounting with the shares that people ask for."""
        counts = self.accounting.as_state()
        unread = counts.pop("unread")
        duplicates = counts["dropped"].get("duplicate", {"count": 0})["count"]
        return {
            **counts,
            "supervising": {"answers": "assistant answers", "last": "last assistant answer", "all": "all text"}[
                self.options.mask.supervise
            ],
            "columns_not_read": {name: count / counts["rows_in"] for name, count in unread.items()},
            "supervised_share": counts["supervised_tokens"] / counts["tokens"],
            "duplicate_share": duplicates / counts["rows_in"],
            "heldout_prompts": len(self.heldout.hashes),
        }


def _chunk(rows: Iterator[RawRow]) -> list[RawRow]:
    """The next rows; none at the end."""
    chunk: list[RawRow] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == _CHUNK_ROWS or row.bytes_read - chunk[0].bytes_read > _CHUNK_BYTES:
            break
    return chunk


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
        parsed = usable(template, _parsed(raw, options), answered_later=False)
        if not isinstance(parsed, Chat):
            continue
        rendered = render_conversation(template, parsed.conversation, options.mask)
        if isinstance(rendered, RenderedConversation):
            ids, mask = rendered.input_ids[: options.max_length], rendered.loss_mask[: options.max_length]
            samples.append(Sample(len(samples), torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(mask)))
    return samples


def _parsed(raw: RawRow, options: PrepareOptions) -> ParsedRow:
    """The row in its shape, with the system prompt that conversations without one are to have."""
    parsed = parse_row(raw.value, strip_images=options.strip_images)
    if not isinstance(parsed, Chat):
        return parsed
    conversation = parsed.conversation.with_system_prompt(options.system_prompt)
    if raw.sample:
        conversation = conversation.model_copy(update={"sample": raw.sample})
    return replace(parsed, conversation=conversation)


def usable(template: ChatTemplate, parsed: ParsedRow, *, answered_later: bool) -> ParsedRow:
    """The row, with the roles that the template has; `Unusable` where a conversation lacks what it must have.

    That is a template, known roles, and an answer to learn from, or with `answered_later` something to answer.
    """
    if not isinstance(parsed, Chat):
        return parsed
    if not template.tokenizer.chat_template:
        return Unusable("no_chat_template")
    messages = []
    for message in parsed.conversation.messages:
        role = message.role
        if role not in _ROLES and not template.knows_role(role):
            if role not in ("developer", "ipython"):
                return Unusable(f"unknown_role: {role[:40]}")
            role = "system" if role == "developer" else "tool"
        messages.append(message if role == message.role else message.model_copy(update={"role": role}))
    conversation = parsed.conversation.model_copy(update={"messages": tuple(messages)})
    if not answered_later:
        return _with_answers(parsed, conversation)
    if not any(message.role == "user" for message in messages):
        return Unusable("no_user" if messages else "empty")
    return replace(parsed, conversation=conversation)


def _answered(chat: Chat, answered: Conversation | Unusable) -> Chat | Unusable:
    """The row with the target's answers; noted if it ends before a result, because no call could be read."""
    row = _with_answers(chat, answered)
    if isinstance(row, Unusable):
        return row
    answers = [message for message in row.conversation.messages if message.role == "assistant"]
    stopped = len(answers) < len(answer_slots(chat.conversation)) and answers[-1].finish_reason != "length"
    return replace(row, notes=(*row.notes, "ended_before_a_result_without_a_call")) if stopped else row


def _with_answers(chat: Chat, answered: Conversation | Unusable) -> Chat | Unusable:
    """The row with a conversation in which the assistant has said something."""
    if isinstance(answered, Unusable):
        return answered
    if not answered.messages:
        return Unusable("empty")
    answers = [message for message in answered.messages if message.role == "assistant"]
    if not answers:
        return Unusable("no_assistant")
    if not any(message.content or message.reasoning_content or message.tool_calls for message in answers):
        return Unusable("all_answers_empty")
    return replace(chat, conversation=answered)


def _special_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Matches the text of any token that the tokenizer treats as special; None if it has none."""
    texts = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special and token.content]
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))) if texts else None


def _dataset_key(
    tokenizer_identity: str, sources: Sequence[str | Path], options: dict[str, Any], answers: dict[str, Any] | None
) -> str:
    """Hash of the content of the data, the tokenizer, the template's text, the options and Draftline's own code.

    Reads the files once. Standard input and pipes have no content before they are read, so their key never repeats.
    """
    return hash_json(
        {
            "data": [_source_hash(source) for source in sources],
            "tokenizer": tokenizer_identity,
            "options": options,
            "answers": answers,
            "code": _code_hash(),
        }
    )


def _source_hash(source: str | Path) -> str:
    if isinstance(source, Path) and source.is_file():
        return _file_hash(source)
    if isinstance(source, Path) and source.is_dir():
        return hash_json([_file_hash(file) for file in sorted(source.rglob("*")) if file.is_file()])
    return uuid.uuid4().hex if isinstance(source, Path) or source == STDIN else source


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _code_hash() -> str:
    """Of all files beside this one."""
    return hash_json([_file_hash(path) for path in sorted(Path(__file__).parent.glob("*.py"))])

"""From a row to token ids and the loss mask, and from token ids back to their text.

The ids are exactly what the target's own chat template gives for the whole conversation, tokenised once; where the ids
of an answer are known because the target generated it, they are those. The mask is
true on the tokens that lie wholly inside an answer's span; a token that the tokenizer merged from the template's text
and the answer's is not supervised, because no target ever generates it there.

Rows that come without messages are taken as they are: text that already went through a template, and token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from draftline.data.alignment import AnswerNotFound
from draftline.data.conversations import Conversation, FormattedText, Message, TokenRow, Unusable
from draftline.data.spans import Located, locate_answers, text_marks
from draftline.data.template import ChatTemplate, Refused
from draftline.data.tokens import Tokens
from draftline.options import MaskOptions

_BATCH = 64
"""Conversations that are tokenised in one call."""

_CONTEXT = 8
"""Tokens before a piece that are decoded with it; a character takes at most four of them."""


@dataclass(frozen=True)
class RenderedConversation:
    """Token ids and loss mask of one conversation.

    Attributes:
        text: what the template rendered.
        input_ids: [S] int32.
        loss_mask: [S] bool.
        notes: what is worth a look, as reasons for the report's `flagged` table.
    """

    text: str
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    notes: tuple[str, ...] = ()


def render_conversations(
    template: ChatTemplate, conversations: Sequence[Conversation], options: MaskOptions, most: int | None = None
) -> list[RenderedConversation | Unusable]:
    """Render many conversations; of long ones only the beginning, with more tokens than `most`.

    The tokenizer, which needs no Python lock, works on one batch while the template renders the next.
    """
    results: list[RenderedConversation | Unusable] = []
    with ThreadPoolExecutor(max_workers=1) as pool:
        batches = []
        for start in range(0, len(conversations), _BATCH):
            batch = conversations[start : start + _BATCH]
            located = [_locate(template, conversation) for conversation in batch]
            texts = [item.text for item in located if not isinstance(item, Unusable)]
            batches.append((batch, located, pool.submit(template.encode, texts, most)))
        for batch, located, tokenised in batches:
            encodings = iter(tokenised.result())
            results += [
                item
                if isinstance(item, Unusable)
                else _to_tokens(template.tokenizer, item, next(encodings), conversation.messages, options)
                for item, conversation in zip(located, batch, strict=True)
            ]
    return results


def _locate(template: ChatTemplate, conversation: Conversation) -> Located | Unusable:
    try:
        return locate_answers(template, conversation)
    except Refused as refused:
        return Unusable(f"template_refused: {refused}")
    except AnswerNotFound as error:
        return Unusable("mask_not_found", str(error))


def render_conversation(
    template: ChatTemplate, conversation: Conversation, options: MaskOptions | None = None
) -> RenderedConversation | Unusable:
    """Render one conversation."""
    return render_conversations(template, [conversation], options or MaskOptions())[0]


def _to_tokens(
    tokenizer: PreTrainedTokenizerBase,
    located: Located,
    encoding: Tokens,
    messages: Sequence[Message],
    options: MaskOptions,
) -> RenderedConversation | Unusable:
    ids = encoding.ids
    ranges = [(0, len(located.text))] if options.supervise == "all" else _supervised_ranges(located, messages, options)
    mask = token_mask(encoding.offsets, ranges) if options.supervise != "all" else np.ones(len(ids), dtype=bool)
    if not mask.any() and not encoding.whole and any(start < end for start, end in ranges):
        return Unusable("all_supervision_truncated")
    if located.unproven and not mask.any():
        return Unusable(located.unproven[0])
    ids, mask, kept = _with_generated(tokenizer, located, encoding, messages, mask)
    return RenderedConversation(located.text, ids, mask, (*_notes(located, messages), *kept))


def _with_generated(
    tokenizer: PreTrainedTokenizerBase,
    located: Located,
    encoding: Tokens,
    messages: Sequence[Message],
    mask: NDArray[np.bool_],
) -> tuple[NDArray[np.int32], NDArray[np.bool_], list[str]]:
    """Ids and mask with the ids that were generated, where they are known and another tokenisation of the same text.

    What a tokenizer makes of the text of an answer is not always what the target generated, and templates space the
    JSON of calls in their own way. Ids that do not spell the answer as the template shows it stay out, and are named.
    """
    ids, notes = encoding.ids, list[str]()
    known = len(located.text) if encoding.whole else int(encoding.offsets[-1, 1])
    spans = [s for s in located.spans if messages[s.turn].output_ids and len(s.pieces) == 1 and s.end <= known]
    for span in reversed(spans):  # from the end, so that places before stay what they are
        own = np.flatnonzero(token_mask(encoding.offsets, [(span.start, span.end)]))
        if not len(own) or not mask[own].any():
            continue
        first, behind = int(own[0]), int(own[-1]) + 1
        generated = list(messages[span.turn].output_ids)
        if messages[span.turn].finish_reason != "length":
            stops = np.flatnonzero(ids[first:behind] == generated[-1])
            if len(stops):
                behind = first + int(stops[-1]) + 1
            elif generated[-1] in tokenizer.all_special_ids:
                generated.pop()  # the template shows no end
        else:
            behind = first + int((mask[first:behind] != 0).sum())
        if ids[first:behind].tolist() == generated:
            continue
        same = _spelt(tokenizer, generated) == _spelt(tokenizer, ids[first:behind].tolist())
        notes.append("generated_ids_kept" if same else "generated_ids_do_not_fit")
        if same:
            ids = np.concatenate([ids[:first], np.array(generated, dtype=np.int32), ids[behind:]])
            mask = np.concatenate([mask[:first], np.ones(len(generated), dtype=bool), mask[behind:]])
    return ids, mask, list(dict.fromkeys(notes))


def _spelt(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of tokens without its white space, which templates strip and JSON does not care about."""
    return "".join(decoded_text(tokenizer, ids).split())


def _notes(located: Located, messages: Sequence[Message]) -> list[str]:
    """Notes on what the template does not show: the target would never have said what follows without it."""
    lost = [span.turn for span in located.spans if "reasoning_not_rendered" in span.notes]
    notes = [note for span in located.spans for note in span.notes if note != "reasoning_not_rendered"]
    if lost:
        last = lost[-1] == located.spans[-1].turn
        notes.insert(0, "reasoning_not_rendered" if last else "earlier_reasoning_dropped")
    systems = (message.content.strip() for message in messages if message.role == "system")
    if any(text not in located.text for text in systems):
        notes.append("system_not_rendered")
    return [*notes, *located.unproven]


def _supervised_ranges(located: Located, messages: Sequence[Message], options: MaskOptions) -> list[tuple[int, int]]:
    spans = located.spans
    if options.supervise == "last":
        last = max((turn for turn, message in enumerate(messages) if message.role == "assistant"), default=-1)
        spans = [span for span in spans if span.turn == last]
    ranges = []
    for span in spans:
        message = messages[span.turn]
        if message.train:
            start = span.start if options.reasoning else span.content_start
            # A cut answer has no end: supervising one would teach the drafter to stop where the budget ran out.
            end = span.text_end if message.finish_reason == "length" else span.end
            ranges += [(max(s, start), min(e, end)) for s, e in span.pieces]
    return ranges


def token_mask(offsets: NDArray[np.int64], ranges: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """[S] true on tokens wholly inside one of the character ranges; `offsets` is [S, 2].

    Some tokenizers leave a leading space out of a token's offsets; such a token begins where the one before ended.
    """
    starts, ends = offsets[:, 0].copy(), offsets[:, 1]
    starts[1:] = np.minimum(starts[1:], np.maximum(ends[:-1], starts[:-1]))
    mask = np.zeros(len(offsets), dtype=bool)
    for start, end in ranges:
        mask |= (starts >= start) & (ends <= end) & (ends > start)
    return mask


def render_text(template: ChatTemplate, row: FormattedText, options: MaskOptions) -> RenderedConversation | Unusable:
    """Tokenise text as it stands, and supervise what lies between a generation prompt and the end of a turn.

    The template is not applied again. A begin-of-text token is added only if the tokenizer adds one by itself and the
    text does not begin with it.
    """
    encoding = template.encode([row.text])[0]
    ids, offsets = encoding.ids, encoding.offsets
    automatic = template.tokenizer("")["input_ids"]
    bos = template.tokenizer.bos_token_id
    if bos is not None and bos in automatic and (not len(ids) or ids[0] != bos):
        ids, offsets = np.concatenate([[bos], ids]).astype(np.int32), np.concatenate([[[0, 0]], offsets])
    if options.supervise == "all":
        return RenderedConversation(row.text, ids, np.ones(len(ids), dtype=bool))
    ranges = _marked_ranges(template, row.text)
    if options.supervise == "last":
        ranges = ranges[-1:]
    if not ranges:
        return Unusable("no_answer_markers_in_text")
    return RenderedConversation(row.text, ids, token_mask(offsets, ranges))


def _marked_ranges(template: ChatTemplate, text: str) -> list[tuple[int, int]]:
    """Characters between each generation prompt of the target's template and the next end of a turn."""
    ranges: list[tuple[int, int]] = []
    if not template.tokenizer.chat_template:
        return ranges
    opening, ends = text_marks(template)
    if not opening:
        return ranges
    at = text.find(opening)
    while at >= 0:
        start = at + len(opening)
        at = text.find(opening, start)
        limit = at if at >= 0 else len(text)
        found = [(text.find(end, start, limit), end) for end in ends]
        ranges.append((start, min((place + len(end) for place, end in found if place >= 0), default=limit)))
    return ranges


def check_tokens(row: TokenRow, vocab_size: int, options: MaskOptions) -> RenderedConversation | Unusable:
    """Take token ids as they are if they fit the target's vocabulary and the mask fits them.

    With `supervise` all, every token is supervised and a mask is not needed; with last, the last run of the mask.
    """
    given = [1] * len(row.input_ids) if options.supervise == "all" else row.loss_mask
    if not row.input_ids:
        return Unusable("empty")
    if given is None:
        return Unusable("no_loss_mask")
    if len(row.input_ids) != len(given):
        return Unusable("mask_length_differs")
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in row.input_ids):
        return Unusable("bad_input_ids")
    if min(row.input_ids) < 0 or max(row.input_ids) >= vocab_size:
        return Unusable("id_outside_vocabulary")
    if any(value not in (0, 1) for value in given):
        return Unusable("mask_not_0_or_1")
    if not any(given):
        return Unusable("nothing_supervised")
    mask = np.array([value == 1 for value in given], dtype=bool)
    if options.supervise == "last":
        before = np.flatnonzero(~mask[: np.flatnonzero(mask)[-1]])
        mask[: before[-1] + 1 if len(before) else 0] = False
    return RenderedConversation("", np.array(row.input_ids, dtype=np.int32), mask)


def text_pieces(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """The text that each token adds; joined they are the text of all, special tokens included.

    A character that is spread over several tokens belongs to the last of them, the others have an empty piece. The
    last token has what is left, even half a character.
    """
    pieces: list[str] = []
    pending = 0  # tokens without a piece of their own yet, which complete no character
    for end in range(1, len(token_ids) + 1):
        start = end - pending - 1
        context = list(token_ids[max(0, start - _CONTEXT) : start])
        before, after = decoded_text(tokenizer, context), decoded_text(tokenizer, [*context, *token_ids[start:end]])
        complete = not after.endswith("\ufffd") or end == len(token_ids) or pending + 1 >= _CONTEXT
        pieces.append(after[len(before) :] if complete else "")
        pending = 0 if complete else pending + 1
    return pieces


def decoded_text(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of tokens, special ones included, with its spaces as they are."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

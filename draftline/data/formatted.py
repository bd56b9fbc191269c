"""Rows that come without messages: text that already went through a template, and token ids."""

from __future__ import annotations

import numpy as np

from draftline.data.conversations import Conversation, FormattedText, TokenRow, Unusable
from draftline.data.render import MaskOptions, RenderedConversation, token_mask
from draftline.data.template import ChatTemplate


def render_text(template: ChatTemplate, row: FormattedText, options: MaskOptions) -> RenderedConversation | Unusable:
    """Tokenise text as it stands, and supervise what lies between a generation prompt and the end of a turn.

    The template is not applied again. A begin-of-text token is added only if the tokenizer adds one by itself and the
    text does not begin with it.
    """
    encoding = template.encode([row.text])[0]
    ids = np.array(encoding.ids, dtype=np.int32)
    offsets = list(encoding.offsets)
    automatic = template.tokenizer("")["input_ids"]
    bos = template.tokenizer.bos_token_id
    if bos is not None and bos in automatic and (not len(ids) or ids[0] != bos):
        ids, offsets = np.concatenate([[bos], ids]).astype(np.int32), [(0, 0), *offsets]
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
    marks = template.turn_ends(Conversation(messages=()))
    if not marks.generation_prompt:
        return ranges
    at = text.find(marks.generation_prompt)
    while at >= 0:
        start = at + len(marks.generation_prompt)
        at = text.find(marks.generation_prompt, start)
        limit = at if at >= 0 else len(text)
        found = [(text.find(end, start, limit), end) for end in {marks.middle, marks.last} if end]
        ends = [position + len(end) for position, end in found if position >= 0]
        ranges.append((start, min(ends, default=limit)))
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

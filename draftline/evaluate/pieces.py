"""An output as people read it: the text of each token, and who proposed the token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXT = 8
"""Tokens before a piece that are decoded with it; a character takes at most four of them."""


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
        before, after = _decode(tokenizer, context), _decode(tokenizer, [*context, *token_ids[start:end]])
        complete = not after.endswith("\ufffd") or end == len(token_ids) or pending + 1 >= _CONTEXT
        pieces.append(after[len(before) :] if complete else "")
        pending = 0 if complete else pending + 1
    return pieces


def token_slots(output_length: int, accepted_per_forward: Sequence[int]) -> list[int]:
    """Which drafted token each token of an output was: 1, 2, .. K, or 0 for one that the target chose itself.

    The first token comes from the prompt's own forward. Every later forward gives its accepted tokens and one of the
    target's; the last forward may be cut short by the end of the output.
    """
    slots = [0]
    for accepted in accepted_per_forward:
        slots += [*range(1, accepted + 1), 0]
    return slots[:output_length]


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

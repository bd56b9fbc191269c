"""Pieces of text against the decoding of the whole, for characters that several tokens share."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftline.evaluate.pieces import text_pieces, token_slots

TEXTS = ["plain words", "naïve 数学 🙂🙂 end", "🙂", "", "\ufffd kept \ufffd"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: every character beyond ASCII is spread over two to four tokens."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    built.pre_tokenizer, built.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=built)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_none_is_half_a_character(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    pieces = text_pieces(tokenizer, ids)
    assert len(pieces) == len(ids) == len(text.encode())
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert [piece for piece in pieces if piece] == list(text)


def test_an_output_that_ends_inside_a_character_loses_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("ab🙂")["input_ids"][:-1]
    assert "".join(text_pieces(tokenizer, ids)) == tokenizer.decode(ids)
    assert text_pieces(tokenizer, ids)[:2] == ["a", "b"]


@pytest.mark.parametrize(
    ("length", "accepted", "slots"),
    [
        (1, [], [0]),
        (7, [2, 0, 1], [0, 1, 2, 0, 0, 1, 0]),
        (6, [2, 0, 1], [0, 1, 2, 0, 0, 1]),  # the stop token was drafted: the target adds nothing
    ],
)
def test_slots_tell_drafted_tokens_from_the_targets_own(length: int, accepted: list[int], slots: list[int]) -> None:
    assert token_slots(length, accepted) == slots

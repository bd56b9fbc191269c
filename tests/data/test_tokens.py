"""Long texts in pieces: the tokens, and their places, of the whole text."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from draftline.data import tokens
from draftline.data.tokens import tokenise_all
from tests.data.chat_tokenizers import CHATML, make_tokenizer

_RANDOM = random.Random(0)
_WORDS = ["".join(_RANDOM.choices("etaoinshrdlu", k=_RANDOM.randint(1, 9))) for _ in range(300)]


def _like_sentencepiece(trainer: Any, model: Any) -> Tokenizer:
    """No words: the whole text is one, spaces are letters, and one is put in front of it."""
    built = Tokenizer(model)
    built.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    built.decoder = decoders.Metaspace()
    built.train_from_iterator([" ".join(_WORDS)], trainer)
    return built


def _with_words() -> Tokenizer:
    built = Tokenizer(models.BPE(unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    built.train_from_iterator(
        [" ".join(_WORDS)], trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<|im_end|>"])
    )
    return built


TOKENIZERS = {
    "bytes": lambda: make_tokenizer(CHATML).backend_tokenizer,
    "words": _with_words,
    "unigram": lambda: _like_sentencepiece(
        trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"]), models.Unigram()
    ),
    "one word": lambda: _like_sentencepiece(
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"]), models.BPE(unk_token="<unk>")
    ),
}
TEXTS = {
    "words": " ".join(_RANDOM.choices(_WORDS, k=9000)),
    "lines": "\n\n".join(" ".join(_RANDOM.choices(_WORDS, k=30)) for _ in range(250)),
    "turns": "<|im_end|>\n<|im_start|>".join(_RANDOM.choices(_WORDS, k=3000)),
    "no space": "".join(_RANDOM.choices("etaoinshrdlu", k=40_000)),
    "one letter": "e" * 40_000,
    "spaces": "a" + " " * 40_000 + "b",
    "other scripts": "".join(_RANDOM.choices("éà漢字かな😀 \u0301e", k=40_000)),
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_pieces_give_the_tokens_of_the_whole(monkeypatch: pytest.MonkeyPatch, tokenizer: str, text: str) -> None:
    built, whole, asked = TOKENIZERS[tokenizer](), TEXTS[text], list[int]()
    wanted = built.encode(whole, add_special_tokens=False)
    monkeypatch.setattr(tokens, "_PIECE", 9_001)
    monkeypatch.setattr(tokens, "_SHARED", 1_000)

    def tokenise(texts: list[str]) -> list[Any]:
        asked.extend(map(len, texts))
        return built.encode_batch(texts, add_special_tokens=False)

    before, found, behind = tokenise_all(["a short one", whole, "and another"], tokenise)
    assert (len(before.ids), len(behind.ids)) == tuple(
        len(built.encode(each, add_special_tokens=False).ids) for each in ("a short one", "and another")
    )
    assert found.ids.tolist() == wanted.ids
    assert found.offsets.tolist() == [list(each) for each in wanted.offsets]
    if text in ("words", "lines", "turns"):
        assert max(asked) <= 10_001
    (some,) = tokenise_all([whole], tokenise, most=500)
    assert some.whole == (len(some.ids) == len(wanted.ids))
    assert len(some.ids) > 500
    assert np.array_equal(some.ids, wanted.ids[: len(some.ids)])

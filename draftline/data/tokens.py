"""Texts to token ids with their places, at a cost in memory that does not grow with what the tokenizer remembers.

A tokenizer keeps some 300 bytes for every token of what it was given; here 12 are kept. So it is given little at once:
short texts together, a long one in pieces that overlap. Where two pieces agree about a run of tokens in the middle of
what they share, far from both cuts, the first is followed up to there and the second from there on. Where they agree
nowhere (a word without end), the text is tokenised as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PIECE = 1 << 18
"""Characters of a long text that are tokenised at once."""

_TOGETHER = 1 << 19
"""Characters of texts that are tokenised in one call."""

_SHARED = 1 << 12
"""Characters that two pieces share; they have to agree in the middle half."""

_AGREEING = 16
"""Tokens in a row, with their places, that say that two pieces go on alike."""

_DIFFERENT = 6
"""Different ones among them, at least: what repeats itself can be cut in several ways that agree for long."""

Tokenise = Callable[[list[str]], Sequence[Any]]
"""Encodings of texts, each with `ids` and `offsets`."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text.

    Attributes:
        ids: [S] int32.
        offsets: [S, 2] int64, first character of each token, and the one behind its last.
        whole: whether these are all of them.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    whole: bool = True

    @staticmethod
    def of(encoding: Any, begin: int = 0) -> Tokens:
        """What an encoding says, of a piece that begins at a character of its text."""
        flat = np.fromiter(chain.from_iterable(encoding.offsets), dtype=np.int64, count=2 * len(encoding))
        return Tokens(np.array(encoding.ids, dtype=np.int32), flat.reshape(-1, 2) + begin)


def tokenise_all(texts: Sequence[str], tokenise: Tokenise, most: int | None = None) -> list[Tokens]:
    """The tokens of each text, as `tokenise` gives them for the whole of it; of a long one, only more than `most`."""
    found: list[Tokens] = []
    for together in _grouped(texts):
        if len(together[0]) > _PIECE + _SHARED:
            found.append(_joined(together[0], tokenise, most))
        else:
            found += map(Tokens.of, tokenise(together))
    return found


def _grouped(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in order, long ones alone, others together up to a bound."""
    group: list[str] = []
    for text in texts:
        alone = len(text) > _PIECE + _SHARED
        if group and (alone or sum(map(len, group)) + len(text) > _TOGETHER):
            yield group
            group = []
        if alone:
            yield [text]
        else:
            group.append(text)
    if group:
        yield group


def _joined(text: str, tokenise: Tokenise, most: int | None) -> Tokens:
    """The tokens of a long text, from pieces; those behind more than `most` are left out."""
    parts: list[Tokens] = []
    last: Tokens | None = None
    whole = True
    for begin in range(0, len(text) - _SHARED, _PIECE):
        piece = Tokens.of(tokenise([text[begin : begin + _PIECE + _SHARED]])[0], begin)
        if last is not None:
            places = _agreement(last, piece, begin)
            if places is None:
                return Tokens.of(tokenise([text])[0])
            parts.append(Tokens(last.ids[: places[0]], last.offsets[: places[0]]))
            if most is not None and sum(len(part.ids) for part in parts) > most:
                whole = False
                break
            piece = Tokens(piece.ids[places[1] :], piece.offsets[places[1] :])
        last = piece
    assert last is not None, "a long text has a piece"
    parts += [last] if whole else []
    ids, offsets = (np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "offsets"))
    return Tokens(ids, offsets, whole)


def _agreement(first: Tokens, second: Tokens, begin: int) -> tuple[int, int] | None:
    """Where, as numbers of a token in each, two pieces go on alike; the second begins at a character of the text."""
    low, high = np.searchsorted(first.offsets[:, 0], [begin + _SHARED // 4, begin + _SHARED * 3 // 4])
    for one in range(int(low), int(high) - _AGREEING):
        other = int(np.searchsorted(second.offsets[:, 0], first.offsets[one, 0]))
        run, same = slice(one, one + _AGREEING), slice(other, other + _AGREEING)
        if not np.array_equal(first.ids[run], second.ids[same]) or len(set(first.ids[run].tolist())) < _DIFFERENT:
            continue
        if np.array_equal(first.offsets[run], second.offsets[same]):
            return one, other
    return None

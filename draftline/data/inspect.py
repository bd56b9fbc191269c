"""Shows what a drafter will learn from: supervised tokens marked, anchors and one block drawn."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.text import Text
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from draftline.data.dataset import TOKENIZER_KEY, PreparedDataset
from draftline.data.render import decoded_text, text_pieces
from draftline.draft.block import eligible_anchors, predicted_positions, supervised_slots
from draftline.errors import DataError

_COLORS = {"slot": "black on yellow", "supervised anchor": "underline green", "supervised": "green", "": "dim"}
"""How tokens are drawn in a terminal, by their style."""

_LEGEND = "[...] supervised   ^ anchor   _ the slots that the block at the first anchor predicts"


@dataclass(frozen=True)
class Token:
    """One token as it is drawn: its text and which of supervised, anchor, slot it is."""

    text: str
    supervised: bool
    anchor: bool
    slot: bool

    @property
    def style(self) -> str:
        """What it is, in one or two words; class names of the page."""
        return "slot" if self.slot else " ".join(["supervised"] * self.supervised + ["anchor"] * self.anchor)


@dataclass(frozen=True)
class ConversationView:
    """One conversation of a prepared data set, ready to be drawn."""

    source: str
    line: int
    input_ids: list[int]
    loss_mask: list[int]
    supervised_text: str
    text: str
    tokens: list[Token]

    @property
    def supervised(self) -> int:
        """Number of supervised tokens."""
        return sum(self.loss_mask)

    def as_json(self) -> dict[str, Any]:
        """The fields that `inspect --json` writes."""
        return {name: value for name, value in vars(self).items() if name != "tokens"}


def inspect_dataset(folder: Path, *, count: int | None = None, block_size: int) -> list[ConversationView]:
    """The first `count` conversations (all of them without) of a prepared folder.

    The block drawn is the one at the first anchor, with its `block_size - 1` predicted slots.
    """
    dataset = PreparedDataset.open(folder)
    tokenizer = _load_tokenizer(dataset)
    number = len(dataset) if count is None else min(count, len(dataset))
    return [_view(dataset, tokenizer, index, block_size) for index in range(number)]


def _load_tokenizer(dataset: PreparedDataset) -> PreTrainedTokenizerBase:
    """The tokenizer that the data was prepared with; it lies beside the data."""
    folder = dataset.folder / dataset.meta[TOKENIZER_KEY]
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} holds no tokenizer; run `draftline prepare` again") from error


def _view(
    dataset: PreparedDataset, tokenizer: PreTrainedTokenizerBase, index: int, block_size: int
) -> ConversationView:
    ids, mask = dataset.arrays(index)
    source, line = dataset.origin(index)
    supervised = mask.astype(bool)
    return ConversationView(
        source=source,
        line=line,
        input_ids=ids.tolist(),
        loss_mask=mask.tolist(),
        supervised_text=decoded_text(tokenizer, ids[supervised].tolist()),
        text=decoded_text(tokenizer, ids.tolist()),
        tokens=_tokens(tokenizer, ids, supervised, block_size),
    )


def _tokens(
    tokenizer: PreTrainedTokenizerBase, ids: NDArray[np.int32], mask: NDArray[np.bool_], block_size: int
) -> list[Token]:
    mask_S, document_S = torch.from_numpy(mask), torch.zeros(len(mask), dtype=torch.int64)
    anchor_S, slot_S = eligible_anchors(mask_S, document_S), torch.zeros_like(mask_S)
    first_A, layout = anchor_S.nonzero()[:1, 0], (block_size, False)
    slot_S[predicted_positions(first_A, *layout)[supervised_slots(first_A, mask_S, document_S, *layout)]] = True
    texts = text_pieces(tokenizer, ids.tolist())
    drawn = zip(texts, mask.tolist(), anchor_S.tolist(), slot_S.tolist(), strict=True)
    return [Token(text, supervised, anchor, slot) for text, supervised, anchor, slot in drawn]


def _visible(text: str) -> str:
    """The text with control characters written out: a terminal must not take data for commands."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf") else _written(c) for c in text)


def _written(character: str) -> str:
    return character.encode("unicode_escape").decode()


def conversations_text(views: Sequence[ConversationView], *, color: bool) -> Text:
    """The conversations for a terminal; without colour, brackets enclose what is supervised."""
    drawn = Text()
    if not color:
        drawn.append(_LEGEND + "\n")
    for view in views:
        drawn.append(
            f"\n{_visible(view.source)}:{view.line}  {len(view.input_ids)} tokens, {view.supervised} supervised\n",
            "bold",
        )
        before = False
        shown_anchor = False
        for token in view.tokens:
            if not color and token.supervised != before:
                drawn.append("[" if token.supervised else "]")
            before = token.supervised
            if color:
                drawn.append(_visible(token.text), _COLORS[token.style])
                continue
            mark = "^" if token.anchor and not shown_anchor else "_" if token.slot else ""
            shown_anchor = shown_anchor or token.anchor
            drawn.append(mark + _visible(token.text))
        drawn.append("]\n" if before and not color else "\n")
    return drawn


def page_values(folder: Path, views: Sequence[ConversationView]) -> dict[str, Any]:
    """What the page of conversations (`page/templates/inspect.html`) shows."""
    dataset = PreparedDataset.open(folder)
    share = float(dataset.supervised_lengths.sum()) / max(1, int(dataset.lengths.sum()))
    return {"folder": folder.name, "total": len(dataset), "share": share, "views": views}

"""Shows what a drafter will learn from: supervised tokens marked, anchors and one block drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray
from rich.text import Text
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from draftline.data.dataset import TOKENIZER_KEY, PreparedDataset
from draftline.errors import DataError

_LEGEND = "[...] supervised   ^ anchor   _ the slots that the block at the first anchor predicts"

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Prepared conversations: {{ folder }}</title>
<style>
body { font: 15px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f4; padding: 1rem; border-radius: 6px }
.s { background: #cdeccd } .a { border-bottom: 3px solid #b35c00 }
.b { background: #ffd58a; outline: 1px solid #b35c00 }
h2 { font-size: 1rem; margin-top: 2rem } .legend span { padding: 0 .4em }
</style></head><body>
<h1>Prepared conversations</h1>
<p>{{ folder }}: {{ total }} conversations, {{ "%.1f"|format(share * 100) }} % of the tokens supervised.</p>
<p class="legend"><span class="s">supervised</span> <span class="s a">anchor</span>
<span class="b">slots of one block</span></p>
{% for view in views %}<h2>{{ view.source }}, line {{ view.line }}: {{ view.input_ids|length }} tokens,
{{ view.supervised }} supervised</h2>
<pre>{% for token in view.tokens %}<span class="{{ token.style }}">{{ token.text }}</span>{% endfor %}</pre>
{% endfor %}</body></html>
"""


@dataclass(frozen=True)
class Token:
    """One token as it is drawn: its text and which of supervised, anchor, slot it is."""

    text: str
    supervised: bool
    anchor: bool
    slot: bool

    @property
    def style(self) -> str:
        """Class names of the page."""
        if self.slot:
            return "b"
        return " ".join(["s"] * self.supervised + ["a"] * self.anchor)


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
        return {
            "source": self.source,
            "line": self.line,
            "input_ids": self.input_ids,
            "loss_mask": self.loss_mask,
            "supervised_text": self.supervised_text,
            "text": self.text,
        }


def inspect_dataset(folder: Path, *, count: int | None = None, block_size: int = 8) -> list[ConversationView]:
    """The first `count` conversations (all of them without) of a prepared folder.

    The block drawn is the one at the first anchor, with its `block_size - 1` predicted slots.
    """
    dataset = PreparedDataset.open(folder)
    tokenizer = load_tokenizer(dataset)
    number = len(dataset) if count is None else min(count, len(dataset))
    return [_view(dataset, tokenizer, index, block_size) for index in range(number)]


def load_tokenizer(dataset: PreparedDataset) -> PreTrainedTokenizerBase:
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
        supervised_text=_decode(tokenizer, ids[supervised]),
        text=_decode(tokenizer, ids),
        tokens=list(_tokens(tokenizer, ids, supervised, block_size)),
    )


def _tokens(
    tokenizer: PreTrainedTokenizerBase, ids: NDArray[np.int32], mask: NDArray[np.bool_], block_size: int
) -> Iterator[Token]:
    anchors = np.zeros_like(mask)
    anchors[:-1] = mask[:-1] & mask[1:]
    slots = np.zeros_like(mask)
    if anchors.any():
        first = int(anchors.argmax())
        run = mask[first + 1 : first + block_size]
        length = int(run.argmin()) if not run.all() else len(run)
        slots[first + 1 : first + 1 + length] = True
    texts = _token_texts(tokenizer, ids)
    for text, supervised, anchor, slot in zip(texts, mask.tolist(), anchors.tolist(), slots.tolist(), strict=True):
        yield Token(text, supervised, anchor, slot)


def _token_texts(tokenizer: PreTrainedTokenizerBase, ids: NDArray[np.int32]) -> list[str]:
    """The text that each token adds. A character spread over several tokens appears with its last one."""
    texts, pending = [], []
    for token_id in ids.tolist():
        pending.append(token_id)
        text = _decode(tokenizer, pending)
        if text.endswith("\ufffd") and len(pending) < 4:
            texts.append("")
        else:
            texts.append(text)
            pending = []
    return texts


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int] | NDArray[np.int32]) -> str:
    return str(tokenizer.decode(list(map(int, ids)), clean_up_tokenization_spaces=False))


def as_text(views: Sequence[ConversationView], *, color: bool) -> Text:
    """The conversations for a terminal; without colour, brackets enclose what is supervised."""
    drawn = Text()
    if not color:
        drawn.append(_LEGEND + "\n")
    for view in views:
        drawn.append(
            f"\n{view.source}:{view.line}  {len(view.input_ids)} tokens, {view.supervised} supervised\n", "bold"
        )
        before = False
        shown_anchor = False
        for token in view.tokens:
            if not color and token.supervised != before:
                drawn.append("[" if token.supervised else "]")
            before = token.supervised
            if color:
                drawn.append(token.text, _color(token))
                continue
            mark = "^" if token.anchor and not shown_anchor else "_" if token.slot else ""
            shown_anchor = shown_anchor or token.anchor
            drawn.append(mark + token.text)
        drawn.append("]\n" if before and not color else "\n")
    return drawn


def _color(token: Token) -> str:
    if token.slot:
        return "black on yellow"
    if token.anchor:
        return "underline green"
    return "green" if token.supervised else "dim"


def as_html(folder: Path, views: Sequence[ConversationView]) -> str:
    """The conversations as one page without any outside resource."""
    dataset = PreparedDataset.open(folder)
    share = float(dataset.supervised_lengths.sum()) / max(1, int(dataset.lengths.sum()))
    page = jinja2.Environment(autoescape=True).from_string(_PAGE)
    return page.render(folder=folder.name, total=len(dataset), share=share, views=views)

import html
import json
import re
from pathlib import Path

import pytest

from draftline.cli import run
from draftline.data.inspect import ConversationView, conversations_text, inspect_dataset
from draftline.data.prepare import prepare
from draftline.errors import DataError
from draftline.options import PrepareOptions
from tests.data.chat_tokenizers import CHATML, make_tokenizer, sentencepiece_tokenizer

ROW = '{"messages": [{"role": "user", "content": "<b>hi</b>"}, {"role": "assistant", "content": "It is 字 four"}]}'
RENDERED = "<|im_start|>user\n<b>hi</b><|im_end|>\n<|im_start|>assistant\nIt is 字 four<|im_end|>\n"


@pytest.fixture
def views(tmp_path: Path) -> list[ConversationView]:
    (tmp_path / "data.jsonl").write_text(ROW, encoding="utf-8")
    prepare(make_tokenizer(CHATML), [str(tmp_path / "data.jsonl")], tmp_path / "out", PrepareOptions())
    return inspect_dataset(tmp_path / "out", block_size=4)


def test_json_has_the_fixed_fields(views: list[ConversationView], tmp_path: Path) -> None:
    (view,) = [view.as_json() for view in views]
    assert view["text"] == RENDERED
    assert view["supervised_text"] == "It is 字 four<|im_end|>"
    assert (view["source"], view["line"]) == (str(tmp_path / "data.jsonl"), 1)
    assert len(view["input_ids"]) == len(view["loss_mask"])
    assert set(view["loss_mask"]) == {0, 1}


def test_tokens_spell_the_text_and_one_block_is_drawn(views: list[ConversationView]) -> None:
    tokens = views[0].tokens
    assert "".join(token.text for token in tokens) == RENDERED
    anchors = [number for number, token in enumerate(tokens) if token.anchor]
    supervised = [number for number, token in enumerate(tokens) if token.supervised]
    assert anchors == supervised[:-1]
    assert [number for number, token in enumerate(tokens) if token.slot] == supervised[1:4]


def test_brackets_without_colour(views: list[ConversationView]) -> None:
    plain = conversations_text(views, color=False).plain
    inside = plain[plain.index("assistant\n[") + len("assistant\n[") : plain.rindex("]")]
    assert inside.replace("^", "").replace("_", "") == "It is 字 four<|im_end|>".replace("_", "")
    assert conversations_text(views, color=True).plain.count("[") == 0


def test_control_sequences_of_the_data_do_not_reach_the_terminal(tmp_path: Path) -> None:
    answer = "a\x1b[31mb\x1b]0;title\x07c\u202ed\x9b2Je\r"
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "q\x1b[2J", "completion": answer}), encoding="utf-8")
    prepare(make_tokenizer(CHATML), [str(tmp_path / "data.jsonl")], tmp_path / "out", PrepareOptions())
    views = inspect_dataset(tmp_path / "out", block_size=4)
    for color in (False, True):
        plain = conversations_text(views, color=color).plain
        assert not set(plain) & set("\x1b\x07\x9b\r\u202e")
        assert "\\x1b" in plain


def test_tokens_of_a_sentencepiece_tokenizer_keep_their_spaces(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "One and two", "completion": "It is four 字"}', encoding="utf-8")
    prepare(sentencepiece_tokenizer(CHATML), [str(tmp_path / "data.jsonl")], tmp_path / "out", PrepareOptions())
    (view,) = inspect_dataset(tmp_path / "out", block_size=8)
    assert "".join(token.text for token in view.tokens) == view.text
    assert "It is four 字" in "".join(token.text for token in view.tokens if token.supervised)


def test_page_shows_every_token_and_escapes_its_text(views: list[ConversationView], tmp_path: Path) -> None:
    assert run(["inspect", str(tmp_path / "out"), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    (shown,) = re.findall(r"<pre[^>]*>(.*?)</pre>", page, re.DOTALL)
    assert "<b>" not in shown
    assert html.unescape(re.sub(r"<span class=\"[a-z ]*\">|</span>", "", shown)) == RENDERED
    assert shown.count('class="supervised') + shown.count('class="slot') == views[0].supervised
    assert "1 conversations" in page
    assert "http" not in page.replace("http-equiv", "")


def test_folder_without_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a complete prepared data set"):
        inspect_dataset(tmp_path, block_size=8)

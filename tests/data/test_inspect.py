from pathlib import Path

import pytest

from draftline.data.inspect import ConversationView, as_html, as_text, inspect_dataset
from draftline.data.pipeline import PrepareOptions
from draftline.data.prepare import prepare
from draftline.errors import DataError
from tests.data.chat_tokenizers import CHATML, make_tokenizer

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
    plain = as_text(views, color=False).plain
    inside = plain[plain.index("assistant\n[") + len("assistant\n[") : plain.rindex("]")]
    assert inside.replace("^", "").replace("_", "") == "It is 字 four<|im_end|>".replace("_", "")
    assert as_text(views, color=True).plain.count("[") == 0


def test_page_escapes_the_text(views: list[ConversationView], tmp_path: Path) -> None:
    page = as_html(tmp_path / "out", views)
    assert "<b>hi</b>" not in page
    assert "&lt;b&gt;" in page or "&lt;" in page
    assert "http" not in page


def test_folder_without_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a complete prepared data set"):
        inspect_dataset(tmp_path)

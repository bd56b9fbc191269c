from pathlib import Path

import pytest

from draftline.data.conversations import TokenRow, Unusable
from draftline.data.dataset import PreparedDataset
from draftline.data.formatted import check_tokens
from draftline.data.pipeline import PrepareOptions
from draftline.data.prepare import prepare
from draftline.data.render import MaskOptions, RenderedConversation
from draftline.errors import DataError
from tests.data.chat_tokenizers import make_tokenizer
from tests.data.test_prepare import write


@pytest.mark.parametrize(
    ("supervise", "given", "mask"),
    [
        ("answers", [0, 1, 0, 1, 1], [0, 1, 0, 1, 1]),
        ("last", [0, 1, 0, 1, 1], [0, 0, 0, 1, 1]),
        ("last", [1, 1, 1, 0, 0], [1, 1, 1, 0, 0]),
        ("all", [0, 1, 0, 1, 1], [1, 1, 1, 1, 1]),
        ("all", None, [1, 1, 1, 1, 1]),
    ],
)
def test_what_is_supervised_of_token_rows(supervise: str, given: list[int] | None, mask: list[int]) -> None:
    options = MaskOptions(supervise=supervise)  # type: ignore[arg-type]
    result = check_tokens(TokenRow([5, 6, 7, 8, 9], given), 10, options)
    assert isinstance(result, RenderedConversation)
    assert result.loss_mask.tolist() == [bool(value) for value in mask]


def test_token_rows_without_a_mask() -> None:
    assert check_tokens(TokenRow([5, 6], None), 10, MaskOptions()) == Unusable("no_loss_mask")


def test_rows_that_need_no_template_need_no_template(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(None)
    data = write(tmp_path / "ids.jsonl", [{"input_ids": [5, 6], "loss_mask": [0, 1]}, {"turns": ["hi"]}])
    report = prepare(tokenizer, [data], tmp_path / "ids", PrepareOptions())
    assert (report["rows_out"], list(report["dropped"])) == (1, ["no_chat_template"])
    texts = write(tmp_path / "texts.jsonl", [{"text": "The answer."}])
    with pytest.raises(DataError, match="learn all text with --supervise all"):
        prepare(tokenizer, [texts], tmp_path / "texts", PrepareOptions())
    whole = PrepareOptions(mask=MaskOptions(supervise="all"))
    prepare(tokenizer, [texts], tmp_path / "texts", whole)
    assert PreparedDataset.open(tmp_path / "texts").arrays(0)[1].all()
    chats = write(tmp_path / "chats.jsonl", [{"prompt": "hi", "completion": "yo"}])
    with pytest.raises(DataError, match="instruction-tuned version"):
        prepare(tokenizer, [chats], tmp_path / "chats", PrepareOptions())

"""The command line of `prepare`: several files, and the cut to what the target reads."""

import json
from pathlib import Path

import pytest

from draftline import cli
from draftline.commands.prepare import answer_and_prepare
from draftline.config import TargetConfig
from draftline.data.dataset import PreparedDataset
from draftline.options import GenerationSettings, PrepareOptions
from draftline.targets.model import TINY_FOLDER, load_target, load_tokenizer
from tests.data.test_prepare import row, write

PROMPTS = ["Sort these numbers: 5 2 9", "What is 12 + 7?", "Say hello", "Count to 4", "What is 3 + 4?", "Sort: 2 1"]


def prepared(tmp_path: Path) -> Path:
    rows = [{"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": "Yes."}]} for p in PROMPTS]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, out = str(tmp_path / "chats.jsonl"), tmp_path / "data"
    assert cli.run(["prepare", "--target", "tiny", "--data", data, "--out", str(out)]) == 0
    return out


def test_files_may_follow_one_option_or_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = (write(tmp_path / f"{name}.jsonl", [row(name)]) for name in "abc")
    words = ["prepare", "--target", "tiny", "--data", a, b, "--data", c, "--out", str(tmp_path / "out")]
    assert cli.run([*words, "--max-length", "4000", "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["rows_in"], report["rows_out"], report["dropped"]) == (3, 3, {})
    assert "--max-length 4000 is lowered to 2048" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["max_length"] == 2048


def test_unreadable_share_and_supervision_are_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "data.jsonl", [row("a"), "{"])
    words = ["prepare", "--target", "tiny", "--data", data, "--out", str(tmp_path / "out")]
    assert cli.run(words) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("fix the file, or raise --max-unreadable")
    assert cli.run([*words, "--max-unreadable", "0.5", "--supervise", "all"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens"] == report["supervised_tokens"]


def test_the_default_length_follows_the_target_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "a.jsonl", [row("a")])
    assert cli.run(["prepare", "--target", "tiny", "--data", data, "--out", str(tmp_path / "out")]) == 0
    assert "max-length" not in capsys.readouterr().err
    assert json.loads((tmp_path / "out/meta.json").read_text())["max_length"] == 2048


def test_wrong_words_are_said_in_plain_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "a.jsonl", [row("a")])
    words = ["prepare", "--target", "tiny", "--data", data, "--out", str(tmp_path / "out")]
    for wrong in (["--max-length", "many"], ["--supervise", "some"], ["--heldout", "-1"], ["--split", "test"]):
        assert cli.run([*words, *wrong]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        assert wrong[0] in line
        assert "Value error" not in line
        assert "Input should" not in line


def test_prepare_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftline.targets.model.load_target", lambda _config: pytest.fail("loaded"))
    assert (prepared(tmp_path) / "meta.json").exists()


def test_given_answers_are_compared_with_the_targets_own_before_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"messages": [{"role": "user", "content": "Say hello"}, {"role": "assistant", "content": "qzx vkj wpf"}]}
    (tmp_path / "given.jsonl").write_text(json.dumps(row) + "\n")
    target = load_target(TargetConfig(name="tiny"))
    settings = GenerationSettings(max_new_tokens=4)
    answer_and_prepare(target, [str(tmp_path / "given.jsonl")], tmp_path / "out", PrepareOptions(), settings)
    assert "regenerate" in capsys.readouterr().err


def test_words_for_the_template_reach_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Template, its options and the system prompt from files and words, one of which the template does not read."""
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ mood }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    (tmp_path / "system.txt").write_text("Be brief.\n")
    data, out = write(tmp_path / "a.jsonl", [row("a", "b")]), tmp_path / "out"
    words = ["prepare", "--target", "tiny", "--data", data, "--out", str(out), "--system-prompt"]
    words += [str(tmp_path / "system.txt"), "--chat-template", str(tmp_path / "t.jinja")]
    assert cli.run([*words, "--template-option", "mood=merry", "--template-option", "thinking=false"]) == 0
    assert "warning: the chat template does not read thinking, which changes nothing: it reads mood" in (
        capsys.readouterr().err
    )
    dataset = PreparedDataset.open(out)
    tokenizer = load_tokenizer(TargetConfig(name=str(TINY_FOLDER), chat_template=tmp_path / "t.jinja"))
    assert (
        tokenizer.decode(dataset[0].input_ids)
        == "<|system|>Be brief.merry<|end|><|user|>amerry<|end|><|assistant|>bmerry<|end|>"
    )
    assert dataset.meta["template_options"] == {"mood": "merry", "thinking": False}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--chat-template", "nowhere.jinja"], "--chat-template nowhere.jinja cannot be read: No such file"),
        (["--template-option", "tools=1"], "write KEY=VALUE"),
        (["--temperature", "0.7"], "add --regenerate"),
        (["--answers-per-prompt", "2"], "give --temperature"),
        (["--answers-per-prompt", "2", "--temperature", "1"], "add --regenerate"),
    ],
)
def test_words_of_answers_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    data = write(tmp_path / "a.jsonl", [row("a")])
    assert cli.run(["prepare", "--target", "tiny", "--data", data, "--out", str(tmp_path / "out"), *words]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


def test_samples_of_a_prompt_reach_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write(tmp_path / "a.jsonl", [{"prompt": "Count to 4"}]), tmp_path / "out"
    words = ["prepare", "--target", "tiny", "--data", data, "--out", str(out), "--regenerate", "--max-new-tokens", "8"]
    assert cli.run([*words, "--answers-per-prompt", "3", "--temperature", "1.5", "--top-k", "40"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["rows_out"], len((out / "answers.jsonl").read_text().splitlines())) == (3, 3)
    assert PreparedDataset.open(out).meta["sampling"] == {"temperature": 1.5, "top_p": 1.0, "top_k": 40}

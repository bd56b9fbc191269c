"""The command: a folder with its proof, a server, and an exit status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftline.cli import run
from draftline.evaluate.replay import KeptAnswer
from draftline.formats.folder import PROOF_FILE
from draftline.formats.proof import read_proof
from tests.evaluate.engine_servers import Answer, EngineServer, Program
from tests.formats.proofs import TENSOR_EDITS, edit_folder, edit_proof, proven_folder


def blocks(answer: KeptAnswer) -> Answer:
    """The written answer as a server sends it."""
    pieces, place = [list(answer.output_ids[:1])], 1
    accepted = []
    for grown in answer.kept_per_forward():
        pieces.append(list(answer.output_ids[place : place + grown]))
        accepted.append(grown - 1)
        place += grown
    return Answer(pieces, accepted, False)


@pytest.fixture
def start() -> Iterator[Any]:
    started: list[EngineServer] = []

    def new(folder: Path, program: Program = "vllm", *, slower: bool = False) -> EngineServer:
        """Serves what the proof of a folder says; `slower`: one token at a time."""
        proof = read_proof(folder)
        assert proof is not None
        written = {answer.input_ids: blocks(answer) for answer in proof.answers}
        server = EngineServer(program)

        def script(prompt: list[int], _limit: int) -> Answer:
            answer = written[tuple(prompt)]
            ids = answer.output_ids
            return Answer([[token] for token in ids], [0] * (len(ids) - 1), False) if slower else answer

        server.script, server.drafted = script, len(proof.answers[0].drafted_blocks[0])
        started.append(server)
        return server

    yield new
    for server in started:
        server.close()


@pytest.mark.parametrize("program", ["vllm", "llamacpp", "sglang"])
def test_served_as_trained_yes_or_no(
    program: Program, start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = proven_folder(tmp_path / "drafter"), tmp_path / "verdict.json"
    words = ["verify", str(folder), "--json", str(out), "--base-url"]
    assert run([*words, start(folder, program).url]) == 0
    assert capsys.readouterr().out.startswith("served as trained: yes: 5 of 5 outputs are those of the proof")
    tree = json.loads(out.read_text())
    assert (tree["served_as_trained"], tree["exact"], len(tree["answers"])) == (True, True, 5)
    assert run([*words, start(folder, program, slower=True).url]) == 1
    said = capsys.readouterr().out
    assert said.startswith("served as trained: no: 5 of 5 prompts take another number of forwards, first prompt 1: 31")
    assert said.count("\n") == 1
    assert json.loads(out.read_text())["served_as_trained"] is False


def test_only_the_first_prompts(start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = proven_folder(tmp_path / "drafter")
    server = start(folder)
    assert run(["verify", str(folder), "--base-url", server.url, "--model", "target", "--limit", "2"]) == 0
    assert "2 of 2 outputs" in capsys.readouterr().out
    assert len(server.prompts) == 3


def test_what_could_not_be_asked_is_one_line_and_status_2(
    start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = proven_folder(tmp_path / "drafter")
    url = start(folder).url
    edited = edit_folder(proven_folder(tmp_path / "edited"), TENSOR_EDITS["one tensor zeroed"][0])
    older = proven_folder(tmp_path / "older")
    (older / PROOF_FILE).unlink()
    empty = proven_folder(tmp_path / "empty")
    edit_proof(empty, lambda tree: tree["answers"].clear())
    for words, said in (
        ([str(folder)], "nothing says which server to ask: give --base-url"),
        ([str(folder), "--base-url", "http://127.0.0.1:9/v1"], "does not answer"),
        ([str(folder), "--base-url", url, "--model", "other"], "has no model 'other'"),
        ([str(folder), "--base-url", url, "--api-key-env", "NO_SUCH_KEY"], "the environment has no NO_SUCH_KEY"),
        ([str(edited), "--base-url", url], "is not what was exported (layers.1.self_attn.o_proj.weight has other"),
        ([str(older), "--base-url", url], "has no proof, as folders of other programs and older ones: export it"),
        ([str(empty), "--base-url", url], "has no prompts and proves nothing"),
        ([str(tmp_path / "nowhere"), "--base-url", url], "has no proof"),
    ):
        assert run(["verify", *words]) == 2
        shown = capsys.readouterr()
        assert said in shown.err
        assert shown.err.count("\n") == 1
        assert not shown.out

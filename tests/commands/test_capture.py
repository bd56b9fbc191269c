"""`draftline capture`, and `train --states` without the target's layers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftline import cli
from draftline.config import load_run_config
from draftline.data.split import RunData
from draftline.run import assemble, load_run, train
from draftline.targets.borrowed import Borrowed, LayersNotLoaded, load_borrowed
from draftline.targets.model import load_target
from draftline.transfer.store import read_manifest

WORDS = [
    *("drafter.num_layers=1", "train.max_steps=3", "train.num_anchors=8", "train.tokens_per_row=512"),
    *("train.log_every=1", "train.eval_conversations=4", "pipeline.target_batch_tokens=1", "train.eval_walks=2"),
]
"""A conversation at a time goes through the target, so that states do not depend on what shares a forward."""


def rows(path: Path, answer: str = "Yes, {} it is.") -> Path:
    chats = [
        [{"role": "user", "content": f"Is it {i}?"}, {"role": "assistant", "content": answer.format(i)}]
        for i in range(40)
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    words = ["--target", "tiny", "--data", str(rows(folder / "rows.jsonl")), "--heldout", "6"]
    assert cli.run(["prepare", *words, "--out", str(folder / "data")]) == 0
    return folder / "data"


def captured(data: Path, out: Path, *words: str) -> int:
    given = ["--target", "tiny", "--data", str(data), "--out", str(out), *WORDS, *words]
    return cli.run(["capture", *given])


@pytest.fixture(scope="module")
def states(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("captured") / "states"
    assert captured(data, out) == 0
    return out


def trained(data: Path, out: Path, *words: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    run = load_run(load_run_config(None, ["target.name=tiny", f"data.path={data}", *WORDS, *words]))
    train(run, out)
    return load_file(out / "last" / "drafter.safetensors"), (out / "metrics.jsonl").read_text().splitlines()


def test_a_run_from_states_is_bit_for_bit_the_run_without_and_needs_no_layers(
    data: Path, states: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load_run(load_run_config(None, ["target.name=tiny", f"data.path={data}", f"pipeline.states_path={states}"]))
    assert not run.target.has_layers
    assert all(p.is_meta for p in run.target.decoder_layers.parameters())
    with pytest.raises(LayersNotLoaded, match="read from disk"):
        run.target.model(input_ids=torch.tensor([[5]]))
    wanted, lines = trained(data, tmp_path / "without")
    found, kept_lines = trained(data, tmp_path / "from states", f"pipeline.states_path={states}")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())
    for one, other in zip(map(json.loads, lines), map(json.loads, kept_lines), strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}, "held-out figures and the walk, too"
    before = capsys.readouterr().err
    assert "states of" not in before, "nothing was captured again"


def test_the_command_trains_from_states_and_says_what_it_could_not_examine(
    data: Path, states: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--target", "tiny", "--data", str(data), "--states", str(states), "--out", str(tmp_path / "run"), *WORDS]
    assert cli.run(["train", *words]) == 0
    said = capsys.readouterr().err
    assert "0 errors" in said
    assert "the target's layers are not loaded, because its states are read from disk" in said
    assert "0 could not run" in said


def test_borrowed_parts_are_those_of_the_whole_target() -> None:
    config = load_run_config(None, ["target.name=tiny"]).target
    whole = load_target(config)
    known = Borrowed.of(whole)
    part = load_borrowed(config, known)
    assert part.fingerprint == whole.fingerprint
    states = torch.randn(3, whole.hidden_size)
    assert torch.equal(part.head(states), whole.head(states))
    assert torch.equal(part.embed(torch.tensor([3, 7])), whole.embed(torch.tensor([3, 7])))
    assert (part.vocab_size, part.num_layers, part.dtype) == (whole.vocab_size, whole.num_layers, whole.dtype)


def line_of(capsys: pytest.CaptureFixture[str]) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("draftline: ")]
    assert len(lines) == 1
    return lines[0]


def test_what_does_not_fit_is_one_line_and_leaves_what_is_there(
    data: Path, states: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in states.rglob("*") if path.is_file() and path.name != "lock"}
    capsys.readouterr()
    assert captured(data, states, "drafter.target_layer_ids=[0,2]", "drafter.num_captured_layers=2") == 2
    assert "holds states with target_layer_ids [1, 2, 3, 4, 5], this run wants [0, 2]" in line_of(capsys)
    assert captured(data, states, "--dtype", "fp8") == 2
    assert "holds states with kept float32, this run wants fp8" in line_of(capsys)
    other = tmp_path / "other"
    words = ["--target", "tiny", "--data", str(rows(tmp_path / "rows.jsonl", "No, not {}."))]
    assert cli.run(["prepare", *words, "--out", str(other)]) == 0
    assert captured(other, states) == 2
    assert "holds states of other data" in line_of(capsys)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    assert captured(data, tmp_path / "mine") == 2
    assert "holds thesis.txt, which are no states" in line_of(capsys)
    assert {path: path.read_bytes() for path in before} == before


def test_states_of_another_target_are_refused(data: Path, states: Path, tmp_path: Path) -> None:
    """Its embedding is another: found before anything is trained."""
    folder = tmp_path / "target"
    target = load_target(load_run_config(None, ["target.name=tiny"]).target)
    target.model.get_input_embeddings().weight.mul_(1.01)
    target.model.save_pretrained(folder)
    target.require_tokenizer().save_pretrained(folder)
    words = ["--target", str(folder), "--data", str(data), "--states", str(states), "--out", str(tmp_path / "run")]
    assert cli.run(["train", *words, *WORDS]) == 2
    assert not (tmp_path / "run").exists()


def test_the_format_of_states_that_are_there_is_kept_by_a_run(data: Path, tmp_path: Path) -> None:
    assert captured(data, tmp_path / "states", "--dtype", "bfloat16") == 0
    folders = [path.parent for path in (tmp_path / "states").glob("*/manifest.json")]
    assert [read_manifest(folder)["kept"] for folder in folders] == ["bfloat16"] * 2
    config = load_run_config(
        None, ["target.name=tiny", f"data.path={data}", f"pipeline.states_path={tmp_path / 'states'}"]
    )
    assert load_run(config).config.pipeline.states_dtype == "bfloat16"


def test_data_without_any_conversation_held_out_is_captured(data: Path, tmp_path: Path) -> None:
    run = load_run(load_run_config(None, ["target.name=tiny", f"data.path={data}", *WORDS]))
    few = RunData(run.data.training, np.arange(3), run.data.training, np.arange(0))
    pipeline = run.config.pipeline.model_copy(update={"states_path": tmp_path / "states"})
    lone = assemble(run.config.model_copy(update={"pipeline": pipeline}), run.target, few)
    lone.fill_stores(say=lambda _text: None)
    assert len(lone.stores) == 1

"""What words on the command line become, and what is refused before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from draftline import cli, jobs
from draftline.config import RunConfig, load_run_config
from draftline.errors import ExportError, StorageError
from draftline.run import Gate, RunResult
from draftline.train.run_folder import check_run_folder

PROMPTS = ["Sort these numbers: 5 2 9", "What is 12 + 7?", "Say hello", "Count to 4", "What is 3 + 4?", "Sort: 2 1"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Settings with which `draftline train` starts a run, which ends at once."""
    seen: list[RunConfig] = []

    def train_run(config: RunConfig, out: Path, *, resume: bool, gate: Gate) -> RunResult:
        assert callable(gate)
        check_run_folder(out, config, resume)
        seen.append(config)
        return RunResult(out, 0, 0, 0.0, None, {})

    monkeypatch.setattr("draftline.run.train_run", train_run)
    return seen


def train(out: Path, *words: str) -> int:
    return cli.run(["train", "--out", str(out), *words])


def test_flags_that_are_not_given_leave_the_file_alone(tmp_path: Path, started: list[RunConfig]) -> None:
    target = {"name": "nö", "dtype": "bfloat16", "device": "cpu", "trust_remote_code": True}
    tree = {"target": target, "data": {"path": "somewhere"}, "train": {"device": "cpu"}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    words = ("--config", str(tmp_path / "c.yaml"))
    assert train(tmp_path / "run", *words) == 0
    assert started[0] == load_run_config(tmp_path / "c.yaml")
    assert train(tmp_path / "run", *words, "--target", "näher", "--target-dtype", "float32") == 0
    assert (started[1].target.name, started[1].target.dtype) == ("näher", "float32")
    assert started[1].target.trust_remote_code


def test_a_drafter_to_train_further_is_a_setting(tmp_path: Path, started: list[RunConfig]) -> None:
    assert train(tmp_path / "run", "--target", "tiny", "--init-from", "theirs") == 0
    assert started[0].drafter.init_from == Path("theirs")


def test_one_flag_places_both_halves_unless_a_setting_does(tmp_path: Path, started: list[RunConfig]) -> None:
    words = ("--target", "tiny", "--data", "d", "--device", "cpu")
    assert train(tmp_path / "run", *words) == train(tmp_path / "run", *words, "train.device=cuda:1") == 0
    assert [(c.target.device, c.train.device) for c in started] == [("cpu", "cpu"), ("cpu", "cuda:1")]


def test_a_run_must_be_told_its_target(
    tmp_path: Path, started: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", "--data", "d") == 2
    assert "give --target" in capsys.readouterr().err
    assert not started


def test_resume_starts_from_the_settings_of_the_run(
    tmp_path: Path, started: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["target.name=tiny", "data.path=d", "train.max_steps=7", "optim.learning_rate=0.5"]
    saved = load_run_config(None, words)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved.model_dump(mode="json")))
    assert train(tmp_path, "--resume") == 0
    assert train(tmp_path, "--resume", "--target", "moved", "train.save_every=3") == 0
    assert started[0] == saved
    assert (started[1].target.name, started[1].train.save_every, started[1].train.max_steps) == ("moved", 3, 7)
    assert train(tmp_path, "--resume", "train.max_steps=8") == 2
    assert "train.max_steps is 7" in capsys.readouterr().err


def test_bad_places_for_results_are_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("draftline.targets.model.load_target", lambda _config: pytest.fail("loaded"))
    pair = ["--target", "tiny", "--draft", "d"]
    assert cli.run(["generate", *pair, "--prompt", "x", "--json", str(tmp_path)]) == 2
    assert "name a file" in capsys.readouterr().err
    (tmp_path / "notes.txt").write_text("mine")
    for command in ("export", "import"):
        assert cli.run([command, "source", "--target", "tiny", "--out", str(tmp_path)]) == 2
        assert "not empty" in capsys.readouterr().err


def prepare(tmp_path: Path) -> Path:
    rows = [{"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": "Yes."}]} for p in PROMPTS]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, out = str(tmp_path / "chats.jsonl"), tmp_path / "data"
    assert cli.run(["prepare", "--target", "tiny", "--data", data, "--out", str(out)]) == 0
    return out


def test_prepare_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftline.jobs.load_target", lambda _config: pytest.fail("loaded"))
    assert (prepare(tmp_path) / "meta.json").exists()


def test_data_of_another_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = prepare(tmp_path)
    words = ["--target", "tiny", "--data", str(data), "--recipe", "quickstart", "train.max_steps=1"]
    assert train(tmp_path / "run", *words) == 0
    meta = json.loads((data / "meta.json").read_text())
    (data / "meta.json").write_text(json.dumps({**meta, "tokenizer_hash": "other"}))
    assert train(tmp_path / "other", *words) == 2
    assert "another tokenizer or chat template" in capsys.readouterr().err


def test_an_interrupted_quickstart_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_run_config(None, ["train.max_steps=2"], jobs.quickstart_recipe())
    prompts = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    (tmp_path / "prompts.jsonl").write_text(prompts)
    monkeypatch.setattr(jobs, "quickstart_recipe", lambda: recipe)
    monkeypatch.setattr(jobs, "TINY_FOLDER", tmp_path)
    monkeypatch.setattr(jobs, "QUICKSTART_HELDOUT", 2)
    monkeypatch.setattr(jobs, "QUICKSTART_ANSWER_TOKENS", 6)
    original, out = jobs.export_drafter, tmp_path / "out"

    def fail(**_words: object) -> None:
        raise ExportError("interrupted")

    monkeypatch.setattr(jobs, "export_drafter", fail)
    with pytest.raises(ExportError):
        jobs.quickstart(out)
    monkeypatch.setattr(jobs, "export_drafter", original)
    done = [out / "target" / "config.json", out / "data" / "answers.jsonl", out / "run" / "last" / "state.json"]
    before = [path.stat().st_mtime_ns for path in done]
    for _ in range(2):
        assert jobs.quickstart(out)[1].prompts == 2
    assert [path.stat().st_mtime_ns for path in done] == before
    (out / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="not a quickstart"):
        jobs.quickstart(out)

"""A run with a reduced vocabulary, from the choice of its tokens to decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftline.audit.life import MemoryConversations
from draftline.config import TargetConfig, load_run_config
from draftline.draft.vocabulary import count_supervised, reduce_vocabulary
from draftline.errors import CheckpointError, ConfigError
from draftline.evaluate.generate import generate, generate_plain
from draftline.formats.exporting import export_drafter
from draftline.formats.load import load_drafter
from draftline.options import ExportSettings
from draftline.records import Sample
from draftline.run import assemble, choose_conversations, train
from draftline.targets.model import TINY_FOLDER, load_target, stop_token_ids
from draftline.train.checkpoint import load_draft_model
from tests.engine.tiny_target import VOCAB_SIZE, tiny_samples
from tests.run.small_run import assert_same_run, read_lines, small_data, small_run

REDUCED = "drafter.draft_vocab_size=12"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reduced") / "run"
    small_run(out, REDUCED)
    return out


def test_tokens_are_chosen_from_the_training_answers_and_recorded(run: Path) -> None:
    data = small_data()
    counts_V = count_supervised(data.training, data.training_ids, VOCAB_SIZE)
    wanted = reduce_vocabulary(counts_V, 12, always=())
    kept_ids = load_draft_model(run).kept_ids
    assert kept_ids is not None
    assert torch.equal(kept_ids, wanted.kept_ids)
    identity = json.loads((run / "run.json").read_text())
    assert identity["data"]["draft_vocab_coverage"] == wanted.coverage
    assert 0.3 < wanted.coverage < 0.9
    assert identity["drafter"]["draft_vocab_size"] == 12
    assert "d2t" not in " ".join(load_file(run / "last" / "optimizer.safetensors"))


def test_threads_equal_inline_and_states_on_disk_serve_any_vocabulary(run: Path, tmp_path: Path) -> None:
    stored = f"pipeline.states_path={tmp_path / 'states'}"
    small_run(tmp_path / "threads", REDUCED, "pipeline.mode=threads", "pipeline.target_loops=2")
    assert_same_run(run, tmp_path / "threads")
    small_run(tmp_path / "other", "drafter.draft_vocab_size=20", stored)
    small_run(tmp_path / "stored", REDUCED, stored)
    assert read_lines(tmp_path / "stored")[-1]["step"] == read_lines(run)[-1]["step"]


def test_a_run_is_not_continued_with_other_tokens(tmp_path: Path) -> None:
    samples = [Sample(s.sample_id, s.input_ids.flip(0), s.loss_mask) for s in tiny_samples(24, seed=5)]
    small_run(tmp_path / "run", REDUCED, "train.max_steps=2")
    with pytest.raises(CheckpointError, match=r"other tokens \(d2t\) than the data gives"):
        small_run(tmp_path / "run", REDUCED, "train.max_steps=2", resume=True, samples=samples)


def test_the_whole_size_reduces_nothing(tmp_path: Path) -> None:
    small_run(tmp_path / "run", f"drafter.draft_vocab_size={VOCAB_SIZE}", "train.max_steps=1")
    model = load_draft_model(tmp_path / "run")
    assert model.d2t is None
    assert "d2t" not in model.state_dict()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss.labels=data"], "loss.labels = data has no label"),
        (["pipeline.send=target_ids"], "pipeline.send = target_ids gives no labels"),
        (["drafter.draft_vocab_size=41"], "is more than the 40 rows"),
    ],
)
def test_what_has_no_meaning_with_fewer_tokens_is_refused(tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        small_run(tmp_path / "run", REDUCED, *words)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_on_the_embedded_target_from_training_to_lossless_decoding(tmp_path: Path) -> None:
    target = load_target(TargetConfig(name="tiny"))
    tokenizer = target.require_tokenizer()
    lines = (TINY_FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:12]
    samples, prompts = [], []
    for index, line in enumerate(lines):
        prompt = tokenizer(json.loads(line)["turns"][0])["input_ids"]
        answer = generate_plain(target, torch.tensor([prompt]), max_new_tokens=24).output_ids
        ids = torch.tensor([*prompt, *answer])
        samples.append(Sample(index, ids, torch.arange(len(ids)) >= len(prompt)))
        prompts.append((prompt, answer))
    config = load_run_config(
        None,
        ["drafter.draft_vocab_size=64", "drafter.num_layers=1", "drafter.num_captured_layers=3", "train.max_steps=4"],
    )
    data = choose_conversations(config, MemoryConversations(samples, "memory"), None)
    train(assemble(config, target, data), tmp_path / "run")
    settings = ExportSettings(reader="vllm", dtype="float32")
    export_drafter(source=tmp_path / "run", out=tmp_path / "out", target=target, settings=settings)
    model = load_drafter(tmp_path / "out", target=target).draft_model
    assert model.kept_ids is not None
    kept_ids = set(model.kept_ids.tolist())
    assert stop_token_ids(target.model, tokenizer) <= kept_ids
    for prompt, answer in prompts[:3]:
        found = generate(target, model, torch.tensor([prompt]), max_new_tokens=24)
        assert found.output_ids == answer
        assert {token for block in found.drafted_blocks for token in block} <= kept_ids

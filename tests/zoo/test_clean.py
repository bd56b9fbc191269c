"""Clean runs of many kinds give no finding at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    MistralConfig,
    Olmo2Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from draftline.audit import AuditSubject, run_audit
from draftline.formats import write
from draftline.records import Sample
from tests.zoo.pipeline import MASK, REDUCED, SMALL, Recipe, World, answered, gpt2, in_precision, llama, qwen3, subject


def _drafter(**changes: Any) -> dict[str, dict[str, Any]]:
    return {"drafter": changes}


def _family(kind: type[PretrainedConfig], **changes: Any) -> Recipe:
    return Recipe(target=kind(**{**SMALL, **changes}))


FIVE = {"num_captured_layers": 5, "target_layer_ids": (0, 1, 2, 4, 6)}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

EVERYTHING: dict[str, dict[str, Any]] = {
    "optim": {"name": "muon", "muon_nesterov": False},
    "loss": {"ce": 0.2, "kl": 0.5, "tv": 0.3, "top_k": 9, "weights": "dpace", "denominator": "weights"},
}

CLEAN: dict[str, Recipe] = {
    "qwen3": Recipe(),
    "qwen3, tied head": Recipe(target=qwen3(tie_word_embeddings=True)),
    "llama, tied head": Recipe(target=llama()),
    "llama, untied head": Recipe(target=llama(tie_word_embeddings=False)),
    "llama 3 rotary scaling": Recipe(target=llama(rope_parameters=LLAMA3)),
    "qwen2": _family(Qwen2Config),
    "mistral": _family(MistralConfig),
    "olmo2": _family(Olmo2Config),
    "gemma 2": _family(Gemma2Config, final_logit_softcapping=3.0, query_pre_attn_scalar=16),
    "gemma 3": _family(Gemma3TextConfig, query_pre_attn_scalar=16, sliding_window=16),
    "granite": _family(GraniteConfig, logits_scaling=4.0, embedding_multiplier=3.0),
    "cohere 2": _family(Cohere2Config, logit_scale=0.25),
    "gpt 2, learned positions": Recipe(target=gpt2()),
    "mixture of experts": _family(Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "hybrid with linear attention": _family(Qwen3_5TextConfig, **HYBRID),
    "blocks of 2": Recipe(settings=_drafter(block_size=2)),
    "blocks of 5": Recipe(settings=_drafter(block_size=5)),
    "blocks of 16": Recipe(settings=_drafter(block_size=16)),
    "one captured layer": Recipe(settings=_drafter(num_captured_layers=1, target_layer_ids=(1,))),
    "five captured layers": Recipe(target=qwen3(num_hidden_layers=8), settings=_drafter(**FIVE)),
    "anchor predicts": Recipe(settings=_drafter(sample_from_anchor=True)),
    "all layers sliding": Recipe(settings=_drafter(num_sliding_layers=2, sliding_window=6)),
    "sliding and full layers": Recipe(settings=_drafter(num_layers=3, num_sliding_layers=1, sliding_window=12)),
    "one drafter layer": Recipe(settings=_drafter(num_layers=1)),
    "last hidden states are sent": Recipe(settings={"pipeline": {"send": "last_hidden"}}),
    "labels from the data": Recipe(settings={"loss": {"labels": "data"}}),
    "divided by the weights": Recipe(settings={"loss": {"denominator": "weights"}}),
    "Muon": Recipe(settings={"optim": {"name": "muon", "muon_learning_rate": 3e-3}}),
    "a plateau and a fall": Recipe(settings={"optim": {"schedule": "wsd", "decay_fraction": 0.3}}),
    "a constant rate": Recipe(settings={"optim": {"schedule": "constant"}}),
    "D-PACE weights": Recipe(settings={"loss": {"weights": "dpace"}}),
    "KL to the target": Recipe(settings={"loss": {"ce": 0.0, "kl": 1.0}}),
    "DSpark's mixture": Recipe(settings={"loss": {"ce": 0.1, "tv": 0.9}}),
    "Muon, D-PACE, all distances, a cut": Recipe(settings=EVERYTHING),
    "the same, reduced vocabulary": Recipe(settings={**EVERYTHING, "drafter": {"draft_vocab_size": 64}}),
    "D-PACE, data labels, anchor predicts": Recipe(
        settings={"loss": {"weights": "dpace", "labels": "data"}, **_drafter(sample_from_anchor=True)}
    ),
    "dense attention": Recipe(settings={"train": {"attention": "dense"}}),
    "a chat template": Recipe(data="chats"),
    "chats that were prepared": Recipe(data="rows"),
    "rows that the target answers": Recipe(data="asked"),
    "long conversations": Recipe(data="long"),
    "a target from a checkpoint": Recipe(loaded=True),
    "states kept on disk": Recipe(settings={"pipeline": {"states_path": "states"}}),
    "states kept on disk in eight bits": Recipe(
        settings={"pipeline": {"states_path": "states", "states_dtype": "fp8"}}
    ),
    "two target loops in threads": Recipe(settings={"pipeline": {"mode": "threads", "target_loops": 2}}),
    "a target loop in a process": Recipe(settings={"pipeline": {"mode": "processes"}}),
    "layers of the target to start from": Recipe(settings=_drafter(start_from="target_layers")),
    "no data yet": Recipe(data="none"),
    "reduced vocabulary": REDUCED,
    "reduced vocabulary, anchor predicts": Recipe(settings=_drafter(draft_vocab_size=64, sample_from_anchor=True)),
    "reduced vocabulary, a chat template": Recipe(settings=_drafter(draft_vocab_size=80), data="chats"),
}


PRECISIONS = {
    "bfloat16": ("bfloat16", "bfloat16"),
    "bfloat16 target": ("bfloat16", "float32"),
    "bfloat16 products": ("float32", "bfloat16"),
    "float16 target": ("float16", "float32"),
}
"""Number formats of the target and of the drafter's products, beside float32 for both."""

LOW: dict[str, tuple[str, str]] = {
    "gemma 2": PRECISIONS["bfloat16"],
    "Muon, D-PACE, all distances, a cut": PRECISIONS["bfloat16"],
    "the same, reduced vocabulary": PRECISIONS["bfloat16 target"],
    "qwen3, tied head": PRECISIONS["float16 target"],
}
"""A few for the quick suite: those in which near ties once were taken for faults."""

PASSES = {"train": {"rows_per_step": 4, "epochs": 2}}
UNUSUAL: dict[str, Recipe] = {
    "blocks of 16 in sliding layers": Recipe(settings=_drafter(block_size=16, num_sliding_layers=2, sliding_window=12)),
    "four rows a step, two passes": Recipe(settings=PASSES),
    "one anchor a conversation": Recipe(settings={"train": {"num_anchors": 1}}),
    "no walks": Recipe(settings={"train": {"eval_walks": 0}}),
    "rows shorter than every conversation": Recipe(settings={"train": {"tokens_per_row": 4}}),
    "three target loops": Recipe(settings={"pipeline": {"mode": "threads", "target_loops": 3}}),
    "started from the target's layers": Recipe(settings=_drafter(start_from="target_layers")),
}


def clean(given: AuditSubject) -> None:
    """Assert that nothing is found, and that everything could be looked at."""
    report = run_audit(given)
    assert [(finding.code, finding.evidence) for finding in report.findings] == []
    assert [(result.code, result.reason) for result in report.checks if result.status == "crashed"] == []
    assert report.exit_status == 0


COVERED = {
    *("llama, tied head", "llama, untied head", "qwen2", "mistral", "olmo2", "mixture of experts"),
    *("blocks of 5", "one captured layer", "one drafter layer", "all layers sliding", "dense attention"),
    *("labels from the data", "divided by the weights", "D-PACE weights", "KL to the target", "DSpark's mixture"),
    *("Muon", "a constant rate", "reduced vocabulary, anchor predicts", "qwen3, tied head", "a chat template"),
    *("layers of the target to start from", "five captured layers", "blocks of 2", "anchor predicts"),
    *("Muon, D-PACE, all distances, a cut", "reduced vocabulary", "reduced vocabulary, a chat template"),
    *("two target loops in threads", "last hidden states are sent", "a plateau and a fall"),
}
"""Each is part of another one, or near it: these are left to the slow suite."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in COVERED else []) for name in CLEAN]
)
def test_a_clean_run_gives_no_finding(name: str, tmp_path: Path) -> None:
    clean(subject(CLEAN[name], tmp_path))


@pytest.mark.parametrize("name", LOW)
def test_low_precision_gives_no_finding(name: str, tmp_path: Path) -> None:
    clean(subject(in_precision(CLEAN[name], *LOW[name]), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", [*CLEAN, *UNUSUAL])
def test_no_run_in_low_precision_gives_a_finding(name: str, precision: str, tmp_path: Path) -> None:
    clean(subject(in_precision({**CLEAN, **UNUSUAL}[name], *PRECISIONS[precision]), tmp_path))


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_settings_give_no_finding(name: str, tmp_path: Path) -> None:
    clean(subject(UNUSUAL[name], tmp_path))


def _one_conversation(world: World) -> None:
    world.samples, world.heldout = world.samples[:1], []


def _nothing_held_out(world: World) -> None:
    world.heldout = []


def _one_long(world: World) -> None:
    """One of the length of the target's positions, which is more than an audit looks at as a whole."""
    ids = answered(world.target, world.samples[0].input_ids[None, :8], 500, [MASK])[0]
    world.samples[0] = Sample(0, ids, torch.arange(len(ids)) >= 8)


def _states_on_disk(world: World) -> None:
    world.set("pipeline", states_path=world.folder / "states")


def _trained_further(world: World) -> None:
    folder = world.folder / "drafter"
    write.export_zlab(world.assemble().drafter.model, folder, "bfloat16")
    world.set("drafter", init_from=folder)


@pytest.mark.parametrize(
    "change",
    [_one_conversation, _nothing_held_out, _one_long, _states_on_disk, _trained_further],
    ids=lambda change: change.__name__.strip("_").replace("_", " "),
)
def test_unusual_runs_give_no_finding(change: Callable[[World], None], tmp_path: Path) -> None:
    world = World.of(Recipe(), pytest.MonkeyPatch(), tmp_path)
    change(world)
    clean(world.subject())

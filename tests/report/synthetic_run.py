"""The folder of a run that never was, of any length: smooth curves with noise, all numbers known."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import yaml

from draftline.config import DFlashConfig, RunConfig

SLOTS = 7


def write_run(folder: Path, *, lines: int, total: int | None = None, every: int = 1, evaluate_every: int = 50) -> Path:
    """Write a folder with `lines` lines, one per `every` steps, of a run with `total` steps, by default these."""
    folder.mkdir(parents=True)
    steps = lines * every if total is None else total
    config = RunConfig.model_validate(
        {"target": {"name": "some/target"}, "data": {"path": str(folder.parent / "data")}, "optim": {"clip_norm": 0.5}}
    ).model_dump(mode="json")
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    identity = {
        "code": {"commit": "0123abcd", "diff_sha256": "ffeeddccbbaa9988"},
        "versions": {"draftline": "0.1.0", "torch": "2.13.0"},
        "python": "3.11.7",
        "machine": {"system": "Linux", "devices": ["cpu"]},
        "target": "target-fingerprint",
        "data": {
            "fingerprint": "d1-train+d1-heldout",
            "conversations": 410,
            "heldout_conversations": 50,
            "steps": steps,
        },
        "drafter": drafter_shape().model_dump(mode="json"),
        "sessions": [{"started": "2026-01-01T00:00:00+00:00", "command": ["draftline", "train"], "first_step": 0}],
    }
    (folder / "run.json").write_text(json.dumps(identity))
    noise = random.Random(0)
    with (folder / "metrics.jsonl").open("w") as metrics, (folder / "speed.jsonl").open("w") as speed:
        for line in range(1, lines + 1):
            step = line * every
            metrics.write(json.dumps(metrics_line(step, steps, noise, heldout=line % evaluate_every == 0)) + "\n")
            speed.write(json.dumps(speed_line(step, noise)) + "\n")
    return folder


def drafter_shape() -> DFlashConfig:
    """Of a small drafter with blocks of 8."""
    return DFlashConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=512,
        layer_types=("full_attention", "full_attention"),
        block_size=SLOTS + 1,
        mask_token_id=999,
        target_layer_ids=(1, 3),
        num_target_layers=6,
        sliding_window=None,
        sample_from_anchor=False,
        bos_token_id=1,
        eos_token_id=2,
    )


def metrics_line(step: int, steps: int, noise: random.Random, *, heldout: bool) -> dict[str, Any]:
    """One line of metrics.jsonl, with held-out figures or without."""
    learned = 1 - math.exp(-4 * step / steps)
    figures = {
        "loss": 9 * (1 - learned) + 1.4 + noise.gauss(0, 0.1),
        "accuracy": 0.6 * learned + noise.gauss(0, 0.02),
        "streak": 2.5 * learned + noise.gauss(0, 0.2),
        "data_accuracy": 0.5 * learned,
        "accuracy_by_position": [None, *(0.7 * learned * 0.9**k + noise.gauss(0, 0.02) for k in range(SLOTS))],
        "conditional_accuracy_by_position": [None, *(0.7 * learned + noise.gauss(0, 0.05) for _ in range(SLOTS))],
    }
    held = {f"heldout_{name}": value for name, value in figures.items()} if heldout else {}
    if heldout:
        held["heldout_teacher_forced_acceptance_length"] = 1 + 2 * learned
    rate = {"learning_rate": 1e-3 * (1 - step / steps), "grad_norm": 1 + 30 * (1 - learned) + noise.random()}
    return {"step": step, "tokens": step * 500, "seconds": step * 1.5, **figures, **rate, **held}


def speed_line(step: int, noise: random.Random) -> dict[str, Any]:
    """One line of speed.jsonl."""
    return {
        "step": step,
        "seconds": step * 1.5,
        "target_tokens_per_second": 7000 + noise.gauss(0, 300),
        "drafter_tokens_per_second": 5000 + noise.gauss(0, 300),
        "target_wait_share": 0.3,
        "drafter_wait_share": 0.01,
        "queue_rows": noise.randrange(8),
        "queue_bytes": noise.randrange(10**9),
    }


def evaluation(answers: int = 9, slots: int = SLOTS) -> dict[str, Any]:
    """What `draftline evaluate --json` writes: answer i has i forwards, in which 0, 1, .. tokens stood."""
    turns = []
    for i in range(1, answers + 1):
        accepted = [k % (slots + 1) for k in range(i)]
        length = 1 + sum(accepted) + len(accepted)
        turns.append(
            {
                "file": "prompts.jsonl",
                "number": i,
                "turn": 1,
                "asked": f"Question <{i}>?",
                "input_ids": [1, 2],
                "output_ids": list(range(length)),
                "text_pieces": [f" t{k}" for k in range(length)],
                "target_forwards": i,
                "accepted_per_forward": accepted,
            }
        )
    return {
        "acceptance_length": 2.5,
        "acceptance_length_interval": [2.25, 2.75],
        "acceptance_rate_by_position": [0.8 * 0.8**k for k in range(slots)],
        "conditional_acceptance_rate_by_position": [0.8] * (slots - 1) + [None],
        "accepted_histogram": list(range(slots + 1)),
        "greedy_equal": 1.0,
        "prompts": answers,
        "differences": [],
        "teacher_forced_acceptance_length": 2.5,
        "tokens_per_second": 20.0,
        "baseline_tokens_per_second": 10.0,
        "speedup": 2.0,
        "target": "tiny",
        "target_weights": "target-fingerprint",
        "drafter": "run/checkpoints/step-000100",
        "drafter_weights": "d4af" * 16,
        "per_prompt": turns,
    }


AUDIT = {
    "findings": [
        {
            "code": "TGT002",
            "severity": "error",
            "title": "targets of layer 6",
            "evidence": "65 %",
            "fix": "use the last",
        },
        {"code": "LOS003", "severity": "warning", "title": "gamma", "evidence": "7.0", "fix": "loss.decay_gamma=4"},
    ],
    "checks": [
        {
            "code": code,
            "area": area,
            "looks_for": f"fault {code}",
            "status": status,
            "reason": reason,
            "seconds": seconds,
        }
        for code, area, status, reason, seconds in (
            ("TGT001", "target and captured states", "ok", "", 0.25),
            ("TGT002", "target and captured states", "found", "", 0.5),
            ("LOS003", "labels and loss", "found", "", 0.0),
            ("LOS004", "labels and loss", "skipped", "there is no data yet", 0.0),
            ("EXP001", "exported drafter", "crashed", "KeyError: x", 1.0),
        )
    ],
}
"""What an audit writes."""

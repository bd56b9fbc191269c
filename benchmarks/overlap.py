"""How well target and drafter overlap: `inline`, `threads` and `processes` in turns, on one processor.

    OMP_NUM_THREADS=2 python benchmarks/overlap.py [--rows 40] [--rounds 3] [--case tiny|wide|both] [--json out.json]

Two targets: the embedded one, whose operations are so small that the interpreter counts, and a random one of 40M
parameters. The number of anchors is set so that a drafter step costs as much as a capture, three times as much, or a
third. Time is that of the clock, so the cores have to be free: the load of the machine is printed with the result. The
first rows, and with them the start of a process, are not counted.

    speed-up    time of `inline` over the time of the mode; 2 at best where both halves cost the same
    kept        rows per second over those of the slower half by itself, as `speed.jsonl` gives them: 1 at best
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftline.audit.life import MemoryConversations
from draftline.config import PipelineMode, RunConfig, TargetConfig, load_run_config
from draftline.data.split import RunData
from draftline.engine.process import intra_op_threads
from draftline.records import Sample
from draftline.run import Run, assemble
from draftline.targets.model import Target, build_target, load_target
from draftline.transfer.pack import make_row
from draftline.transfer.stage import DeviceStage

MODES: tuple[PipelineMode, ...] = ("inline", "threads", "processes")
RATIOS = {"equal": 1.0, "drafter 3 times slower": 3.0, "target 3 times slower": 1 / 3}
"""Cost of a drafter step over that of a capture."""
WARM_UP, TOKENS = 4, 128
"""Rows that are not counted; tokens of a conversation."""


@dataclass(frozen=True)
class Measured:
    """One mode in one round: seconds for the rows, and the share of the slower half's own rate."""

    seconds: float
    kept: float


def wide_target() -> Target:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return build_target("wide", Qwen3ForCausalLM(config), None)


def data_of(tokens_per_row: int, rows: int) -> RunData:
    generator = torch.Generator().manual_seed(0)
    count = tokens_per_row // TOKENS * rows
    samples = [
        Sample(i, torch.randint(5, 900, (TOKENS,), generator=generator), torch.arange(TOKENS) >= TOKENS // 4)
        for i in range(count)
    ]
    conversations = MemoryConversations(samples, "random")
    return RunData(conversations, np.arange(count), conversations, np.arange(0))


def config_of(mode: PipelineMode, anchors: int, steps: int) -> RunConfig:
    words = ["drafter.num_layers=2", "drafter.mask_token_id=3", "drafter.num_captured_layers=3"]
    words += ["train.tokens_per_row=512", f"train.num_anchors={anchors}", f"train.max_steps={steps}"]
    # one row waits: what was made ahead in rows that are not counted would count for those that are
    return load_run_config(None, [*words, f"pipeline.mode={mode}", "pipeline.queue_bytes=1"])


def costs(run: Run, rows: int = 6) -> tuple[float, float]:
    """Median seconds of a capture and of a step, one after the other."""
    loop, captures, steps = run.capture_loop(), [], []
    for plan in list(run.sampler.plans())[:rows]:
        start = time.perf_counter()
        row = make_row(plan, run.data.training, loop)
        captures.append(time.perf_counter() - start)
        start = time.perf_counter()
        run.drafter.step([replace(row, last_of_step=True)])
        steps.append(time.perf_counter() - start)
    return statistics.median(captures[1:]), statistics.median(steps[1:])


def anchors_for(target: Target, data: RunData, ratio: float) -> int:
    """Anchors of a conversation at which a step costs `ratio` captures, from two measurements."""
    few, many = 4, 24
    with intra_op_threads(1):
        capture, low = costs(assemble(config_of("inline", few, 99), target, data))
        capture_again, high = costs(assemble(config_of("inline", many, 99), target, data))
    wanted = ratio * (capture + capture_again) / 2
    return max(1, round(few + (wanted - low) / max(1e-6, (high - low) / (many - few))))


def measure(run: Run, rows: int) -> Measured:
    """Train some rows and time them."""
    with intra_op_threads(run.threads), run.engine(0) as engine:
        stage = DeviceStage(engine, run.drafter.device)
        for _ in range(WARM_UP):
            run.drafter.step([next(stage)])
        before, start = engine.statistics(), time.perf_counter()
        tokens = 0
        for _ in range(rows):
            row = next(stage)
            run.drafter.step([row])
            tokens += row.input_ids.numel()
        seconds, after = time.perf_counter() - start, engine.statistics()
    busy = after.target_busy_seconds - before.target_busy_seconds
    target = (after.target_tokens - before.target_tokens) / max(busy, 1e-9)
    drafter = tokens / (seconds - (after.drafter_wait_seconds - before.drafter_wait_seconds))
    return Measured(seconds, tokens / seconds / min(target, drafter))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the modes of the pipeline.")
    for name, default in (("rows", 40), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--case", choices=("tiny", "wide", "both"), default="both")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, object] = {"cores": os.cpu_count(), "load before": os.getloadavg()}
    for case in ("tiny", "wide") if options.case == "both" else (options.case,):
        target = load_target(TargetConfig(name="tiny")) if case == "tiny" else wide_target()
        data = data_of(512, WARM_UP + options.rows)
        for name, ratio in RATIOS.items():
            anchors = anchors_for(target, data, ratio)
            found: dict[str, list[Measured]] = {mode: [] for mode in MODES}
            for _ in range(options.rounds):
                for mode in MODES:
                    run = assemble(config_of(mode, anchors, WARM_UP + options.rows), target, data)
                    found[mode].append(measure(run, options.rows))
            alone = statistics.median(one.seconds for one in found["inline"])
            for mode in MODES[1:]:
                ratios = [a.seconds / b.seconds for a, b in zip(found["inline"], found[mode], strict=True)]
                kept = statistics.median(one.kept for one in found[mode])
                key = f"{case}, {name} ({anchors} anchors), {mode}"
                result[key] = {"speed-up": statistics.median(ratios), "rounds": ratios, "kept": kept}
                load = os.getloadavg()[0]
                spread = f"{statistics.median(ratios):.2f} times inline ({min(ratios):.2f} to {max(ratios):.2f})"
                row = f"inline {alone / options.rows * 1000:.0f} ms a row"
                print(f"{key}: {spread}, {kept:.2f} of the slower half kept; {row}; load {load:.1f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

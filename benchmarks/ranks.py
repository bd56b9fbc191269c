"""Rows per second of two ranks on two cores against one rank on one core, in turns, on a target of SmolLM2's shape.

    python -m benchmarks.ranks [--rounds 3] [--steps 2] [--rows 2] [--sharding none|fsdp] [--json out.json]

Weights and tokens are random; a row is captured and trained on, as in a run in mode `inline`. Each rank is bound to a
core of its own. Time is that of the clock, so both cores have to be free: the load of the machine is printed with the
result, and so is the speed-up of two runs that know nothing of each other, which is what the machine itself allows.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as multiprocessing
from transformers import LlamaConfig, LlamaForCausalLM

from draftline.audit.life import MemoryConversations
from draftline.config import load_run_config, small_model_recipe
from draftline.data.split import RunData
from draftline.engine.torchrun import ranks_of_torchrun
from draftline.records import Sample
from draftline.run import Run, assemble
from draftline.targets.model import build_target
from draftline.train.ranks import ALONE, Ranks
from draftline.transfer.pack import make_row

TOKENS = 256
"""Of a conversation; two make a row."""


def smollm2_like_run(rows_per_step: int, sharding: str) -> Run:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    target = build_target("random", LlamaForCausalLM(shape), None)
    generator = torch.Generator().manual_seed(0)
    samples = [
        Sample(i, torch.randint(5, 40000, (TOKENS,), generator=generator), torch.arange(TOKENS) >= TOKENS // 4)
        for i in range(64)
    ]
    conversations = MemoryConversations(samples, "random")
    data = RunData(conversations, np.arange(len(samples)), conversations, np.arange(0))
    words = ["train.max_steps=10000", "train.tokens_per_row=512", "drafter.mask_token_id=49151", "pipeline.mode=inline"]
    words += [f"train.rows_per_step={rows_per_step}", f"train.sharding={sharding}", "pipeline.threads_per_loop=1"]
    return assemble(load_run_config(None, words, small_model_recipe()), target, data)


def seconds_of(run: Run, ranks: Ranks, first_step: int, steps: int) -> float:
    """Time of some steps, this rank's rows captured and trained on."""
    loop, deal = run.capture_loop(), run.deal(ranks)
    plans = deal.plans(run.sampler.plans(deal.first_row(first_step)))
    start = time.perf_counter()
    for step in range(first_step, first_step + steps):
        rows = [make_row(next(plans), run.data.training, loop) for _ in range(deal.rows_of_step(step))]
        run.drafter.step(rows)
    return time.perf_counter() - start


def rank_of_two(rank: int, port: int, options: argparse.Namespace) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    with ranks_of_torchrun() as ranks:
        measure(smollm2_like_run(options.rows, options.sharding), ranks, options)


def measure(run: Run, ranks: Ranks, options: argparse.Namespace) -> None:
    """Both in turns; what is not measured is that the other rank waits."""
    alone, together, beside = [], [], []
    single, rows = run.drafter.twin(), options.rows * options.steps
    ranks.sharded = options.sharding == "fsdp"
    run.drafter.join(ranks)
    one = Run(run.config, run.data, run.target, single, run.sampler)
    seconds_of(run, ranks, 0, 1)
    load = os.getloadavg()[0]
    for number in range(options.rounds):
        first = 1 + number * options.steps
        alone.append(ranks.first(lambda first=first: seconds_of(one, ALONE, first, options.steps)))
        ranks.gather(None)
        together.append(_slowest(ranks, lambda first=first: seconds_of(run, ranks, first, options.steps)))
        beside.append(_slowest(ranks, lambda first=first: seconds_of(one, ALONE, first, options.steps)))
    if not ranks.leads:
        return
    ratios = [single / both for single, both in zip(alone, together, strict=True)]
    result = {
        "rows_per_second_of_one_rank": rows / statistics.median(alone),
        "rows_per_second_of_two_ranks": rows / statistics.median(together),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "ratio_of_two_runs_side_by_side": statistics.median(2 * a / b for a, b in zip(alone, beside, strict=True)),
        "load": load,
        "settings": vars(options) | {"json": None},
    }
    print(json.dumps(result, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def _slowest(ranks: Ranks, work: Callable[[], float]) -> float:
    return max(ranks.gather(work()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2, help="of a step, of both ranks together")
    parser.add_argument("--sharding", choices=("none", "fsdp"), default="none")
    parser.add_argument("--json", type=Path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(rank_of_two, args=(port, parser.parse_args()), nprocs=2)


if __name__ == "__main__":
    main()

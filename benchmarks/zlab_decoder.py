"""The acceptance length of an exported drafter in z-lab's own decoder, on the prompts of a finished evaluation.

    python benchmarks/zlab_decoder.py --target T --draft FOLDER --evaluation evaluate.json

Needs z-lab's package (`make test` installs it). The drafter must be exported with `--dtype float32`. Prints, side by
side, what `draftline evaluate` counted and what z-lab's decoder gives for the same prompts: acceptance length, how many
outputs are identical, how many need the same number of target forwards.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import dflash.model as zlab
import torch

from draftline.config import TargetConfig
from draftline.targets.model import Target, load_target, stop_token_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--evaluation", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=None)
    words = parser.parse_args()
    zlab._cuda_time = time.perf_counter  # its timer asks for CUDA
    target = load_target(TargetConfig(name=words.target))
    model = zlab.DFlashDraftModel.from_pretrained(words.draft).eval()
    turns = json.loads(words.evaluation.read_text())["per_prompt"][: words.limit]
    tokens = ours = theirs = same_output = same_forwards = 0
    for number, turn in enumerate(turns, start=1):
        output, forwards = decode(target, model, turn["input_ids"], len(turn["output_ids"]))
        tokens += len(turn["output_ids"]) - 1
        ours += turn["target_forwards"]
        theirs += forwards
        same_output += output == turn["output_ids"]
        same_forwards += forwards == turn["target_forwards"]
        print(f"{number}/{len(turns)}  draftline {tokens / ours:.3f}  z-lab {tokens / theirs:.3f}", flush=True)
    print(f"acceptance length (with bonus): draftline {tokens / ours:.3f}, z-lab {tokens / theirs:.3f}")
    print(f"of {len(turns)} turns: {same_output} outputs identical, {same_forwards} with the same number of forwards")


def decode(target: Target, model: zlab.DFlashDraftModel, prompt: list[int], wanted: int) -> tuple[list[int], int]:
    """z-lab's output cut to `wanted` tokens, and the forwards that these needed.

    Its block shrinks near the end of the budget, so it is given a block more than is compared.
    """
    stop_ids = sorted(stop_token_ids(target.model, target.require_tokenizer()))
    stats = zlab.dflash_generate(
        model, target.model, torch.tensor([prompt]), wanted + model.block_size, stop_ids, return_stats=True
    )
    needed, produced = 0, 1
    while produced < wanted:
        produced += stats.acceptance_lengths[needed]
        needed += 1
    return stats.output_ids[0, len(prompt) :][:wanted].tolist(), needed


if __name__ == "__main__":
    main()

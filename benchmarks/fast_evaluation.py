"""Prompts per minute of `evaluate --fast` against decoding each prompt, in one process and by its processor time.

    python -m benchmarks.fast_evaluation --target T --draft FOLDER --prompts FILE [--limit 200] [--decode 10]

The first `--decode` prompts are decoded, the first `--limit` counted along batched answers; what each prompt costs is
compared, the few that `--fast` decodes itself included, and the acceptance lengths of both over the same prompts.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from draftline.config import TargetConfig
from draftline.data.prompts import read_prompts
from draftline.evaluate.benchmark import evaluate_prompts
from draftline.formats.load import load_drafter
from draftline.options import EvaluationSettings
from draftline.targets.model import load_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--decode", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    words = parser.parse_args()
    target = load_target(TargetConfig(name=words.target))
    model = load_drafter(words.draft, target=target).draft_model
    prompts = read_prompts([words.prompts], words.limit)
    settings = EvaluationSettings(max_new_tokens=words.max_new_tokens)
    seconds = {}
    for at_once, asked in ((None, prompts[: words.decode]), (words.batch_size, prompts)):
        started = time.process_time()
        result = evaluate_prompts(target, model, asked, settings, answers_at_once=at_once)
        seconds[at_once] = (time.process_time() - started) / len(asked)
        same = [turn for turn in result.per_prompt if turn.number <= words.decode]
        length = sum(len(t.output_ids) - 1 for t in same) / sum(t.target_forwards for t in same)
        how = "decoded" if at_once is None else f"in batches of {at_once}"
        print(
            f"{len(asked)} prompts {how}: {seconds[at_once]:.2f} s each, acceptance length "
            f"{result.acceptance_length:.3f}, of the first {words.decode} {length:.3f}",
            flush=True,
        )
    print(f"prompts per minute: {seconds[None] / seconds[words.batch_size]:.1f} times as many")


if __name__ == "__main__":
    main()

"""Decode prompts in vLLM, in process, one at a time, and count the forwards of the target that each needed.

    VLLM_ENV/bin/python scripts/vllm_decode.py --target T --draft D --drafted 7 --evaluation evaluate.json \
        --limit 20 --out decoded.json

Runs in an environment of its own, so it imports vLLM and nothing of Draftline; `serve_check.py` starts it. The prompts
are the token ids of a finished `draftline evaluate --json`, each with as many output tokens as there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import vllm

DRAFTS = "vllm:spec_decode_num_drafts"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--drafted", type=int, required=True)
    parser.add_argument("--evaluation", type=Path, required=True)
    parser.add_argument("--limit", type=int, required=True)
    parser.add_argument("--fix", action="store_true", help="see vllm_fix.py")
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()
    if words.fix:
        import vllm_fix  # noqa: F401

    turns = json.loads(words.evaluation.read_text(encoding="utf-8"))["per_prompt"][: words.limit]
    engine = vllm.LLM(
        words.target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=max(len(turn["input_ids"]) + len(turn["output_ids"]) for turn in turns) + 2 * words.drafted,
        max_num_seqs=1,
        disable_log_stats=False,
        speculative_config={"method": "dflash", "model": words.draft, "num_speculative_tokens": words.drafted},
    )
    decoded = []
    for number, turn in enumerate(turns, start=1):
        before = counters(engine)
        wanted = vllm.SamplingParams(temperature=0.0, max_tokens=len(turn["output_ids"]))
        reply = engine.generate({"prompt_token_ids": turn["input_ids"]}, wanted, use_tqdm=False)[0]
        drafts, accepted = (after - b for after, b in zip(counters(engine), before, strict=True))
        decoded.append(
            {"output_ids": list(reply.outputs[0].token_ids), "target_forwards": drafts, "accepted": accepted}
        )
        print(f"{number}/{len(turns)}: {drafts} forwards, {turn['target_forwards']} in Draftline", flush=True)
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    words.out.write_text(json.dumps({"versions": versions, "turns": decoded}) + "\n", encoding="utf-8")


def counters(engine: vllm.LLM) -> tuple[int, int]:
    """Drafts so far (forwards of the target that checked one), and drafted tokens that stood."""
    values = {metric.name: metric.value for metric in engine.get_metrics() if metric.name in (DRAFTS, ACCEPTED)}
    return values.get(DRAFTS, 0), values.get(ACCEPTED, 0)


if __name__ == "__main__":
    main()

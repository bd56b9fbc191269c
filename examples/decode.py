"""Decode a prompt with a drafter, and without one, and show that the answers are the same.

python examples/decode.py TARGET DRAFTER "What is speculative decoding?"
"""

from __future__ import annotations

import sys
from pathlib import Path

from draftline import generate, load_drafter, load_target
from draftline.config import TargetConfig
from draftline.evaluate.generate import Generation, generate_plain
from draftline.targets.model import stop_token_ids


def main(name: str, folder: str, prompt: str, max_new_tokens: int = 64) -> tuple[Generation, Generation, str]:
    """What came out with the drafter and without, and the text."""
    target = load_target(TargetConfig(name=name))
    tokenizer = target.require_tokenizer()
    drafter = load_drafter(Path(folder), target=target).draft_model.to(target.device)
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    stop = stop_token_ids(target.model, tokenizer)
    words = {"max_new_tokens": max_new_tokens, "stop_token_ids": stop}
    drafted = generate(target, drafter, ids["input_ids"], **words)
    plain = generate_plain(target, ids["input_ids"], **words)
    return drafted, plain, tokenizer.decode(drafted.output_ids, skip_special_tokens=True)


if __name__ == "__main__":
    drafted, plain, text = main(*sys.argv[1:4])
    print(text)
    print(f"{len(drafted.output_ids)} tokens in {drafted.target_forwards} forwards, plainly {plain.target_forwards}")
    print("the same answer" if drafted.output_ids == plain.output_ids else "another answer: run `draftline evaluate`")

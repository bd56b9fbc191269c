"""Throughput of `prepare` against the tokenizer alone on the same text, and memory against the size of the file.

    python benchmarks/prepare.py --tokenizer FOLDER [--megabytes 8]

The two take turns for several rounds and the best of each counts, so that a busy machine slows both. Memory is the peak
resident size of a process that prepares a file, for files of one and of four times the size.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from transformers import AutoTokenizer

from draftline.data.prepare import prepare
from draftline.options import PrepareOptions

ROUNDS = 3
_WORDS = (
    "the of answer and to in is we need number find first total each then so multiply by divide result step which "
    "cost per day weather city function return value list string print for while with small large because therefore "
    "question explain write code example text Paris seven twelve money apples hours minutes"
)


def write_conversations(path: Path, size: int) -> list[list[dict[str, str]]]:
    """A file of chats with two turns and long answers, about `size` bytes; returns the chats."""
    chooser, words_of_text, chats, written = random.Random(0), _WORDS.split(), [], 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            chat = [
                {"role": role, "content": " ".join(chooser.choices(words_of_text, k=words)) + "."}
                for role, words in (("user", 40), ("assistant", 200), ("user", 20), ("assistant", 150))
            ]
            written += file.write(json.dumps({"messages": chat}) + "\n")
            chats.append(chat)
    return chats


def throughput(tokenizer_folder: str, size: int) -> None:
    """Print megabytes of rendered text a second of both, and their ratio."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    alone, whole = _Best(), _Best()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.jsonl"
        chats = write_conversations(data, size)
        texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        for number in range(ROUNDS):
            with alone:
                for start in range(0, len(texts), 512):
                    tokenizer(texts[start : start + 512], add_special_tokens=False)
            with whole:
                prepare(tokenizer, [str(data)], Path(folder) / f"out{number}", PrepareOptions())
    for name, of in (("elapsed", lambda best: best.elapsed), ("processor", lambda best: best.processor)):
        print(
            f"{name} time: tokenizer alone {megabytes / of(alone):.2f} MB/s, prepare {megabytes / of(whole):.2f} MB/s, "
            f"ratio {of(alone) / of(whole):.2f}"
        )


class _Best:
    """Shortest elapsed and processor time, seconds, of several rounds."""

    def __init__(self) -> None:
        self.elapsed = self.processor = float("inf")

    def __enter__(self) -> None:
        self._begin = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self.elapsed = min(self.elapsed, time.perf_counter() - self._begin[0])
        self.processor = min(self.processor, time.process_time() - self._begin[1])


def memory(tokenizer_folder: str, size: int) -> None:
    """Print the peak memory of processes that prepare files of two sizes."""
    peaks = []
    for factor in (1, 4):
        command = [sys.executable, __file__, "--tokenizer", tokenizer_folder, "--peak", str(factor * size)]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    print(
        f"peak memory {peaks[0] / 1e6:.0f} MB for a file of {size / 1e6:.0f} MB, "
        f"{peaks[1] / 1e6:.0f} MB for one of {4 * size / 1e6:.0f} MB"
    )


def print_peak(tokenizer_folder: str, size: int) -> None:
    """Prepare a file of this size, and print the peak memory of this process in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.jsonl"
        write_conversations(data, size)
        prepare(AutoTokenizer.from_pretrained(tokenizer_folder), [str(data)], Path(folder) / "out", PrepareOptions())
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="folder of the target's tokenizer")
    parser.add_argument("--megabytes", type=float, default=8.0, help="size of the file")
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print_peak(arguments.tokenizer, arguments.peak)
        return
    size = int(arguments.megabytes * 1e6)
    throughput(arguments.tokenizer, size)
    memory(arguments.tokenizer, size)


if __name__ == "__main__":
    main()

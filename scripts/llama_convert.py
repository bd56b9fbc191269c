"""Run llama.cpp's converter, also on a tokenizer that it does not know.

    python scripts/llama_convert.py LLAMA.CPP/convert_hf_to_gguf.py TARGET --outtype f32 --outfile target.gguf

The converter knows pre-tokenizers by a hash of what they make of one text, and refuses any other, that of the embedded
target for instance. Where prompts and answers travel as token ids nothing is tokenized, and any known one will do.
Needs llama.cpp b11434 or a version with the same package `conversion` beside the converter.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

ANY_PRE_TOKENIZER = "qwen2"


def main() -> None:
    converter = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(converter.parent))
    from conversion.base import TextModel

    known = TextModel.get_vocab_base_pre

    def get_vocab_base_pre(model: Any, tokenizer: Any) -> str:
        try:
            return str(known(model, tokenizer))
        except NotImplementedError:
            print(f"unknown pre-tokenizer: written as {ANY_PRE_TOKENIZER}, serve token ids only", file=sys.stderr)
            return ANY_PRE_TOKENIZER

    TextModel.get_vocab_base_pre = get_vocab_base_pre
    del sys.argv[0]
    runpy.run_path(str(converter), run_name="__main__")


if __name__ == "__main__":
    main()

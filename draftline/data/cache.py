"""The key of prepared data: it changes with everything that can change a token or a mask."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftline.data.conversations import hash_json

_BLOCK = 1 << 22


def dataset_key(
    tokenizer_identity: str,
    sources: Sequence[str | Path],
    options: dict[str, Any],
    answers: dict[str, Any] | None,
) -> str:
    """Hash of the content of the data, the tokenizer, the template's text, the options and Draftline's own code.

    Reads the files once. Standard input and pipes have no content before they are read, so their
    key never repeats.
    """
    return hash_json(
        {
            "data": [_source_hash(source) for source in sources],
            "tokenizer": tokenizer_identity,
            "options": options,
            "answers": answers,
            "code": _code_hash(),
        }
    )


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Identity of vocabulary, merges, normalisation, special tokens and chat template."""
    backend: Any = tokenizer.backend_tokenizer
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return hash_json([backend.to_str(), special, tokenizer.chat_template])


def _source_hash(source: str | Path) -> str:
    if isinstance(source, Path) and source.is_file():
        return _file_hash(source)
    if isinstance(source, Path) and source.is_dir():
        return hash_json([_file_hash(file) for file in sorted(source.rglob("*")) if file.is_file()])
    return uuid.uuid4().hex if isinstance(source, Path) or source == "-" else source


def _file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _code_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()

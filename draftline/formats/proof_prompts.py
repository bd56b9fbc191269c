"""Which prompts a drafter is proven on: those that training never saw, if there are any."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from draftline.data.answers import answer_slots
from draftline.data.dataset import open_data
from draftline.data.prompts import read_prompts
from draftline.data.split import choose_conversations
from draftline.data.template import render_prompt
from draftline.errors import CheckpointError, ConfigError, DataError, TemplateError
from draftline.formats.proof import ProofPrompts, other_target, read_proof
from draftline.records import Sample
from draftline.targets.model import TINY_FOLDER, Target
from draftline.train.checkpoint import read_record
from draftline.train.run_folder import checkpoint_folder

COUNT = 20
"""Prompts of a proof."""

LONGEST = 256
"""Tokens of a prompt; where all are longer, their ends are asked."""

_READ = 400
"""Conversations among which prompts are looked for, spread over all of the data."""

_PLAIN = 16
"""Tokens of a prompt that is the beginning of a plain text, or random."""

_ROOM = 64
"""Positions of the target that are left for an answer."""


def choose_prompts(source: Path, target: Target) -> ProofPrompts:
    """Prompts for the drafter in a folder, as token ids that fit the target with their answers.

    Those of the run's held-out data, else of its training data; of an export, those of its own proof; else those that
    ship with Draftline, through the target's chat template; else random tokens.

    Args:
        source: a run, a checkpoint, or a drafter's folder.
    """
    checkpoint = checkpoint_folder(source)
    found = _of_proof(source, target) if checkpoint is None else _of_data(checkpoint, target)
    return found or _embedded(target) or ProofPrompts("random", _random(target))


def _of_proof(folder: Path, target: Target) -> ProofPrompts | None:
    try:
        proof = read_proof(folder)
    except CheckpointError:  # what is wrong with it is for the audit to say
        return None
    if proof is None or other_target(proof, target) is not None:
        return None
    return ProofPrompts("proof", [list(answer.input_ids) for answer in proof.answers])


def _of_data(checkpoint: Path, target: Target) -> ProofPrompts | None:
    """None where the data is not there any more, or is not what the run was trained on."""
    record = read_record(checkpoint)
    try:
        chosen = choose_conversations(record.run_config, *open_data(record.run_config))
    except (DataError, ConfigError):
        return None
    if chosen.fingerprint != record.data_fingerprint:
        return None
    held_out = [before_answer(chosen.heldout[int(i)]) for i in _spread(chosen.heldout_ids)]
    if ids := _fitting(held_out, target):
        return ProofPrompts("held-out", ids)
    trained = [before_answer(chosen.training[int(i)]) for i in _spread(chosen.training_ids)]
    ids = _fitting(trained, target)
    return ProofPrompts("training", ids) if ids else None


def before_answer(sample: Sample) -> list[int]:
    """Tokens before the first answer of a conversation; of a text that is learned from its beginning, a few."""
    ids, answered = sample.input_ids.tolist(), sample.loss_mask.nonzero()
    start = int(answered[0]) if len(answered) else len(ids)
    return ids[: start or min(_PLAIN, len(ids))]


def _embedded(target: Target) -> ProofPrompts | None:
    if target.tokenizer is None or not target.tokenizer.chat_template:
        return None
    asked = []
    for prompt in read_prompts([str(TINY_FOLDER / "prompts.jsonl")], COUNT):
        slots = answer_slots(prompt.conversation)
        try:
            first = prompt.conversation.model_copy(update={"messages": slots[0]})
            asked.append(render_prompt(target.tokenizer, first, {}))
        except TemplateError:
            return None
    ids = _fitting(asked, target)
    return ProofPrompts("embedded", ids) if ids else None


def _random(target: Target) -> list[list[int]]:
    room = min(_PLAIN, int(target.config.max_position_embeddings) - _ROOM)
    known = target.vocab_size if target.tokenizer is None else min(target.vocab_size, len(target.tokenizer))
    generator = torch.Generator().manual_seed(0)
    ids: list[list[int]] = torch.randint(known, (COUNT, max(1, room)), generator=generator).tolist()
    return ids


def _fitting(prompts: Iterable[list[int]], target: Target) -> list[list[int]]:
    """Up to `COUNT` different prompts that are short enough, evenly spread; the ends of some if all are too long."""
    room = min(LONGEST, int(target.config.max_position_embeddings) - _ROOM)
    different = [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in prompts if ids)]
    if room < 1:
        return []
    short = [ids for ids in different if len(ids) <= room] or [ids[-room:] for ids in different]
    return [short[int(i)] for i in _spread(np.arange(len(short)), COUNT)]


def _spread(ids: np.typing.NDArray[np.int64], count: int = _READ) -> np.typing.NDArray[np.int64]:
    """At most so many of them, evenly spread."""
    return ids if len(ids) <= count else ids[np.linspace(0, len(ids) - 1, count).astype(int)]

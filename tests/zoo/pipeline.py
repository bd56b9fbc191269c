"""Small real runs for the zoo: a random target of four layers, its own answers as data, a fresh drafter."""

from __future__ import annotations

import copy
import json
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from draftline.audit.life import MemoryConversations, drawn_data
from draftline.audit.subject import AuditSubject, subject_of_run
from draftline.config import RunConfig
from draftline.data.answers import AnswerStore
from draftline.data.prepare import prepare
from draftline.data.split import RunData, choose_conversations
from draftline.options import GenerationSettings, PrepareOptions
from draftline.records import Sample
from draftline.run import Run, assemble, open_data
from draftline.targets.model import Target, build_target, load_target
from draftline.targets.regenerate import TargetAnswers

VOCABULARY = 96
MASK = VOCABULARY - 1
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def qwen3(**changes: Any) -> Qwen3Config:
    return Qwen3Config(**{**SMALL, "tie_word_embeddings": False, **changes})


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**SMALL, "tie_word_embeddings": True, **changes})


def gpt2() -> GPT2Config:
    """Learned positions, and other names for the same sizes."""
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 512}
    return GPT2Config(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes)


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Weights so large that every layer changes the prediction, norms that are not 1."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                if "norm" in name:
                    parameter.add_(torch.rand(parameter.shape, generator=generator) - 0.5)
            elif "embed" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif parameter.ndim == 2:
                scale = 1.5 / parameter.shape[1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


@dataclass(frozen=True)
class Recipe:
    """What a run is made of: its target's configuration, its settings, its data.

    Attributes:
        data: `answers` that the target wrote to random tokens, `long` ones among them, `chats` in a template, `rows` of
            chats that go through `prepare`, `asked` rows that the target answers there, or `none` yet.
        loaded: whether the target is loaded from a checkpoint.
    """

    target: PretrainedConfig = field(default_factory=qwen3)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    data: Literal["answers", "long", "chats", "rows", "asked", "none"] = "answers"
    loaded: bool = False


def in_precision(recipe: Recipe, target: str, drafter: str) -> Recipe:
    """The same run with other number formats of the target and of the drafter's products."""
    settings = {name: dict(values) for name, values in recipe.settings.items()}
    for section, key, value in (("target", "dtype", target), ("train", "precision", drafter)):
        settings[section] = {**settings.get(section, {}), key: value}
    return replace(recipe, settings=settings)


REDUCED = Recipe(settings={"drafter": {"draft_vocab_size": 64}})
"""The drafter can say 64 of 96 tokens, the most frequent of the answers."""


def run_config(settings: dict[str, dict[str, Any]]) -> RunConfig:
    drafter = {
        "num_layers": 2,
        "block_size": 8,
        "num_captured_layers": 2,
        "target_layer_ids": (0, 2),
        "mask_token_id": MASK,
    }
    return RunConfig.model_validate({**settings, "drafter": {**drafter, **settings.get("drafter", {})}})


def small_target(config: PretrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Target:
    return build_target("zoo", random_model(config, seed).to(dtype), None)


@dataclass
class World:
    """A run before it is put together: what it will be made of, all of which a plant may change.

    Attributes:
        config: settings of the run.
        target: one live object, used by every run that is assembled from here.
        samples: conversations to train on; none where there is no data yet, or rows are prepared.
        heldout: conversations to be measured with.
        rows: chats as a user has them, prepared when the run is assembled.
        options: how they are prepared.
        answering: how the target answers them there; none: it does not.
        patch: changes code until the end of the test.
        folder: for prepared data.
    """

    config: RunConfig
    target: Target
    samples: list[Sample]
    heldout: list[Sample]
    rows: list[dict[str, Any]]
    options: PrepareOptions
    answering: GenerationSettings | None
    patch: pytest.MonkeyPatch
    folder: Path

    @staticmethod
    def of(recipe: Recipe, patch: pytest.MonkeyPatch, folder: Path) -> World:
        """A clean one; the folder need not exist."""
        config = run_config(recipe.settings)
        dtype = torch.float32 if config.target.dtype == "auto" else getattr(torch, config.target.dtype)
        target = small_target(recipe.target, dtype=dtype)
        if recipe.data in ("chats", "rows", "asked"):
            target = replace(target, tokenizer=chat_tokenizer())
        samples, heldout, rows = _data(target, recipe)
        answering = GenerationSettings(max_new_tokens=14) if recipe.data == "asked" else None
        if recipe.loaded:
            target.model.save_pretrained(folder / "target")
            target = load_target(config.target.model_copy(update={"name": str(folder / "target")}))
        world = World(
            config, target, [*samples], [*heldout], copy.deepcopy(rows), PrepareOptions(), answering, patch, folder
        )
        if config.pipeline.states_path is not None:
            world.set("pipeline", states_path=folder / config.pipeline.states_path)
        return world

    def set(self, section: str, **values: object) -> None:
        """Change settings of one section."""
        part = getattr(self.config, section).model_copy(update=values)
        self.config = self.config.model_copy(update={section: part})

    def data(self) -> RunData:
        """The conversations, numbered anew, or prepared with the tokenizer as it was."""
        if self.rows:
            return self._prepared()
        if not self.samples:
            return drawn_data(self.target, self.config.drafter.mask_token_id)
        numbered = [replace(sample, sample_id=i) for i, sample in enumerate([*self.samples, *self.heldout])]
        conversations, ids = MemoryConversations(numbered, "zoo"), np.arange(len(numbered))
        return RunData(conversations, ids[: len(self.samples)], conversations, ids[len(self.samples) :])

    def _prepared(self) -> RunData:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        tokenizer, out = chat_tokenizer(), self.folder / "data"
        with closing(AnswerStore(self.folder / "answers.jsonl")) as store:
            asked = self.answering
            answerer = None if asked is None else TargetAnswers(self.target.model, tokenizer, store, asked)
            prepare(tokenizer, [str(file)], out, self.options, answerer)
        self.set("data", path=self.folder / "data", heldout_fraction=0.25)
        return choose_conversations(self.config, *open_data(self.config))

    def assemble(self) -> Run:
        """A run, with everything that was planted."""
        data = self.data()
        return assemble(self.config, self.target, data)

    def subject(self) -> AuditSubject:
        """The same for an audit."""
        run = self.assemble()
        return subject_of_run(run) if self.rows or self.samples else AuditSubject(run)


def subject(recipe: Recipe | None = None, folder: Path = Path()) -> AuditSubject:
    """A clean run for an audit; the folder is for recipes that write something."""
    return World.of(recipe or Recipe(), pytest.MonkeyPatch(), folder).subject()


Conversations = tuple[list[Sample], list[Sample], list[dict[str, Any]]]
"""To train on, held out, and rows to be prepared."""

_MADE: dict[str, Conversations] = {}
"""By target: writing answers takes longer than an audit."""


def _data(target: Target, recipe: Recipe) -> Conversations:
    make = {
        "answers": own_answers,
        "long": long_answers,
        "chats": chats,
        "rows": chat_rows,
        "asked": chat_rows,
        "none": lambda _target: ([], [], []),
    }
    key = f"{recipe.data} {target.dtype} {recipe.target.to_json_string()}"
    if key not in _MADE:
        _MADE[key] = make[recipe.data](target)
    return _MADE[key]


@torch.no_grad()
def answered(target: Target, prompts: Tensor, length: int, never: list[int]) -> Tensor:
    """[n, P + length] prompts of one length and greedy answers, without tokens that answers must not have."""
    ids = prompts
    for _ in range(length):
        logits = target.model(input_ids=ids).logits[:, -1]
        logits[:, never] = float("-inf")
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids


def own_answers(target: Target, count: int = 12) -> Conversations:
    """Conversations whose answers the target wrote greedily."""
    prompts = torch.randint(3, MASK, (count, 8), generator=torch.Generator().manual_seed(3))
    rows = answered(target, prompts, 24, [MASK])
    samples = [Sample(index, ids, torch.arange(32) >= 8) for index, ids in enumerate(rows)]
    return samples[: count - 2], samples[count - 2 :], []


def long_answers(target: Target) -> Conversations:
    """The same, a few of them several times as long; the first that is held out has a long prompt."""
    samples, heldout, _ = own_answers(target)
    prompts = torch.randint(3, MASK, (3, 8), generator=torch.Generator().manual_seed(4))
    rows = answered(target, prompts, 112, [MASK])
    longer = [Sample(0, ids, torch.arange(len(ids)) >= start) for ids, start in zip(rows, (8, 8, 90), strict=True)]
    return [*samples[:7], *longer[:2]], [longer[2], *samples[7:], *heldout], []


CHAT_TEMPLATE = (
    "{% if polite %}<|im_start|>system\nPlease.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter, and ChatML."""
    letters = ["<pad>", "<s>", "<|im_end|>", "<|im_start|>", "\n", *map(chr, range(32, 123 - 1))]
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(letters)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )


def _asked(target: Target, count: int) -> tuple[int, Tensor]:
    """Tokens of a prompt, and [count, tokens] prompts in the template with the target's answers, not ended."""
    tokenizer = target.require_tokenizer()
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in _questions(count)
    ]
    prompts = torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])
    return prompts.shape[1], answered(target, prompts, 14, [*range(4), MASK])


def _questions(count: int) -> list[str]:
    return [f"Say {index}." for index in range(count)]


def chats(target: Target, count: int = 8) -> Conversations:
    """Conversations in the template, answered by the target, each ended by the template's own token."""
    length, rows = _asked(target, count)
    end = torch.tensor([target.require_tokenizer().convert_tokens_to_ids("<|im_end|>")])
    samples = [
        Sample(index, torch.cat([ids, end]), torch.arange(len(ids) + 1) >= length) for index, ids in enumerate(rows)
    ]
    return samples, [], []


def chat_rows(target: Target, count: int = 8) -> Conversations:
    """The same conversations as a user has them."""
    length, rows = _asked(target, count)
    answers = target.require_tokenizer().batch_decode(rows[:, length:])
    messages = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in zip(_questions(count), answers, strict=True)
    ]
    return [], [], [{"messages": each} for each in messages]

"""Small real runs for the zoo: a random target of four layers, its own answers as data, a fresh drafter."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

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

from draftline.audit.folders import subject_of_run
from draftline.audit.life import MemoryConversations, drawn_data
from draftline.audit.subject import AuditSubject, PreparedData
from draftline.config import RunConfig
from draftline.data.conversations import hash_json
from draftline.data.split import RunData
from draftline.data.template import tokenizer_hash
from draftline.records import Sample
from draftline.run import Run, assemble
from draftline.targets.model import Target, build_target

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
    """One pipeline: its target's configuration and the settings of the run."""

    target: PretrainedConfig = field(default_factory=qwen3)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    with_data: bool = True
    chat: bool = False


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


def small_target(config: PretrainedConfig, seed: int = 0) -> Target:
    return build_target("zoo", random_model(config, seed), None)


@dataclass
class World:
    """A run before it is put together: what it will be made of, all of which a plant may change.

    Attributes:
        config: settings of the run.
        target: one live object, used by every run that is assembled from here.
        samples: conversations to train on; none: there is no data yet.
        heldout: conversations to be measured with.
        report, meta: what the prepared folder says of them.
        patch: changes code until the end of the test.
    """

    config: RunConfig
    target: Target
    samples: list[Sample]
    heldout: list[Sample]
    report: dict[str, Any]
    meta: dict[str, Any]
    patch: pytest.MonkeyPatch

    @staticmethod
    def of(recipe: Recipe, patch: pytest.MonkeyPatch) -> World:
        """A clean one."""
        config, target = run_config(recipe.settings), small_target(recipe.target)
        if recipe.chat:
            target = replace(target, tokenizer=chat_tokenizer())
        data = _answers(target, recipe) or PreparedData([])
        return World(config, target, [*data.samples], [*data.heldout], data.report, data.meta, patch)

    @property
    def data(self) -> RunData:
        """The conversations, numbered anew."""
        if not self.samples:
            return drawn_data(self.target, self.config.drafter.mask_token_id)
        numbered = [replace(sample, sample_id=i) for i, sample in enumerate([*self.samples, *self.heldout])]
        conversations, ids = MemoryConversations(numbered, "zoo"), np.arange(len(numbered))
        return RunData(conversations, ids[: len(self.samples)], conversations, ids[len(self.samples) :])

    def set(self, section: str, **values: object) -> None:
        """Change settings of one section."""
        part = getattr(self.config, section).model_copy(update=values)
        self.config = self.config.model_copy(update={section: part})

    def assemble(self) -> Run:
        """A run, with everything that was planted."""
        return assemble(self.config, self.target, self.data)

    def subject(self) -> AuditSubject:
        """The same for an audit."""
        if not self.samples:
            return AuditSubject(self.assemble())
        made = subject_of_run(self.assemble())
        assert made.data is not None
        return replace(made, data=replace(made.data, report=self.report, meta=self.meta))


def subject(recipe: Recipe | None = None) -> AuditSubject:
    """A clean run for an audit."""
    return World.of(recipe or Recipe(), pytest.MonkeyPatch()).subject()


_ANSWERED: dict[str, PreparedData] = {}
"""Answers by target: writing them takes longer than an audit."""


def _answers(target: Target, recipe: Recipe) -> PreparedData | None:
    if not recipe.with_data:
        return None
    key = f"{recipe.chat} {recipe.target.to_json_string()}"
    if key not in _ANSWERED:
        _ANSWERED[key] = chats(target) if recipe.chat else own_answers(target)
    return _ANSWERED[key]


@torch.no_grad()
def _answered(target: Target, prompts: Tensor, length: int, never: list[int]) -> Tensor:
    """[n, P + length] prompts of one length and greedy answers, without tokens that answers must not have."""
    ids = prompts
    for _ in range(length):
        logits = target.model(input_ids=ids).logits[:, -1]
        logits[:, never] = float("-inf")
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids


def own_answers(target: Target, count: int = 12) -> PreparedData:
    """Conversations whose answers the target wrote greedily."""
    prompts = torch.randint(3, MASK, (count, 8), generator=torch.Generator().manual_seed(3))
    rows = _answered(target, prompts, 24, [MASK])
    samples = [Sample(index, ids, torch.arange(32) >= 8) for index, ids in enumerate(rows)]
    heldout = samples[count - 2 :]
    return PreparedData(samples[: count - 2], heldout, num_samples=count - 2, num_tokens=32 * (count - 2))


CHAT_TEMPLATE = (
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


def chats(target: Target, count: int = 8) -> PreparedData:
    """Conversations in the template, answered by the target, each ended by the template's own token."""
    tokenizer = target.require_tokenizer()
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Say {index}."}], tokenize=False, add_generation_prompt=True
        )
        for index in range(count)
    ]
    prompts = torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])
    rows = _answered(target, prompts, 14, [*range(4), MASK])
    end = torch.tensor([tokenizer.convert_tokens_to_ids("<|im_end|>")])
    samples = [
        Sample(index, torch.cat([ids, end]), torch.arange(len(ids) + 1) >= prompts.shape[1])
        for index, ids in enumerate(rows)
    ]
    meta = {"template_hash": hash_json(tokenizer.chat_template), "tokenizer_hash": tokenizer_hash(tokenizer)}
    return PreparedData(samples, meta=meta, num_samples=count, num_tokens=sum(map(len, samples)))

"""Faults of packed rows and of the data itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from draftline.data.accounting import Accounting
from draftline.data.prepare import Preparation
from draftline.data.template import ChatTemplate
from draftline.options import GenerationSettings
from draftline.records import Sample
from draftline.targets import regenerate as regenerate_module
from tests.zoo import pipeline
from tests.zoo.fault import fault, packing, unchecked_data, with_samples
from tests.zoo.pipeline import MASK, Recipe, World, chat_tokenizer

CHAT = Recipe(data="chats")
ROWS = Recipe(data="rows")
ASKED = Recipe(data="asked")


# Packing.


@fault("positions go on from one conversation to the next", "B51", "DAT001")
def _(world: World) -> None:
    packing(world, lambda row: replace(row, position_ids=torch.arange(row.input_ids.shape[1])[None]))


@fault("one document for the whole row", "B51", "DAT001")
def _(world: World) -> None:
    packing(world, lambda row: replace(row, document_ids=torch.zeros_like(row.document_ids)))


@fault("loss mask one place late", "B43", "DAT001")
def _(world: World) -> None:
    packing(world, lambda row: replace(row, loss_mask=row.loss_mask.roll(1, 1)))


@fault("states of the row one token off", "B25", "DAT001")
def _(world: World) -> None:
    packing(world, lambda row: replace(row, hidden_states_packed=row.hidden_states_packed.roll(1, 1)))


@fault("training targets of the row shifted", "B43", "DAT001")
def _(world: World) -> None:
    packing(world, lambda row: replace(row, target_ids=row.target_ids.roll(-1, 1)))


# Conversations.


@fault("nothing is supervised", "B05", "DAT002")
def _(world: World) -> None:
    with_samples(world, lambda s: replace(s, loss_mask=torch.zeros_like(s.loss_mask)))


@fault("answers cut off by the length limit in some rows", "B06", "DAT002")
def _(world: World) -> None:
    with_samples(world, lambda s: replace(s, loss_mask=s.loss_mask & torch.tensor(s.sample_id % 2 == 0)))


@fault("the user's text is supervised", "B03", "DAT003", CHAT)
def _(world: World) -> None:
    with_samples(world, lambda s: replace(s, loss_mask=~s.loss_mask))


@fault("the mask begins two tokens early", "B04", "DAT003", CHAT)
def _(world: World) -> None:
    with_samples(world, lambda s: replace(s, loss_mask=s.loss_mask | s.loss_mask.roll(-2)))


@fault("the end of the turn is not supervised", "B105", "DAT004", CHAT)
def _(world: World) -> None:
    end = chat_tokenizer().convert_tokens_to_ids("<|im_end|>")
    with_samples(world, lambda s: replace(s, loss_mask=s.loss_mask & (s.input_ids != end)))


@fault("answers that somebody else wrote", "B18", "DAT005")
def _(world: World) -> None:
    generator = torch.Generator().manual_seed(1)

    def foreign(sample: Sample) -> Sample:
        others = torch.randint(3, 95, sample.input_ids.shape, generator=generator)
        return replace(sample, input_ids=torch.where(sample.loss_mask, others, sample.input_ids))

    with_samples(world, foreign)


@fault("two BOS tokens", "B14", "DAT006")
def _(world: World) -> None:
    def doubled(sample: Sample) -> Sample:
        ids = sample.input_ids.clone()
        ids[:2] = 1
        return replace(sample, input_ids=ids)

    with_samples(world, doubled)


@fault("ids of another tokenizer", "B26", "DAT006")
def _(world: World) -> None:
    unchecked_data(world)
    world.samples = [Sample(0, torch.tensor([5, 200, 6, 7]), torch.tensor([False, True, True, True]))]


@fault("held-out conversations are trained on", "W40", "DAT007")
def _(world: World) -> None:
    world.heldout = world.samples[:3]


@fault("the same conversation many times", "W40", "DAT007")
def _(world: World) -> None:
    world.samples = [world.samples[0]] * 8


@fault("answers of one token", "B07", "DAT008")
def _(world: World) -> None:
    with_samples(world, lambda s: replace(s, loss_mask=torch.arange(len(s)) == 12))


@fault("conversations longer than the positions", "B54", "DAT009")
def _(world: World) -> None:
    unchecked_data(world)
    with_samples(world, lambda s: Sample(s.sample_id, s.input_ids.repeat(20), s.loss_mask.repeat(20)))


@fault("rows vanish without a reason", "B02", "DAT010", ROWS)
def _(world: World) -> None:
    clean = Preparation._keep

    def keep(preparation: Preparation, raw: Any, *rest: Any) -> None:
        if raw.line % 3:
            clean(preparation, raw, *rest)

    world.patch.setattr(Preparation, "_keep", keep)
    world.patch.setattr(Accounting, "check", lambda _accounting: None)


@fault("the template changed after the data was prepared", "B15", "DAT011", ROWS)
def _(world: World) -> None:
    tokenizer = world.target.require_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("\n", "")


@fault("data rendered with thinking, served without", "B99", "EVL007", ROWS)
def _(world: World) -> None:
    world.options = world.options.model_copy(update={"template_options": {"enable_thinking": True}})


@fault("half of the answers think first", "W47", "EVL007", ROWS)
def _(world: World) -> None:
    for row in world.rows[::2]:
        answer = row["messages"][1]
        answer["content"] = f"<think> Well. </think> {answer['content']}"


@fault("decoding does not stop at the token that ends a turn", "B105", "EVL007", ROWS)
def _(world: World) -> None:
    def other_end() -> PreTrainedTokenizerFast:
        tokenizer = chat_tokenizer()
        tokenizer.eos_token = "<s>"
        return tokenizer

    world.patch.setattr(pipeline, "chat_tokenizer", other_end)
    world.target = replace(world.target, tokenizer=other_end())
    world.target.config.eos_token_id = world.target.model.generation_config.eos_token_id = 1


@fault("control tokens are split into letters", "B14", "DAT006", ROWS)
def _(world: World) -> None:
    def encode(template: ChatTemplate, texts: Sequence[str]) -> list[Any]:
        found = template.tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)
        return list(found.encodings)

    world.patch.setattr(ChatTemplate, "encode", encode)


@fault("the target answers under another template option than its data is prepared with", "B99", "DAT005", ASKED)
def _(world: World) -> None:
    world.answering = GenerationSettings(max_new_tokens=14, template_options={"polite": True})


@fault("the target answers on behind its own stop token", "B105", "DAT004", ASKED)
def _(world: World) -> None:
    world.patch.setattr(regenerate_module, "stop_token_ids", lambda _model, _tokenizer: frozenset({0}))
    world.set("drafter", mask_token_id=MASK - 2)  # the longer answers contain the one that others leave alone

"""Faults of `prepare`, of counters that nobody reads, and of what a run hands on between its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from draftline.data import prepare as prepare_module
from draftline.data import render as render_module
from draftline.data.conversations import Conversation, hash_json
from draftline.data.spans import Located
from draftline.data.template import ChatTemplate
from draftline.train.checkpoint import TrainState
from draftline.train.log import RunLog
from tests.zoo.fault import fault
from tests.zoo.pipeline import Recipe, World

ROWS = Recipe(data="rows")


def _messages(world: World, change: Any) -> None:
    """Other messages where conversations are rendered."""
    clean = render_module.locate_answers

    def locate(template: ChatTemplate, chat: Conversation) -> Any:
        return clean(template, chat.model_copy(update={"messages": tuple(change(chat.messages))}))

    world.patch.setattr(render_module, "locate_answers", locate)


@fault("prepare loses system prompts", "B11", "DAT013", ROWS)
def _(world: World) -> None:
    _messages(world, lambda messages: [message for message in messages if message.role != "system"])


@fault("prepare keeps the last turn alone", "B11", "DAT013", ROWS)
def _(world: World) -> None:
    _messages(world, lambda messages: messages[-2:])


@fault("prepare joins the blanks of answers", "B11", "DAT013", ROWS)
def _(world: World) -> None:
    def joined(messages: Any) -> Any:
        return [message.model_copy(update={"content": " ".join(message.content.split())}) for message in messages]

    _messages(world, joined)


@fault("prepare supervises the last answer alone", "B05", "DAT013", ROWS)
def _(world: World) -> None:
    clean = render_module._supervised_ranges

    def last(located: Located, *rest: Any) -> Any:
        return clean(replace(located, spans=located.spans[-1:]), *rest)

    world.patch.setattr(render_module, "_supervised_ranges", last)


@fault("prepare leaves the first token of answers out", "B04", "DAT013", ROWS)
def _(world: World) -> None:
    clean = render_module.token_mask

    def mask(offsets: Sequence[tuple[int, int]], ranges: Sequence[tuple[int, int]]) -> Any:
        return clean(offsets, [(start + 1, end) for start, end in ranges])

    world.patch.setattr(render_module, "token_mask", mask)


@fault("prepare cuts on the other side", "B06", "DAT013", ROWS)
def _(world: World) -> None:
    clean = prepare_module.Preparation._cut

    def cut(preparation: Any, result: Any) -> Any:
        flipped = replace(result, input_ids=result.input_ids[::-1], loss_mask=result.loss_mask[::-1])
        made = clean(preparation, flipped)
        if not hasattr(made, "input_ids"):
            return made
        return replace(made, input_ids=made.input_ids[::-1].copy(), loss_mask=made.loss_mask[::-1].copy())

    world.patch.setattr(prepare_module.Preparation, "_cut", cut)


@fault("prepare keeps copies", "W40", "DAT013", ROWS)
def _(world: World) -> None:
    world.patch.setattr(prepare_module.Preparation, "_known", lambda *_: False)


@fault("prompts are told apart by their answers", "W40", "DAT013", ROWS)
def _(world: World) -> None:
    world.patch.setattr(Conversation, "prompt_hash", lambda chat: hash_json(chat.model_dump(mode="json")))


@fault("the log counts supervised tokens alone", "B95", "RUN007", ROWS)
def _(world: World) -> None:
    clean = TrainState.count

    def count(state: TrainState, metrics: Any, next_row: int) -> None:
        clean(state, replace(metrics, tokens=metrics.slots), next_row)

    world.patch.setattr(TrainState, "count", count)


@fault("the log shows the rate of the next update", "B95", "RUN007", ROWS)
def _(world: World) -> None:
    clean = RunLog.__init__

    def init(log: RunLog, *, learning_rate: Any, **given: Any) -> None:
        clean(log, learning_rate=lambda step: learning_rate(step + 1), **given)

    world.patch.setattr(RunLog, "__init__", init)

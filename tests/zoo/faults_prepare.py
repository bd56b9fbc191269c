"""Faults of `prepare`, of counters that nobody reads, and of what a run hands on between its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftline.data import messages as messages_module
from draftline.data import prepare as prepare_module
from draftline.data import render as render_module
from draftline.data import shapes as shapes_module
from draftline.data.conversations import Conversation, hash_json
from draftline.data.spans import Located
from draftline.data.split import HeldoutPrompts
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


# Fields of rows, and options of the command.


@fault("prepare learns answers whatever their flags say", "B05", "DAT013", ROWS)
def _(world: World) -> None:
    world.patch.setattr(messages_module.MessageReader, "train_flag", lambda *_: True)


@fault("prepare puts no system prompt of a row before its messages", "B11", "DAT013", ROWS)
def _(world: World) -> None:
    world.patch.setattr(shapes_module, "_with_system", lambda _row, messages: messages)


@fault("prepare renders rows without their template options", "B11", "DAT013", ROWS)
def _(world: World) -> None:
    world.patch.setattr(shapes_module, "_template_options", lambda _row: {})


@fault("prepare lets cut answers end", "B04", "DAT013", ROWS)
def _(world: World) -> None:
    world.patch.setattr(shapes_module, "finish_reason", lambda _row: None)


@fault("prepare learns the first answer where the last is wanted", "B05", "DAT013", ROWS)
def _(world: World) -> None:
    clean = render_module._supervised_ranges

    def first(located: Located, messages: Any, options: Any) -> Any:
        ranges = clean(located, messages, options.model_copy(update={"supervise": "answers"}))
        return ranges[:1] if options.supervise == "last" else ranges

    world.patch.setattr(render_module, "_supervised_ranges", first)


@fault("--heldout counts conversations", "W40", "DAT013", ROWS)
def _(world: World) -> None:
    offer, chosen = HeldoutPrompts.offer, HeldoutPrompts.hashes.fget
    rows: Counter[int] = Counter()
    assert chosen is not None

    def counting(prompts: HeldoutPrompts, prompt_hash: int, conversation: Conversation) -> None:
        rows[prompt_hash] += 1
        offer(prompts, prompt_hash, conversation)

    def hashes(prompts: HeldoutPrompts) -> list[int]:
        kept = chosen(prompts)
        return [each for place, each in enumerate(kept) if sum(rows[one] for one in kept[:place]) < prompts._count]

    world.patch.setattr(HeldoutPrompts, "offer", counting)
    world.patch.setattr(HeldoutPrompts, "hashes", property(hashes))


@fault("a prompt with other blanks is another prompt", "W40", "DAT013", ROWS)
def _(world: World) -> None:
    def told_apart(chat: Conversation) -> str:
        return hash_json([message.content for message in chat.messages if message.role == "user"])

    world.patch.setattr(Conversation, "prompt_hash", told_apart)


@fault("the last line of a file is lost where it has no end", "B06", "DAT013", ROWS)
def _(world: World) -> None:
    clean = prepare_module.read_rows

    def rows(sources: Sequence[Any], split: Any) -> Any:
        ended = all(Path(source).read_bytes().endswith(b"\n") for source in sources)
        return iter(list(clean(sources, split))[: None if ended else -1])

    world.patch.setattr(prepare_module, "read_rows", rows)


@fault("a folder that was prepared with other options is taken as it is", "B15", "DAT013", ROWS)
def _(world: World) -> None:
    clean = prepare_module._dataset_key

    def key(tokenizer: str, sources: Any, _options: Any, answers: Any) -> str:
        return clean(tokenizer, sources, {}, answers)

    world.patch.setattr(prepare_module, "_dataset_key", key)


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

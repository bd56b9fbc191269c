"""Faults of what `evaluate` asks, samples and reports, of a server's counters, and of the command that starts one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from draftline.data import prompts as prompts_module
from draftline.data.conversations import Conversation
from draftline.evaluate import acceptance as acceptance_module
from draftline.evaluate import answer as answer_module
from draftline.evaluate import benchmark as benchmark_module
from draftline.evaluate import draft_length as draft_length_module
from draftline.evaluate import generate as generate_module
from draftline.evaluate import result as result_module
from draftline.evaluate import served as served_module
from draftline.evaluate import server as server_module
from draftline.evaluate.acceptance import Acceptance
from draftline.evaluate.engines import DraftCounts, Engine
from draftline.evaluate.generate import GREEDY
from draftline.formats.programs import PROGRAMS
from draftline.options import Sampling
from draftline.targets.head import ReducedHead
from tests.zoo.fault import fault
from tests.zoo.pipeline import REDUCED, Recipe, World

CHATS = Recipe(data="chats")
REDUCED_CHATS = Recipe(data="chats", settings={"drafter": {"draft_vocab_size": 80}})


# What is walked over.


@fault("the walk ends with the first chunk of anchors", "B94", "EVL005")
def _(world: World) -> None:
    clean = acceptance_module._streaks_of_answer

    def streaks(target: Any, model: Any, captured: Any, anchors: Tensor) -> Tensor:
        return clean(target, model, captured, anchors[: acceptance_module.CHUNK_SIZE // model.config.block_size])

    world.patch.setattr(acceptance_module, "_streaks_of_answer", streaks)


@fault("the walk takes the streaks of its first chunk again", "B94", "EVL005")
def _(world: World) -> None:
    clean = acceptance_module._streaks_of_answer

    def streaks(target: Any, model: Any, captured: Any, anchors: Tensor) -> Tensor:
        first = clean(target, model, captured, anchors[: acceptance_module.CHUNK_SIZE // model.config.block_size])
        return first.repeat(2 + len(anchors) // max(1, len(first)))[: len(anchors)]

    world.patch.setattr(acceptance_module, "_streaks_of_answer", streaks)


# How answers are sampled.


@fault("a reduced vocabulary draws from the rows above its own", "P9", "EVL009", REDUCED)
def _(world: World) -> None:
    clean = ReducedHead.to_whole
    world.patch.setattr(ReducedHead, "to_whole", lambda head, values: clean(head, values).roll(1, -1))


@fault("the drafter is asked at temperature 1", "B92", "EVL009")
def _(world: World) -> None:
    clean = generate_module.BlockDrafter.__init__

    def init(drafter: Any, target: Any, model: Any, sampling: Sampling, generator: Any) -> None:
        clean(drafter, target, model, sampling if sampling.greedy else Sampling(temperature=1.0), generator)

    world.patch.setattr(generate_module.BlockDrafter, "__init__", init)


@fault("the first token of a sampled answer is the likeliest", "B92", "EVL009")
def _(world: World) -> None:
    clean = generate_module.choose
    world.patch.setattr(generate_module, "choose", lambda _sampling, *rest: clean(GREEDY, *rest))


@fault("blocks are verified at temperature 1", "B92", "EVL009")
def _(world: World) -> None:
    clean = generate_module._verify

    def verify(proposal: Any, logits: Tensor, sampling: Sampling, generator: Any) -> Any:
        return clean(proposal, logits, sampling if sampling.greedy else Sampling(temperature=1.0), generator)

    world.patch.setattr(generate_module, "_verify", verify)


@fault("an evaluation is greedy whatever its temperature", "B92", "EVL011", CHATS)
def _(world: World) -> None:
    clean = answer_module.generate
    world.patch.setattr(answer_module, "generate", lambda *a, **k: clean(*a, **{**k, "sampling": GREEDY}))


@fault("an evaluation halves the temperature", "B92", "EVL011", CHATS)
def _(world: World) -> None:
    clean = answer_module.generate

    def halved(*given: Any, sampling: Sampling, **named: Any) -> Any:
        half = sampling.model_copy(update={"temperature": sampling.temperature / 2})
        return clean(*given, sampling=half, **named)

    world.patch.setattr(answer_module, "generate", halved)


@fault("all turns of an evaluation share a generator's seed", "B92", "EVL011", CHATS)
def _(world: World) -> None:
    clean = answer_module._generator
    world.patch.setattr(answer_module, "_generator", lambda target, settings, _place: clean(target, settings, (0, 0)))


# What is asked.


@fault("an evaluation forgets its template options", "B11", "EVL011", CHATS)
def _(world: World) -> None:
    clean = answer_module.render_prompt
    world.patch.setattr(answer_module, "render_prompt", lambda tokenizer, chat, _options: clean(tokenizer, chat, {}))


@fault("an evaluation forgets what was answered before", "B11", "EVL011", CHATS)
def _(world: World) -> None:
    clean = answer_module.render_prompt

    def asked(tokenizer: Any, chat: Any, options: Any) -> list[int]:
        kept = tuple(message for message in chat.messages if message.role != "assistant")
        return clean(tokenizer, chat.model_copy(update={"messages": kept}), options)

    world.patch.setattr(answer_module, "render_prompt", asked)


@fault("an evaluation loses its system prompt", "B11", "EVL011", CHATS)
def _(world: World) -> None:
    world.patch.setattr(Conversation, "with_system_prompt", lambda conversation, _text: conversation)


# What is reported.


@fault("conditional rates are unconditional", "B94", "EVL010", CHATS)
def _(world: World) -> None:
    clean = benchmark_module.acceptance_rate_by_position
    world.patch.setattr(
        benchmark_module, "acceptance_rate_by_position", lambda *given, conditional: clean(*given, conditional=False)
    )


@fault("the macro figure is the micro one", "B94", "EVL010", CHATS)
def _(world: World) -> None:
    world.patch.setattr(benchmark_module, "macro_acceptance_length", lambda parts: Acceptance.total(parts).length)


@fault("the macro figure has a vote for each answer", "B94", "EVL010", CHATS)
def _(world: World) -> None:
    world.patch.setattr(Acceptance, "by_prompt", staticmethod(lambda counted: [part for _, part in counted]))


@fault("places are counted one too late", "B94", "EVL010", CHATS)
def _(world: World) -> None:
    clean = acceptance_module.accepted_histogram

    def late(accepted: Sequence[int], drafted: int) -> list[int]:
        return clean([max(0, count - 1) for count in accepted], drafted)

    for module in (acceptance_module, benchmark_module, server_module):
        world.patch.setattr(module, "accepted_histogram", late)


@fault("prompts of all files are reported as of the first", "B94", "EVL010", CHATS)
def _(world: World) -> None:
    clean = benchmark_module._counted

    def counted(prompts: Any, turns: Any) -> Any:
        return [replace(one, file=prompts[0].file) for one in clean(prompts, turns)]

    world.patch.setattr(benchmark_module, "_counted", counted)


@fault("all drafted tokens count however few are checked", "B94", "EVL010", CHATS)
def _(world: World) -> None:
    clean = draft_length_module.walk
    world.patch.setattr(draft_length_module, "walk", lambda streaks, _count=None: clean(streaks))


@fault("one turn of a dialogue that is equal makes it equal", "B94", "EVL010", CHATS)
def _(world: World) -> None:
    def equal(turns: Any, differences: Any) -> list[int]:
        same = {turn.prompt for i, turn in enumerate(turns) if i not in {one.turn for one in differences}}
        return [int(prompt in same) for prompt in sorted({turn.prompt for turn in turns})]

    world.patch.setattr(benchmark_module, "_equal_prompts", equal)


@fault("intervals forget that few prompts were asked", "B94", "EVL010", CHATS)
def _(world: World) -> None:
    for name in ("_TAIL", "_LEAST_TAIL"):
        world.patch.setattr(acceptance_module, name, 0.1)


@fault("the macro interval is the micro one", "B94", "EVL010", CHATS)
def _(world: World) -> None:
    world.patch.setattr(benchmark_module, "macro_acceptance_interval", acceptance_module.acceptance_interval)


@fault("a forward counts at the place of its last token", "B94", "EVL010", CHATS)
def _(world: World) -> None:
    clean = result_module._forwards

    def late(answer: Any) -> Any:
        return ((place + given - 1, given) for place, given in clean(answer))

    world.patch.setattr(result_module, "_forwards", late)


@fault("a prompt's own system prompt is replaced", "B11", "EVL011", CHATS)
def _(world: World) -> None:
    clean = Conversation.with_system_prompt

    def replaced(chat: Conversation, text: str | None) -> Conversation:
        kept = tuple(message for message in chat.messages if text is None or message.role != "system")
        return clean(chat.model_copy(update={"messages": kept}), text)

    world.patch.setattr(Conversation, "with_system_prompt", replaced)


@fault("a task set is asked without the wording of its benchmark", "B11", "EVL011", CHATS)
def _(world: World) -> None:
    plain = [replace(task, ask=prompts_module._as_it_is) for task in prompts_module._SETS if len(task.columns[0]) == 1]
    for task in plain:
        if task.name != "mt-bench":
            world.patch.setitem(prompts_module._BY_NAME, prompts_module._plain(task.name), task)


@fault("an evaluation leaves the last line of its prompts out", "B98", "EVL011", CHATS)
def _(world: World) -> None:
    clean = prompts_module.read_rows

    def rows(sources: Any, *rest: Any) -> Any:
        return iter(list(clean(sources, *rest))[:-1])

    world.patch.setattr(prompts_module, "read_rows", rows)


# Servers.


@fault("a server's counters are not differenced", "B100", "EVL012", CHATS)
def _(world: World) -> None:
    world.patch.setattr(DraftCounts, "__sub__", lambda now, _before: now)


@fault("counters of one label count alone", "B100", "EVL012", CHATS)
def _(world: World) -> None:
    clean = Engine.counts

    def first(engine: Engine, text: str) -> DraftCounts | None:
        lines: dict[str, str] = {}
        for line in text.splitlines():
            place = line.partition("position=")[2][:4]
            lines[line.partition("{")[0] + place] = line
        return clean(engine, "\n".join(lines.values()))

    world.patch.setattr(Engine, "counts", first)


@fault("places of a server are sorted as words", "B100", "EVL012", CHATS)
def _(world: World) -> None:
    clean = Engine.counts

    def sorted_as_words(engine: Engine, text: str) -> DraftCounts | None:
        found = clean(engine, text)
        if found is None:
            return None
        places = found.accepted_per_position
        order = sorted(range(len(places)), key=str)
        return replace(found, accepted_per_position=tuple(places[i] for i in order))

    world.patch.setattr(Engine, "counts", sorted_as_words)


@fault("a server's forwards without a draft are lost", "B100", "EVL012", CHATS)
def _(world: World) -> None:
    def acceptance(counts: DraftCounts, tokens: int, answers: int) -> Acceptance:
        return Acceptance(tokens - answers, counts.drafts)

    world.patch.setattr(DraftCounts, "acceptance", acceptance)


@fault("a server counts as right whatever it drafts", "B100", "EVL012", CHATS)
def _(world: World) -> None:
    clean = served_module.ServedAnswer.outcome

    def outcome(answer: Any, rounding: float) -> Any:
        found = clean(answer, rounding)
        return "equal" if found == "forwards" else found

    world.patch.setattr(served_module.ServedAnswer, "outcome", outcome)


@fault("the printed command asks for as many tokens as a block has slots", "B42", "EXP014")
def _(world: World) -> None:
    program = PROGRAMS["vllm"]
    more = replace(
        program,
        command=lambda serving: program.command(
            replace(serving, config=serving.config.model_copy(update={"block_size": serving.config.block_size + 1}))
        ),
    )
    world.patch.setitem(PROGRAMS, "vllm", more)


@fault("the printed command counts SGLang's tokens without the anchor", "B42", "EXP014")
def _(world: World) -> None:
    program = PROGRAMS["sglang"]
    less = replace(
        program,
        command=lambda serving: program.command(
            replace(serving, config=serving.config.model_copy(update={"block_size": serving.config.block_size - 1}))
        ),
    )
    world.patch.setitem(PROGRAMS, "sglang", less)

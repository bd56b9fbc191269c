"""What else a small run leaves: what it refuses, what it is asked and how it samples, how servers are counted.

As in `product.py`, nothing of the audit is used; each entry is what a user would see.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftline import run as run_module
from draftline.data import prepare as prepare_module
from draftline.data import prompts as prompts_module
from draftline.data.conversations import Conversation, Message
from draftline.data.dataset import PreparedDataset
from draftline.data.prompts import Prompt
from draftline.data.server import Endpoint
from draftline.draft.loss import StepMetrics
from draftline.draft.model import DFlashDraftModel
from draftline.errors import DraftlineError
from draftline.evaluate import answer, benchmark, draft_length, generate, replay, server
from draftline.evaluate.acceptance import teacher_forced_walk
from draftline.evaluate.answer import DecodedTurn
from draftline.evaluate.engines import ENGINES, DraftCounts
from draftline.evaluate.generate import Generation
from draftline.evaluate.served import ServedAnswer
from draftline.formats import exporting, programs
from draftline.options import (
    EvaluationSettings,
    ExportSettings,
    MaskOptions,
    PrepareOptions,
    Sampling,
    ServerMeasurement,
)
from draftline.run import Run
from draftline.targets.model import weights_fingerprint
from draftline.train import checkpoint as checkpoint_module
from draftline.train.checkpoint import TrainState
from draftline.train.run_folder import RunFolder
from draftline.transfer import store as store_module
from tests.evaluate.engine_servers import Answer, EngineServer
from tests.zoo.pipeline import World

_SAMPLED = Sampling(temperature=1.3)


def _said(attempt: Callable[[], object]) -> str:
    """The kind of error; nothing where something was taken."""
    try:
        attempt()
    except DraftlineError as error:
        return type(error).__name__
    return ""


def refused(world: World, folder: Path, watcher: run_module.Watcher) -> list[str]:
    """What happens to a finished run that is continued with something exchanged, and to states of others."""
    run = world.assemble()
    seed, loss = run.config.train.model_copy(update={"seed": 99}), run.config.loss.model_copy(update={"labels": "data"})
    data = replace(run.data, heldout=run.data.training, training=_Renamed(run.data.training))
    drafter = run.drafter.twin()
    drafter.model.config = run.shape.model_copy(update={"mask_token_id": 5})
    others: list[Run] = [
        replace(run, config=run.config.model_copy(update={"train": seed})),
        replace(run, config=run.config.model_copy(update={"loss": loss})),
        replace(run, data=data),
        replace(run, data=replace(run.data, heldout=_Renamed(run.data.heldout))),
        replace(run, drafter=drafter),
    ]
    said = [
        _said(lambda other=other: run_module.train(other, folder, resume=True, watcher=watcher)) for other in others
    ]  # type: ignore[misc]
    weight = next(world.target.model.parameters())
    with torch.no_grad():
        before = weights_fingerprint(world.target.model)
        weight.add_(1.0)
        said.append(_said(lambda: run_module.train(run, folder, resume=True, watcher=watcher)))
        said.append(str(weights_fingerprint(world.target.model) == before))
        identity = store_module.loop_identity(run.capture_loop(), "data")
        weight.sub_(1.0)
    said.append(str(store_module.loop_identity(run.capture_loop(), "data") == identity))
    lengths, place = np.array([4]), folder.parent / "some states"
    store_module.StatesStore(place, identity, lengths, 1)
    said.append(_said(lambda: store_module.StatesStore(place, replace(identity, target="other"), lengths, 1)))
    newest = RunFolder(folder).checkpoint("newest")
    assert newest is not None, "it has trained"
    for path in (newest / "optimizer.safetensors",):
        whole = path.read_bytes()
        path.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
        said.append(_said(lambda: checkpoint_module.read_checkpoint(newest)))
        path.write_bytes(whole)
    shape = run.shape.model_copy(update={"num_target_layers": 77})
    said.append(_said(lambda: generate.check_fits(shape, world.target)))
    strange = replace(run.data, training=_Renamed(run.data.training, 10_000))
    return [*said, _said(lambda: run_module.assemble(run.config, world.target, strange)), *_damaged_states(run, folder)]


class _Renamed:
    """Conversations with another fingerprint, and perhaps a token that no target knows."""

    def __init__(self, inner: Any, most: int = 0) -> None:
        self._inner, self._most = inner, most
        self.fingerprint, self.lengths, self.prompt_hashes = "others", inner.lengths, inner.prompt_hashes

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, number: int) -> Any:
        return self._inner[number]

    def used_token_ids(self) -> torch.Tensor:
        return torch.ones(max(self._most, len(self._inner.used_token_ids())), dtype=torch.bool)


def _damaged_states(run: Run, folder: Path) -> list[str]:
    loop, sample = run.capture_loop(), replace(run.data.training[int(run.data.training_ids[0])], sample_id=0)
    place, lengths = folder.parent / "damaged states", np.array([len(sample)])
    identity = store_module.loop_identity(loop, "data")
    store = store_module.StatesStore(place, identity, lengths, 1)
    store.write(0, loop.capture([sample]))
    path = store.path(0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    return [_said(lambda: store_module.StatesStore(place, identity, lengths, 1).capture([sample]))]


def prepared(world: World, folder: Path) -> list[Any]:
    """What `prepare` makes of rows with flags, system prompts and options, with each of its own options."""
    chat = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "So it is."}]
    again = [{"role": "user", "content": "say  it. "}, {"role": "assistant", "content": "So be it."}]
    other = [{"role": "user", "content": "Or else"}, {"role": "assistant", "content": "Yes", "weight": 0}]
    rows: list[dict[str, Any]] = [
        {"messages": [*chat, *other]},
        {"messages": [*other, *chat], "system": "Now."},
        {"messages": again, "weight": 0},
        {"messages": again, "chat_template_kwargs": {"polite": True}},
        {"messages": chat, "finish_reason": "length"},
        {"messages": [*chat, *again]},
        {"messages": again},
    ]
    file, found = folder / "fields.jsonl", list[Any]()
    file.write_text("\n".join(map(json.dumps, rows)))
    mask = MaskOptions(supervise="last")
    for number, options in enumerate((PrepareOptions(), PrepareOptions(mask=mask), PrepareOptions(heldout=2))):
        out = folder / f"fields {number}"
        report = prepare_module.prepare(world.target.require_tokenizer(), [str(file)], out, options)
        parts = [PreparedDataset.open(part) for part in (out, out / "heldout") if part.exists()]
        found += [report["rows_out"], report["supervised_tokens"]]
        found += [
            [(part[i].input_ids.tolist(), part[i].loss_mask.tolist()) for i in range(len(part))] for part in parts
        ]
    key = (file, folder / "fields 0", PrepareOptions(heldout=1))
    found.append(_said(lambda: prepare_module.prepare(world.target.require_tokenizer(), [str(key[0])], *key[1:])))
    return found


def curves(folder: Path) -> list[Any]:
    """Tags of TensorBoard with their steps."""
    events = EventAccumulator(str(RunFolder(folder).tensorboard)).Reload()
    return [(tag, [one.step for one in events.Scalars(tag)]) for tag in sorted(events.Tags()["scalars"])]


def failing(world: World, folder: Path, watcher: run_module.Watcher) -> list[Any]:
    """A run in threads whose rows fail, and one whose gradient is infinite: what is raised, and what is saved."""
    found = list[Any]()
    for mode in ("threads", "inline"):
        place = folder / f"failing {mode}"
        world.set("pipeline", mode=mode)
        run = world.assemble()
        if mode == "threads":
            run = replace(run, sampler=_Failing(run.sampler))  # type: ignore[arg-type]
        else:
            run.drafter.model.fc.weight.register_hook(_third_is_infinite(list[int]()))
        found.append(_said(lambda run=run, place=place: run_module.train(run, place, watcher=watcher)))  # type: ignore[misc]
        found.append(bool(RunFolder(place).checkpoint_steps()) if mode == "inline" else "")
    world.set("pipeline", mode="inline")
    return [*found, replay.Departure(0, 0, 0, [1], [2], 1.0, 1.0).is_tie(0.5)]


def _third_is_infinite(seen: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A hook on gradients."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return gradient * (math.inf if len(seen) > 3 else 1.0)

    return hook


class _Failing:
    """Rows that cannot be made."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def plans(self, _first: int = 0) -> Any:
        """None."""
        raise DraftlineError("planted")
        yield


def late(world: World, folder: Path) -> list[Any]:
    """A checkpoint after very many updates, written and read: all that the optimiser keeps, and the open sums."""
    run = world.assemble()
    drafter, again = run.drafter, world.assemble().drafter
    for parameter in drafter.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-5)
    drafter.optimizer.step()
    for state in drafter.optimizer.state.values():
        state["step"].fill_(100_001)
    window = replace(StepMetrics.zero(run.shape.block_size), loss_sum=1 / 3)
    state = TrainState(window, best_step=1, best_streak=1 / 3)
    checkpoint_module.write_checkpoint(folder / "late", drafter.checkpoint(state, "data"))
    found = checkpoint_module.read_checkpoint(folder / "late")
    torch.manual_seed(77)
    again.restore(found, folder / "late")
    kept = [v.double().sum().item() for s in again.optimizer.state.values() for v in s.values()]
    return [kept, found.state.window.loss_sum, float(torch.rand(()))]


def asked(world: World, model: DFlashDraftModel) -> list[Any]:
    """A dialogue and a prompt, sampled, with system prompt and template option."""
    words = [Message(role="user", content=text) for text in ("Say 1.", "Say 2.")]
    settings = EvaluationSettings(
        max_new_tokens=6, sampling=_SAMPLED, system_prompt="Now.", template_options={"polite": True}
    )
    prompts = [
        Prompt("a", 1, Conversation(messages=tuple(words[:1]))),
        Prompt("b", 1, Conversation(messages=tuple(words))),
    ]
    result = benchmark.evaluate_prompts(world.target, model, prompts, settings)
    alone = answer.answer_prompt(world.target, model, "Say 3.", EvaluationSettings(max_new_tokens=6, sampling=_SAMPLED))
    turns = [(turn.input_ids, turn.output_ids) for turn in result.per_prompt]
    parts = (result.acceptance_length_macro, [part.name for part in result.by_file])
    ids = torch.randint(3, 90, (300,), generator=torch.Generator().manual_seed(3)).tolist()
    walked = teacher_forced_walk(world.target, model, [(ids[:5], ids[5:])])
    return [turns, parts, alone.output_ids, [(walk.tokens, walk.forwards) for walk in walked]]


def evaluated(world: World, model: DFlashDraftModel, folder: Path) -> list[Any]:
    """Every figure that the clock has no part in, of prompts from a file and of a task set."""
    file, task = folder / "asked.jsonl", folder / "task.jsonl"
    own = [{"role": "system", "content": "Hm."}, {"role": "user", "content": "And now?"}]
    lines: list[dict[str, Any]] = [{"turns": ["Say 1.", "Say 2."]}, {"messages": own}, {"turns": ["Why?"]}]
    file.write_text("\n".join(map(json.dumps, lines)))
    task.write_text("\n".join([json.dumps({"question": "How many?", "answer": "Two"})] * 2))
    prompts = [*prompts_module.read_prompts([str(file)]), *prompts_module.read_task(f"gsm8k={task}")]
    settings = EvaluationSettings(max_new_tokens=40, num_speculative_tokens=3, system_prompt="Now.")
    result = benchmark.evaluate_prompts(world.target, model, prompts, settings)
    turns = _turns()
    turns[0] = replace(turns[0], plain=Generation([9, *turns[0].plain.output_ids[1:]]))
    counted = benchmark.summarise(world.target, model, prompts, turns, settings, None)
    clock = {"by_draft_length", "tokens_per_second", "baseline_tokens_per_second", "speedup"}
    timeless = [name for name in result.to_json() if name not in clock | {"best_num_speculative_tokens"}]
    lengths = [(one.num_speculative_tokens, one.acceptance_length) for one in counted.by_draft_length]
    walked = draft_length.walked_lengths([[0, 3, 1, 0, 6], [2, 2]], 5)
    return [[each.to_json()[name] for name in timeless] for each in (result, counted)] + [lengths, walked]


def _turns() -> list[DecodedTurn]:
    """A dialogue of two turns and two prompts in which some drafted tokens stood."""
    chat = Conversation(messages=(Message(role="user", content="a"), Message(role="assistant", content="b")))
    turns = []
    for number, accepted in enumerate(([3, 0, 3, 2, 1, 0, 3, 3, 3, 3, 3, 3], [1, 2], [2, 2, 1], [0, 2])):
        output = [10 + i for i in range(1 + sum(accepted) + len(accepted))]
        made = Generation(output, accepted, [[0] * 3] * len(accepted))
        prompt, turn = max(0, number - 1), int(number == 1)
        turns.append(DecodedTurn(prompt, turn, chat, [3, 4, 5], made, Generation(output), 1.0, 1.0))
    return turns


def served(world: World, model: DFlashDraftModel, folder: Path) -> list[Any]:
    """Counters of servers, the verdict on one, and the commands that start them."""
    counts, prompts = [], [Conversation(messages=(Message(role="user", content=text),)) for text in ("a", "bc")]
    for program in ("vllm", "sglang"):
        stand_in = EngineServer(program)  # type: ignore[arg-type]
        stand_in.edit_metrics = _two_engines
        stand_in.script = lambda _prompt, _limit: Answer([[3], [4, 5, 6], [7, 8]], [2, 1], stopped=True)
        try:
            wanted = ServerMeasurement(model=None, max_new_tokens=9, concurrency=(1,))
            tokenizer = world.target.require_tokenizer()
            result = server.evaluate_server(Endpoint(stand_in.url), tokenizer, prompts, wanted)
            counts.append([(x.tokens, x.target_forwards, x.accepted_histogram) for x in result.levels])
        except (DraftlineError, AssertionError) as error:
            counts.append(type(error).__name__)  # type: ignore[arg-type]
        finally:
            stand_in.close()
    answers = [ServedAnswer(0, None, [], found, 5, 7).outcome(1e-4) for found in (5, 6)]
    lost = DraftCounts(2, 3, (2, 1), 8).acceptance(8, 1)
    metrics = [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{k}"}} {20 - k}' for k in range(12)]
    metrics += ["vllm:spec_decode_num_drafts_total 20", "vllm:spec_decode_num_accepted_tokens_total 9"]
    many = ENGINES[0].counts("\n".join([*metrics, "vllm:generation_tokens_total 9"]))
    serving = programs.Serving("F", "T", "float32", model.config)
    words = [_command(reader, serving) for reader in programs.PROGRAMS]
    run, out = RunFolder(folder / "run"), folder / "named"
    step = run.checkpoint_steps()[0]
    reader = "speculators" if model.config.draft_vocab_size or model.config.sample_from_anchor else "zlab"
    settings = ExportSettings(reader=reader)  # type: ignore[arg-type]
    exporting.export_drafter(
        source=run.step_folder(step), out=out, target=world.target, settings=settings, proven=False
    )
    return [
        counts,
        answers,
        (lost.tokens, lost.forwards),
        str(many),
        words,
        (out / "model.safetensors").read_bytes().hex()[-400:],
    ]


def _command(reader: Any, serving: programs.Serving) -> str:
    try:
        return programs.serving_command(reader, serving)
    except DraftlineError as error:
        return type(error).__name__


def _two_engines(text: str) -> str:
    """The counters twice, the second time of an engine that stands still."""
    lines = [line for line in text.splitlines() if "spec_decode" in line and not line.startswith("#")]
    counters = [line.rpartition(" ")[0] for line in lines if "}" in line]
    still = [counter.replace("}", ',engine="9"}') + " 7" for counter in counters]
    return "\n".join([text, *still, ""])

"""What a small run leaves behind, so that a test can tell whether a fault changes it.

The run lives through everything with the functions that the commands call: it trains over the end of a pass, is
stopped, resumed, evaluated on held-out conversations and exported, and the exported drafter is decoded and evaluated
with. Nothing of the audit is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from draftline.data.conversations import Conversation, Message
from draftline.data.dataset import PreparedDataset
from draftline.data.prompts import Prompt
from draftline.draft.model import DFlashDraftModel
from draftline.errors import Interrupted
from draftline.evaluate import generate as generate_module
from draftline.evaluate.benchmark import evaluate_prompts
from draftline.evaluate.generate import GREEDY, Proposal
from draftline.formats.card import trained_mode
from draftline.formats.exporting import export_drafter
from draftline.formats.load import load_drafter
from draftline.formats.proof import PROOF_FILE
from draftline.options import EvaluationSettings, ExportSettings
from draftline.records import Sample
from draftline.run import Watcher, train
from draftline.targets.model import Target
from tests.zoo import doors
from tests.zoo.pipeline import MASK, Recipe, World, chat_tokenizer

Product = dict[str, Any]
"""What was left, by name; what could not be made is the error in words."""

_STOP_AFTER = 4
"""Steps: the end of the second pass."""
_TIMES = (
    *("seconds", "tokens_per_second", "baseline_tokens_per_second", "speedup"),
    *("by_draft_length", "best_num_speculative_tokens"),
)


def ready(recipe: Recipe, patch: pytest.MonkeyPatch, folder: Path) -> World:
    """A world ready to live, before a fault is planted: few tokens, a tokenizer, conversations of several kinds.

    They differ in length, so that they share batches and rows unevenly. A third of the answers is not the target's own,
    so that it matters which of the two is taught; some conversations are supervised from the first token on, and some
    have a gap between two answers.
    """
    world = World.of(recipe, patch, folder)
    world.set("train", epochs=3, tokens_per_row=84, rows_per_step=2, num_anchors=18, log_every=1, eval_every=2)
    world.set("train", save_every=2, keep_last=9, eval_walks=2)
    world.set("optim", learning_rate=5e-3, clip_norm=0.3)
    world.set("loss", chunk_size=37)
    if world.target.config.model_type == "qwen3":
        world.set("drafter", start_from="target_layers")
    if world.target.tokenizer is None:
        world.target = replace(world.target, tokenizer=chat_tokenizer())
        generator = torch.Generator().manual_seed(17)
        world.samples = [_varied(sample, generator) for sample in world.samples]
    if not world.heldout:
        world.samples, world.heldout = world.samples[:-2], world.samples[-2:]
    return world


def _varied(sample: Sample, generator: torch.Generator) -> Sample:
    length = len(sample) - 3 * (sample.sample_id % 4)
    ids, mask = sample.input_ids[:length], sample.loss_mask[:length].clone()
    if sample.sample_id % 3 == 1:
        ids = torch.where(mask, torch.randint(3, MASK, ids.shape, generator=generator), ids)
    if sample.sample_id % 3 == 2:
        mask[:] = True
    if sample.sample_id % 4 == 0:
        mask[14:16] = False
    return replace(sample, input_ids=ids, loss_mask=mask)


class _Quiet:
    """Shows nothing."""

    def advance(self, step: int) -> None: ...

    def show(self, text: str) -> None: ...

    def close(self) -> None: ...


@dataclass
class _Stop:
    """Asks for a stop after some steps, counted by how often the loop asks."""

    after: int
    asked: int = 0

    @contextmanager
    def stopping(self) -> Iterator[Callable[[], bool]]:
        def requested() -> bool:
            self.asked += 1
            return self.asked == self.after

        yield requested


def live(world: World) -> Product:
    """Live through a run."""
    folder, product = world.folder, Product()
    stages: list[tuple[str, Callable[[], Any]]] = [
        ("data", lambda: _read(world)),
        ("training", lambda: _trained(world, folder / "run")),
        ("export", lambda: _exported(world, folder)),
        ("decoding", lambda: _decoded(world, folder / "export")),
        ("rule", lambda: _by_the_rule(world.target)),
        ("evaluation", lambda: _evaluated(world, folder / "export")),
        ("prepared", lambda: doors.prepared(world, folder)),
        ("failing", lambda: doors.failing(world, folder, _quiet())),
        ("late", lambda: doors.late(world, folder)),
        ("asked", lambda: doors.asked(world, _loaded(world, folder))),
        ("figures", lambda: doors.evaluated(world, _loaded(world, folder), folder)),
        ("served", lambda: doors.served(world, _loaded(world, folder), folder)),
        ("refused", lambda: doors.refused(world, folder / "run", _quiet())),
    ]
    for name, stage in stages:
        try:
            product[name] = stage()
        except Exception as error:  # what a fault breaks differs from run to run; that it breaks is what counts
            product[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    product["target"] = _digest(dict(world.target.model.state_dict()))
    return json.loads(json.dumps(product).replace(str(folder), "FOLDER"))


def _loaded(world: World, folder: Path) -> DFlashDraftModel:
    return load_drafter(folder / "export", target=world.target).draft_model


def _quiet() -> Watcher:
    return Watcher(say=lambda _text: None, display=lambda _step, _total: _Quiet())


def _read(world: World) -> Product:
    """What is trained on and measured with, and what is said of it."""
    data = world.data()
    ids = {"training": (data.training, data.training_ids), "heldout": (data.heldout, data.heldout_ids)}
    product: Product = {
        name: [(part[int(i)].input_ids.tolist(), part[int(i)].loss_mask.tolist()) for i in chosen]
        for name, (part, chosen) in ids.items()
    }
    if isinstance(data.training, PreparedDataset):
        product |= {"report": data.training.report, "options": data.training.meta["template_options"]}
    return product


def _trained(world: World, folder: Path) -> Product:
    stop = _Stop(_STOP_AFTER)
    watcher = Watcher(say=lambda _text: None, display=lambda _step, _total: _Quiet(), stopping=stop.stopping)
    with suppress(Interrupted):
        train(world.assemble(), folder, watcher=watcher)
    stop.asked = _STOP_AFTER
    train(world.assemble(), folder, resume=True, watcher=watcher)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    checkpoints = {path.name: _checkpoint(path) for path in sorted((folder / "checkpoints").iterdir())}
    identity = json.loads((folder / "run.json").read_text())
    return {
        "metrics": [_timeless(line) for line in metrics],
        "checkpoints": checkpoints,
        "best": (folder / "best").resolve().name,
        "identity": {name: identity[name] for name in ("config", "drafter", "data", "target")},
        "sessions": [session["first_step"] for session in identity["sessions"]],
        "curves": doors.curves(folder),
    }


def _checkpoint(folder: Path) -> Product:
    state = json.loads((folder / "state.json").read_text())
    tensors = {path.name: _digest(_tensors(path)) for path in sorted(folder.glob("*.safetensors"))}
    return {**tensors, "progress": _timeless(state["progress"])}


def _exported(world: World, folder: Path) -> Product:
    config = world.config.drafter
    reader = "speculators" if config.draft_vocab_size is not None or config.sample_from_anchor else "zlab"
    settings = ExportSettings(reader=reader)
    export_drafter(source=folder / "run", out=folder / "export", target=world.target, settings=settings)
    path = folder / "export" / "model.safetensors"
    tree = json.loads((folder / "export" / "config.json").read_text())
    proof = folder / "export" / PROOF_FILE
    text = proof.read_text() if proof.exists() else ""
    return {"config": tree, "tensors": _digest(_tensors(path)), "proof": text}


def _decoded(world: World, folder: Path) -> list[Any]:
    """Drafted blocks and outputs of the exported drafter, through the decoder that counts forwards.

    What hardly trained drafters say depends little on what they see, so it is also asked with large weights.
    """
    model = load_drafter(folder, target=world.target).draft_model
    answers = _answers(world, model)
    generator = torch.Generator().manual_seed(29)
    for parameter in model.parameters():
        size = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.5
        parameter.data = torch.randn(parameter.shape, generator=generator) * 2.0 * size
    return [*answers, *_answers(world, model)]


def _answers(world: World, model: DFlashDraftModel) -> list[Any]:
    answers = [
        generate_module.generate(world.target, model, _prompt(sample)[None], max_new_tokens=16, stop_token_ids=[2])
        for sample in _some(world)
    ]
    return [(answer.output_ids, answer.accepted_per_forward, answer.drafted_blocks) for answer in answers]


def _some(world: World) -> list[Sample]:
    data = world.data()
    return [data.heldout[int(i)] for i in data.heldout_ids[:2]]


def _prompt(sample: Sample) -> torch.Tensor:
    """All before the last answer, one token at least."""
    asked = (~sample.loss_mask).nonzero()
    return sample.input_ids[: int(asked[-1]) + 1 if len(asked) else 1]


class _Knowing:
    """Drafts what the target will say, and errs in every third block after some tokens."""

    target_layer_ids: tuple[int, ...] = ()

    def __init__(self, answer: list[int]) -> None:
        self.answer, self.place, self.blocks = answer, 0, 0

    def extend(self, hidden_states: torch.Tensor) -> None: ...

    def propose(self, anchor_id: int) -> Proposal:
        """The next seven tokens after the last one with this id."""
        self.place = self.answer.index(anchor_id, self.place)
        block = torch.tensor(self.answer[self.place + 1 : self.place + 8])
        if self.blocks % 3 != 2:
            block[min(self.blocks % 3 + 2, len(block) - 1)] = 0
        self.blocks += 1
        return Proposal(block)


def _by_the_rule(target: Target) -> list[Any]:
    """What is accepted of drafts that are nearly right, so that the rule shows whatever the drafter has learned."""
    ids = torch.randint(3, MASK, (1, 9), generator=torch.Generator().manual_seed(23))
    whole = ids
    with torch.no_grad():
        for _ in range(60):
            whole = torch.cat([whole, target.model(input_ids=whole).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    answer = whole[0, 9:].tolist()
    results = [
        generate_module.decode(target, _Knowing(answer), ids, 40, stop, GREEDY, None) for stop in ([], answer[2:3])
    ]
    return [(made.output_ids, made.accepted_per_forward) for made in results]


def _evaluated(world: World, folder: Path) -> Product:
    model = load_drafter(folder, target=world.target).draft_model
    texts = ("Say 1.", "What is 12 + 7?", "Name a colour.")
    prompts = [
        Prompt("prompts.jsonl", i, Conversation(messages=(Message(role="user", content=text),)))
        for i, text in enumerate(texts)
    ]
    result = evaluate_prompts(
        world.target,
        model,
        prompts,
        EvaluationSettings(max_new_tokens=16),
        trained_mode=trained_mode(folder.parent / "run"),
    )
    return _timeless(result.to_json())


def _timeless(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if name not in _TIMES}


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    """Of names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def differences(found: Any, wanted: Any, place: str = "") -> list[str]:
    """Places at which two products differ; NaN equals NaN."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        names = sorted({*found, *wanted})
        return [p for name in names for p in differences(found.get(name), wanted.get(name), f"{place}/{name}")]
    same = json.dumps(found) == json.dumps(wanted)
    return [] if same else [place]

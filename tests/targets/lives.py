"""The whole life of a tiny target, through the commands of a user, and the page that says how far each family came."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draftline.cli import run
from draftline.config import TargetConfig
from draftline.data.dataset import PreparedDataset
from draftline.errors import DraftlineError
from draftline.targets.loop import TargetForwardLoop
from draftline.targets.model import build_target, load_target
from tests.data.chat_tokenizers import CHATML, make_tokenizer
from tests.targets.families import FAMILIES, UNSUPPORTED, tiny

PARTS = ("regenerate", "capture", "audit", "train", "export", "evaluate")
"""In the order of a life; `train` is three steps, behind the audit."""

PAGE = Path(__file__).parents[2] / "docs/reference/targets.md"

POSITIONS, PADDING_ROWS = 256, 6
QUESTIONS = ("one", "two and a bit more", "three, then four", "what is the name of the city?", "the weather", "user")
SETTINGS = (
    *("drafter.target_layer_ids=[0,2]", "drafter.num_layers=1", "drafter.block_size=4"),
    *("train.max_steps=3", "train.num_anchors=8", "data.heldout_fraction=0.3"),
)


@dataclass
class Life:
    """How a family came through: of each part that failed, why, in one line; parts behind it were not reached."""

    failures: dict[str, str] = field(default_factory=dict)
    reached: list[str] = field(default_factory=list)

    def cells(self) -> list[str]:
        """One word for each part."""
        return ["no" if part in self.failures else "yes" if part in self.reached else "" for part in PARTS]


def live(family: str, folder: Path) -> Life:
    """Answers in a batch, capture, audit, three steps, export and evaluation of one family, in an empty folder."""
    life, target, prompts = Life(), str(folder / "target"), folder / "prompts.jsonl"
    write_target(family, folder / "target")
    prompts.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS))
    asked = ["prepare", "--target", target, "--data", str(prompts), "--regenerate", "--max-new-tokens", "24"]
    for out, size in (("alone", 1), ("data", 6)):
        fault = call([*asked, "--batch-size", str(size), "--out", str(folder / out)])
        if fault:
            return note(life, "regenerate", fault)
    note(life, "regenerate", unlike_answers(folder / "alone", folder / "data"))
    note(life, "capture", unlike_states(target, folder / "data"))
    data, out = str(folder / "data"), str(folder / "run")
    fault = call(["train", "--target", target, "--data", data, "--out", out, *SETTINGS])
    note(life, "audit", fault)
    if fault:
        return life
    note(life, "train", "")
    drafter, result = str(folder / "drafter"), folder / "result.json"
    note(life, "export", call(["export", out, "--out", drafter]))
    decoding = ["--draft", drafter, "--prompts", str(prompts), "--max-new-tokens", "16", "--json", str(result)]
    fault = call(["evaluate", "--target", target, *decoding])
    if not fault and json.loads(result.read_text())["greedy_equal"] != 1.0:
        fault = "some outputs are not those of plain greedy decoding"
    return note(life, "evaluate", fault.replace(f"{target}: ", ""))


def note(life: Life, part: str, fault: str) -> Life:
    """Write down that a part was reached, and what went wrong in it, if anything did."""
    life.reached.append(part)
    if fault:
        life.failures[part] = fault
    return life


def write_target(family: str, folder: Path) -> None:
    """The tiny model with a tokenizer; many tokens end an answer, so that answers have different lengths."""
    tokenizer = make_tokenizer(CHATML)
    model = tiny(family, len(tokenizer) + PADDING_ROWS, POSITIONS)
    for settings in (model.config.get_text_config(), model.generation_config):
        settings.pad_token_id = settings.bos_token_id = None
        settings.eos_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids("<|im_end|>"), *range(40, 110)]
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def call(words: Sequence[str]) -> str:
    """What a command says when it fails; nothing if it does not."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = run(list(words))
    lines = [line.removeprefix("draftline: ") for line in said.getvalue().splitlines() if line.startswith("draftline:")]
    return (lines or [f"exit status {status}"])[-1] if status else ""


def unlike_answers(alone: Path, together: Path) -> str:
    """Whether the answers of a batch are those of single prompts."""
    kept = [
        {line["key"]: line for line in map(json.loads, (out / "answers.jsonl").open())} for out in (alone, together)
    ]
    differing = sum(kept[0][key] != kept[1].get(key) for key in kept[0])
    return f"{differing} of {len(kept[0])} answers in a batch are not those of single prompts" if differing else ""


def unlike_states(name: str, data: Path) -> str:
    """Whether the states of conversations in a batch are those that each has alone."""
    try:
        loop = TargetForwardLoop(load_target(TargetConfig(name=name)), (0, 2), "last_hidden")
        prepared = PreparedDataset.open(data)
        samples = [prepared[i] for i in range(len(prepared))]
        for sample, together in zip(samples, loop.capture(samples), strict=True):
            (alone,) = loop.capture([sample])
            difference = (alone.hidden_states_SLD - together.hidden_states_SLD).abs().max()
            if not difference <= 1e-4 * alone.hidden_states_SLD.abs().max():
                return f"states of sample {sample.sample_id} in a batch differ from those alone by {difference:.1e}"
    except DraftlineError as error:
        return str(error)
    return ""


def refusal(family: str) -> str:
    """What is said of a family that cannot be a target."""
    try:
        build_target(family, tiny(family), None)
    except DraftlineError as error:
        return str(error)
    return ""


HEAD = """# Targets

Tiny random models of the families of transformers, each through its whole life with the commands of a user. Written by
`python -m scripts.target_table [FAMILY ...]`, which lives the families named (default: all) and keeps the lines of the
others; `make test-slow` lives every line again, and holds answers, captures and three steps for the families that have
no line yet.

| part | what it takes |
|---|---|
| regenerate | `prepare --regenerate` in a batch of prompts of different lengths gives the answers of single prompts |
| capture | states of conversations in a batch are those of each alone, to 1e-4 |
| audit | `train` finds nothing that stops a run |
| train, export | three steps, and a folder that reads back as what was trained |
| evaluate | with the drafter every output is that of plain greedy decoding |

Sizes differ where a configuration lets them: `tests/targets/families.py` has each. That a family is here says that its
layers are understood, and nothing about the quality of a drafter.
"""


def read_lines() -> dict[str, str]:
    """The lines of the page, by family."""
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    return {line.split("|")[1].strip(): line for line in lines if line.split("|")[1:2] and line.count("|") > 3}


def line_of(family: str, life: Life) -> str:
    """The line of a family that was lived."""
    why = "; ".join(f"{part}: {fault}" for part, fault in life.failures.items())
    return " | ".join([f"| {family}", *life.cells(), f"{why.replace('|', ' ')} |"])


def page(lines: Mapping[str, str]) -> str:
    """The page with these lines."""
    head = f"| family | {' | '.join(PARTS)} | why not |\n|{'---|' * (len(PARTS) + 2)}\n"
    body = "".join(lines[family] + "\n" for family in FAMILIES if family in lines)
    refused = "".join(f"| {family} | {refusal(family)} |\n" for family in UNSUPPORTED)
    return f"{HEAD}\n{head}{body}\nThese cannot be targets:\n\n| family | message |\n|---|---|\n{refused}"

"""Writes docs/guide/targets.md: what a drafter for well-known targets is and takes, from their configurations alone.

python -m scripts.target_plans     # from the root of the repository; half a minute, no weights, no network

Every figure is computed: the shape by what `train` uses, memory and time by what `plan` prints, the serving command by
what `export` prints. `docs/guide/targets/*.json` holds the sizes of each target, and is what `plan` is given here.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftline.commands.plan import planned
from draftline.config import DFlashConfig, decay_gamma, find_recipe, load_run_config
from draftline.formats.programs import Serving, serving_command
from draftline.options import PlanCommand, RunFlags
from draftline.plan.estimate import RunEstimate, TimeEstimate, duration, size

ROOT = Path(__file__).parents[1]
CONFIGS, PAGE = ROOT / "docs/guide/targets", ROOT / "docs/guide/targets.md"

MEAN_LENGTH, CONVERSATIONS, DEVICES = 1000, 100_000, 2

ROWS = ("train.tokens_per_row=2048", "train.rows_per_step=4")
"""A step of the default's size in pieces that fit: a row of 8,192 tokens in blocks of 16 needs over 100 GB."""
COMMON = (*ROWS, "train.eval_every=1000", "train.save_every=1000", "pipeline.mode=threads")


@dataclass(frozen=True)
class Recipe:
    """One target.

    Attributes:
        title: of its section.
        hub: its name on the hub.
        file: of its sizes, in `CONFIGS`.
        source: what the sizes were compared with.
        accelerator: two of which the plan is made for.
        block_size: slots of a block, and why so many.
        why: reason for the block size.
        mode: options of `prepare` and of every later measurement that choose how the target is asked.
        mask: what is known of the mask token, which follows from the tokenizer.
        remarks: what else to know.
    """

    title: str
    hub: str
    file: str
    source: str
    accelerator: str
    block_size: int
    why: str
    mode: tuple[str, ...]
    mask: str
    remarks: tuple[str, ...] = ()

    @property
    def config(self) -> Path:
        return CONFIGS / f"{self.file}.json"

    @property
    def words(self) -> tuple[str, ...]:
        """Settings of the run that differ from the default recipe."""
        return (f"drafter.block_size={self.block_size}", *COMMON)


@dataclass(frozen=True)
class Planned:
    """What is said of a recipe."""

    recipe: Recipe
    shape: DFlashConfig
    estimate: RunEstimate
    time: TimeEstimate
    memory: int
    steps: int
    gamma: float
    parameters: int


OF_PADDING = "the first row of the table behind the tokenizer's ids"
PUBLISHED = "the size of the published z-lab drafter for it"
THINKING = ("--template-option", "enable_thinking=false")

RECIPES = (
    Recipe(
        "Qwen3 8B",
        "Qwen/Qwen3-8B",
        "qwen3-8b",
        "config.json of Qwen/Qwen3-8B, copied into other repositories of the hub",
        "h100",
        16,
        PUBLISHED,
        THINKING,
        f"{OF_PADDING}, 151669, which z-lab's drafter has too",
        ("Trained without thinking, it is to be served without thinking, and the other way round.",),
    ),
    Recipe(
        "Qwen3 32B",
        "Qwen/Qwen3-32B",
        "qwen3-32b",
        "SpecForge's configs/qwen3-32b-dflash.json, which repeats the target's sizes",
        "h200",
        16,
        "the size of published drafters for it and its family",
        THINKING,
        f"{OF_PADDING}, 151669",
        (
            "The drafter's MLP follows the target's 25,600. `drafter.intermediate_size=9728` makes layers of a third "
            "of the size, as one published drafter has them.",
        ),
    ),
    Recipe(
        "Qwen3.5 9B (hybrid)",
        "Qwen/Qwen3.5-9B",
        "qwen3.5-9b",
        "configurations of fine-tuned copies on the hub, and transformers 5.24 (Qwen3_5TextConfig)",
        "h100",
        16,
        "the size of the published z-lab drafter for its larger sister",
        THINKING,
        f"{OF_PADDING}; z-lab's drafter for the larger sister has 248070",
        (
            "Three of four layers are linear attention. Their states are captured like any other; answers in a batch "
            "of different lengths are tested first, and asked one at a time where they differ.",
            "Its heads are 256 wide, and so are the drafter's: whether a server's kernel takes that width "
            "bidirectionally was not tried here. z-lab's drafters of this family have 32 heads of 128, 8 for keys: "
            "`drafter.num_attention_heads=32 drafter.num_key_value_heads=8 drafter.head_dim=128`.",
        ),
    ),
    Recipe(
        "Qwen3.5 27B (hybrid)",
        "Qwen/Qwen3.5-27B",
        "qwen3.5-27b",
        "the sizes that slime (THUDM) lists for it",
        "h200",
        16,
        PUBLISHED,
        THINKING,
        f"{OF_PADDING}; z-lab's drafter has 248070",
        ("As for the 9B.",),
    ),
    Recipe(
        "Llama 3.1 8B Instruct",
        "meta-llama/Llama-3.1-8B-Instruct",
        "llama-3.1-8b",
        "the sizes that Meta published with the weights; a gated repository",
        "h100",
        8,
        "Draftline's default",
        (),
        "a reserved special token (`<|reserved_special_token_..|>`) that the data does not use, as the table has no "
        "row behind the tokenizer's ids; one whose embedding is nearly zero is passed over",
        ("`drafter.start_from=target_layers` is refused: the layers of Llama have no norms of queries and keys.",),
    ),
    Recipe(
        "gpt-oss 20B",
        "openai/gpt-oss-20b",
        "gpt-oss-20b",
        "config.json of a fine-tuned copy on the hub, and the sizes that slime (THUDM) lists",
        "h100",
        8,
        PUBLISHED,
        ("--template-option", "reasoning_effort=medium"),
        f"{OF_PADDING}; z-lab's drafter has 200000, a reserved token",
        (
            "A mixture of 32 experts: the drafter is dense, its MLP three times the hidden size.",
            "The experts are stored in MXFP4. The plan counts all weights in bfloat16, as transformers runs them where "
            "it has no kernel for MXFP4.",
            "Answers open a channel before they speak; what is learned of them is in "
            "[templates](../reference/templates.md).",
        ),
    ),
    Recipe(
        "Gemma 4 31B",
        "google/gemma-4-31B-it",
        "gemma-4-31b",
        "two transcriptions of the published config.json (of an NVFP4 copy and of one for MLX)",
        "h200",
        16,
        PUBLISHED,
        (),
        "the tokenizer's own mask token, which is 4 in z-lab's drafter",
        (
            "The tower for pictures is left out of the file, and so out of the plan. A run that is really started "
            "loads it, too, and never runs it.",
            "Logits have a soft cap of 30 and embeddings a scale: both are the target's own modules here, and "
            "written into the export.",
            "The drafter's heads follow the sliding layers (256 wide, 16 key-value heads), which are five of six.",
        ),
    ),
    Recipe(
        "Ministral 3 8B",
        "mistralai/Ministral-3-8B-Instruct-2512",
        "ministral-3-8b",
        "transformers 5.24, whose Ministral3Config has the 8B's sizes as its defaults",
        "h100",
        8,
        "Draftline's default",
        (),
        "not known before the tokenizer is read: a padding row if the table has one, else a special token",
        (
            "Pictures' part left out, as with Gemma. `llama_4_scaling_beta` is the target's own; the drafter has none.",
            "A folder with `tekken.json` alone is read as well.",
        ),
    ),
)


def plan_of(recipe: Recipe, *changes: str) -> Planned:
    """Everything that is computed, as the commands do it."""
    flags = RunFlags(target=str(recipe.config))
    config = load_run_config(None, [*flags.words(), *recipe.words, *changes], find_recipe("default"))
    options = PlanCommand(
        flags=flags,
        mean_length=MEAN_LENGTH,
        conversations=CONVERSATIONS,
        accelerator=recipe.accelerator,
        devices=DEVICES,
    )
    estimate, time, device, work, shape = planned(options, config)
    weights = estimate.target[0].num_bytes  # in bfloat16
    return Planned(
        recipe,
        shape,
        estimate,
        time,
        device.memory_bytes,
        work.steps,
        decay_gamma(config.loss, shape.block_size),
        weights // 2,
    )


_HEAD = f"""# Targets that people have

Written by `python -m scripts.target_plans`; a test compares every line. **None of these has been run here**: there was
no accelerator. What is known without one is exact: the drafter's shape, the captured layers, bytes. Times follow from
data sheets and a stated 40 % of their peak, and were never compared with a run on one. The families themselves live
through every command with tiny random models ([targets](../reference/targets.md)).

The sizes of each target are a file in `docs/guide/targets/`: fields of the public `config.json`, put together on
1 December 2026 from copies of it and transformers' defaults, and in part from memory, not read on the hub, which is not
reachable here. Compare them before you rely on a figure. `plan` takes such a file, so that nothing is loaded:

```
draftline plan --target docs/guide/targets/qwen3-8b.json --mean-length {MEAN_LENGTH} --accelerator h100
```

Figures below are for {CONVERSATIONS:,} conversations of {MEAN_LENGTH:,} tokens, of which 60 % are answers, six passes,
the default recipe (Muon, D-PACE, five layers, five captured layers, 512 anchors) on **two devices**: one captures, one
trains. The default row of 8,192 tokens would need more than 100 GB of activations in blocks of 16;
`train.tokens_per_row=2048 train.rows_per_step=4` is the same step in quarters.

The largest lever on time and memory is `train.num_anchors`: of {RECIPES[0].title}, 256 instead of 512 take
{{share:.0%}} of the drafter's time and {{memory}} instead of {{before}}.
"""


def page(plans: Sequence[Planned]) -> str:
    """The whole of docs/guide/targets.md, from the plan of each recipe."""
    first, fewer = plans[0], plan_of(RECIPES[0], "train.num_anchors=256")
    share = fewer.time.drafter_seconds / first.time.drafter_seconds
    memory, before = size(fewer.estimate.drafter_bytes), size(first.estimate.drafter_bytes)
    head = _HEAD.format(share=share, memory=memory, before=before)
    return "\n".join([head, *_overview(plans), "", *(line for each in plans for line in _section(each))])


def _overview(plans: Sequence[Planned]) -> Iterator[str]:
    yield "| target | parameters | drafter | captured layers | block | memory: target, drafter | training | target's |"
    yield "|---|---|---|---|---|---|---|---|"
    for each in plans:
        shape, estimate, time = each.shape, each.estimate, each.time
        yield (
            f"| [{each.recipe.title}](#{_anchor(each.recipe.title)}) | {each.parameters / 1e9:.2f}B "
            f"| {estimate.parameters / 1e9:.2f}B | {_layers(shape)} "
            f"| {shape.block_size} | {size(estimate.target_bytes)}, {size(estimate.drafter_bytes)} "
            f"on {each.recipe.accelerator} | {duration(time.train_seconds)} | {time.loops_per_drafter:.0%} |"
        )


def _layers(shape: DFlashConfig) -> str:
    return f"{', '.join(map(str, shape.target_layer_ids))} of {shape.num_target_layers}"


def _anchor(title: str) -> str:
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -")
    return kept.replace(" ", "-")


def _section(each: Planned) -> Iterator[str]:
    recipe, shape = each.recipe, each.shape
    yield f"## {recipe.title}"
    yield ""
    yield f"`{recipe.hub}`, never run here. Sizes in [`{recipe.file}.json`](targets/{recipe.file}.json), compared with"
    yield f"{recipe.source}."
    yield ""
    yield "| what | value |"
    yield "|---|---|"
    for name, value in _facts(each):
        yield f"| {name} | {value} |"
    yield ""
    yield "```"
    yield from _commands(recipe)
    yield "```"
    yield ""
    yield "Served by vLLM, as `export` prints it; SGLang below (`export --for sglang`):"
    yield ""
    yield "```"
    for reader in ("vllm", "sglang"):
        yield from serving_command(reader, Serving("drafter", recipe.hub, "bfloat16", shape)).splitlines()  # type: ignore[arg-type]
    yield "```"
    yield ""
    for remark in recipe.remarks:
        yield f"- {remark}"
    if recipe.remarks:
        yield ""


def _facts(each: Planned) -> Iterator[tuple[str, str]]:
    recipe, shape, estimate, time = each.recipe, each.shape, each.estimate, each.time
    yield (
        "drafter",
        f"{estimate.parameters:,} parameters: {shape.num_hidden_layers} layers, hidden size {shape.hidden_size:,}, MLP "
        f"{shape.intermediate_size:,}, {shape.num_attention_heads} heads of {shape.head_dim}, "
        f"{shape.num_key_value_heads} key-value heads",
    )
    yield (
        "captured layers",
        f"{_layers(shape)} (from 0); `fc` reads {len(shape.target_layer_ids) * shape.hidden_size:,}",
    )
    yield "block size", f"{shape.block_size}, {recipe.why}; gamma {each.gamma:g} with the fixed decay"
    yield "mask token", recipe.mask
    needed, device = max(estimate.target_bytes, estimate.drafter_bytes), each.memory
    largest = estimate.largest
    yield (
        "memory",
        f"{size(estimate.target_bytes)} for the target, {size(estimate.drafter_bytes)} for the drafter; the fuller of "
        f"two {recipe.accelerator} with {size(device)} is {needed / device:.0%} full; largest item: {largest.name}, "
        f"{size(largest.num_bytes)} (`{largest.setting}`)",
    )
    yield (
        "wire, disk",
        (
            f"{estimate.wire_bytes:,} bytes a token; all states {size(estimate.capture_bytes)}, not kept; checkpoints "
            f"{size(estimate.disk_bytes)}"
        ),
    )
    yield (
        "time",
        (
            f"{each.steps:,} steps: target's half {duration(time.target_seconds)}, drafter's half "
            f"{duration(time.drafter_seconds)}, together {duration(time.train_seconds)}; {time.loops_per_drafter:.2f} "
            "target loops keep a drafter busy"
        ),
    )


def _commands(recipe: Recipe) -> Iterator[str]:
    """The whole job, answers asked of a server that runs the target alone."""
    mode = shlex.join(recipe.mode)
    yield f"vllm serve {recipe.hub}    # answers; stop it before training"
    yield f"draftline prepare --target {recipe.hub} --data prompts.jsonl --regenerate \\"
    yield "  --base-url http://127.0.0.1:8000/v1 --max-new-tokens 2048 --heldout 200 \\"
    yield f"  {mode + ' ' if mode else ''}--out data"
    yield f"draftline train --target {recipe.hub} --data data --out run \\"
    yield f"  {shlex.join(recipe.words[:3])} \\"
    yield f"  {shlex.join(recipe.words[3:])}"
    yield "draftline export run --for vllm --out drafter"
    yield "draftline verify drafter --base-url http://127.0.0.1:8000/v1    # once it is served"


def main() -> None:
    PAGE.write_text(page([plan_of(recipe) for recipe in RECIPES]), encoding="utf-8")


if __name__ == "__main__":
    main()

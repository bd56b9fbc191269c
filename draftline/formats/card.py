"""The model card: README.md with YAML front matter, so that a drafter says by itself what it is and how to serve it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from draftline.config import DFlashConfig, ExportDtype, LossConfig, OptimConfig, RunConfig, decay_gamma
from draftline.data.accounting import ChatMode
from draftline.data.dataset import PreparedDataset
from draftline.errors import DataError
from draftline.formats.programs import Reader, Serving, serving_command, serving_notes
from draftline.train.checkpoint import StateFile, read_state
from draftline.train.run_folder import checkpoint_folder

CARD_KEY = "draftline"
"""Entry of the card's front matter that programs of Draftline read; other readers of cards ignore it."""

_CARD = "README.md"

FLOAT16_MAX = torch.finfo(torch.float16).max
"""Some servers run drafters in float16. An overflow there raises no error: the logits are NaN, nothing is accepted."""


@dataclass(frozen=True)
class Training:
    """How the drafter came about.

    Attributes:
        data_fingerprint: of the prepared training data.
        step: optimiser steps done.
        tokens: target positions seen.
        allowed: codes of audit findings that the run was allowed to start with.
    """

    run_config: RunConfig
    data_fingerprint: str
    step: int
    tokens: int
    allowed: tuple[str, ...] = ()


@dataclass(frozen=True)
class CardFacts:
    """What a card is written from.

    Attributes:
        serving: the commands' parts.
        readers: programs that can read the exported format, the intended one first.
        checks: what the export checked about itself.
        largest_activation: of the drafter on the target's states; None if it was not measured.
        training: None for a drafter that was imported.
        trained_mode: how the training data was put to the target; None if it is not known.
        evaluation: what `draftline evaluate --json` wrote.
        audit: what `draftline audit --json` wrote about the drafter.
        audit_of_run: the same about its run, before the first step.
    """

    serving: Serving
    readers: tuple[Reader, ...]
    checks: Sequence[str]
    largest_activation: float | None = None
    training: Training | None = None
    trained_mode: ChatMode | None = None
    evaluation: Mapping[str, Any] | None = None
    audit: Mapping[str, Any] | None = None
    audit_of_run: Mapping[str, Any] | None = None


def model_card(facts: CardFacts) -> str:
    """The whole of README.md."""
    parts = (
        _front_matter(facts),
        f"# DFlash drafter for {facts.serving.target}",
        "A block-diffusion draft model for speculative decoding. It has no use on its own: embedding and head are the "
        "target's, and the output is exactly the target's own.",
        _shape(facts.serving.config, facts.serving.dtype, facts.largest_activation),
        _training(facts.training),
        *_modes(facts.trained_mode),
        _acceptance(facts.evaluation),
        _serving(facts),
        _audit(facts),
    )
    return "\n\n".join(parts) + "\n"


def card_entry(mode: ChatMode) -> dict[str, Any]:
    """What the front matter of a card says of the modes."""
    return {CARD_KEY: {"chat_mode": asdict(mode)}}


def trained_mode(folder: Path) -> ChatMode | None:
    """The modes of the data that the drafter in a folder was trained on; None if nothing says them.

    A run or checkpoint knows its data, which must still lie there unchanged; an exported folder has its card.
    """
    checkpoint = checkpoint_folder(folder)
    if checkpoint is not None:
        return _of_run(read_state(checkpoint))
    return _of_card(folder / _CARD)


def _front_matter(facts: CardFacts) -> str:
    fields: dict[str, Any] = {
        "base_model": facts.serving.target,
        "base_model_relation": "adapter",
        "library_name": "draftline",
        "pipeline_tag": "text-generation",
        "tags": ["dflash", "speculative-decoding", "draft-model"],
    }
    if facts.trained_mode is not None:
        fields |= card_entry(facts.trained_mode)
    if facts.evaluation is not None:
        fields["model-index"] = [
            {
                "name": f"DFlash drafter for {facts.serving.target}",
                "results": [
                    {
                        "task": {"type": "text-generation"},
                        "dataset": {"name": "prompts given to draftline evaluate", "type": "prompts"},
                        "metrics": [
                            {
                                "type": "acceptance_length",
                                "name": "acceptance length (with bonus)",
                                "value": facts.evaluation["acceptance_length"],
                            }
                        ],
                    }
                ],
            }
        ]
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---"


def _shape(config: DFlashConfig, dtype: ExportDtype, largest: float | None) -> str:
    layout = "every slot predicts" if config.sample_from_anchor else "slot 0 is the anchor and predicts nothing"
    sliding = config.layer_types.count("sliding_attention")
    manner = "causal" if config.sliding_window_causal else "bidirectional"
    window = f"; {sliding} of them with a window of {config.sliding_window} tokens, {manner} inside a block"
    rows = {
        "block size": f"{config.block_size} ({layout}), {config.num_speculative_tokens} drafted tokens",
        "layers": f"{config.num_hidden_layers}{window if sliding else ''}",
        "captured target layers": f"{list(config.target_layer_ids)} of {config.num_target_layers}, outputs, from 0",
        "mask token": str(config.mask_token_id),
        "vocabulary": _vocabulary(config),
        "rope": f"{config.rope_parameters['rope_type']}, theta {config.rope_parameters['rope_theta']}",
        "longest position": str(config.max_position_embeddings),
        "weights": dtype,
    }
    if largest is not None:
        safe = "safe" if largest <= FLOAT16_MAX else "NOT safe"
        rows["largest activation"] = f"{largest:.1f}: {safe} in float16, which ends at {FLOAT16_MAX:.0f}"
    return "## Shape\n\n" + _table(("", ""), rows.items())


def _vocabulary(config: DFlashConfig) -> str:
    if config.draft_vocab_size is None:
        return f"{config.vocab_size} rows, the target's whole table"
    return f"{config.draft_vocab_size} tokens can be drafted (`d2t`, offsets), of the target's {config.vocab_size} rows"


def _training(training: Training | None) -> str:
    if training is None:
        return (
            "## Training\n\nImported from another trainer's checkpoint; its training data and settings are not known."
        )
    run = training.run_config
    block = run.drafter.block_size
    rows = {
        "target": run.target.name,
        "data": f"{run.data.path.name if run.data.path else 'not recorded'}, fingerprint {training.data_fingerprint}",
        "longest conversation": f"{run.data.max_length} tokens",
        "steps": str(training.step),
        "tokens seen": str(training.tokens),
        "labels": f"{run.loss.labels}, {_weighting(run.loss, block)}, mean over {run.loss.denominator}",
        **({"taught": _taught(run.loss)} if run.loss.teaches_distribution else {}),
        "anchors": f"at most {run.train.num_anchors} per conversation and pass",
        "optimiser": _optimiser(run.optim),
        "seed": str(run.train.seed),
    }
    settings = yaml.safe_dump(run.model_dump(mode="json", exclude={"data"}), sort_keys=False)
    return f"## Training\n\n{_table(('', ''), rows.items())}\n\nAll settings:\n\n```yaml\n{settings}```"


def _weighting(loss: LossConfig, block_size: int) -> str:
    if loss.weights == "dpace":
        return f"D-PACE weights, alpha {loss.dpace_alpha}"
    return f"decay gamma {decay_gamma(loss, block_size)}"


def _taught(loss: LossConfig) -> str:
    of = "" if loss.top_k is None else f", of the target's {loss.top_k} best tokens"
    return f"{loss.ce:g} cross entropy, {loss.kl:g} KL(target, drafter), {loss.tv:g} total variation{of}"


def _optimiser(optim: OptimConfig) -> str:
    adamw = f"AdamW, learning rate {optim.learning_rate}, weight decay {optim.weight_decay}"
    if optim.name == "adamw":
        return adamw
    rate = optim.muon_learning_rate or optim.learning_rate
    return f"Muon, learning rate {rate}, weight decay {optim.muon_weight_decay}; norms by {adamw}"


def _modes(mode: ChatMode | None) -> list[str]:
    """The modes that the drafter has seen its target in; in others it is accepted less."""
    if mode is None:
        return []
    properties = {
        "answers": mode.thinking,
        "system prompts": mode.system_prompts,
        "chat template options": mode.template_options,
    }
    rows = [
        (name, ", ".join(f"{count / sum(counts.values()):.0%} {label}" for label, count in _most_common(counts)))
        for name, counts in properties.items()
    ]
    words = "Serve it in the modes of its training data; in others fewer drafted tokens are accepted."
    return [f"## Modes\n\n{words}\n\n{_table(('', 'of the training conversations'), rows)}"]


def _most_common(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])[:3]


def _acceptance(evaluation: Mapping[str, Any] | None) -> str:
    if evaluation is None:
        return "## Acceptance\n\nNot measured when this card was written; `draftline evaluate` measures it."
    rows = [("acceptance length (with bonus)", _number(evaluation["acceptance_length"]))]
    for name, words in (
        ("teacher_forced_acceptance_length", "teacher-forced acceptance length"),
        ("greedy_equal", "outputs equal to plain greedy decoding"),
        ("speedup", "speed against plain decoding"),
        (
            "best_num_speculative_tokens",
            "drafted tokens to check per forward, fastest on the machine of the evaluation",
        ),
    ):
        if evaluation.get(name) is not None:
            rows.append((words, _number(evaluation[name])))
    table = _table(("", ""), rows)
    rates = evaluation.get("acceptance_rate_by_position") or []
    conditional = evaluation.get("conditional_acceptance_rate_by_position") or [None] * len(rates)
    by_position = _table(
        ("drafted token", "accepted", "given that all before were"),
        [(str(k + 1), _number(rate), _number(c)) for k, (rate, c) in enumerate(zip(rates, conditional, strict=True))],
    )
    return f"## Acceptance\n\n{table}" + (f"\n\n{by_position}" if rates else "")


def _serving(facts: CardFacts) -> str:
    parts = ["## Serving"]
    for reader in facts.readers:
        notes = "\n".join(f"- {note}" for note in serving_notes(reader, facts.serving))
        parts.append(f"### {reader}\n\n```bash\n{serving_command(reader, facts.serving)}\n```\n\n{notes}")
    return "\n\n".join(parts)


def _audit(facts: CardFacts) -> str:
    lines = ["## Checks", "The export read itself back and compared: " + "; ".join(facts.checks) + "."]
    allowed = facts.training.allowed if facts.training is not None else ()
    for when, audit in (("Before the first step ", facts.audit_of_run), ("On the drafter ", facts.audit)):
        if audit is None:
            continue
        findings = audit["findings"]
        ran = len(audit["checks"])
        lines.append(f"{when}`draftline audit` ran {ran} checks and reported {len(findings)} findings.")
        if findings:
            rows = [(f["code"], f["severity"], f["title"], "allowed" if f["code"] in allowed else "") for f in findings]
            lines.append(_table(("code", "severity", "finding", ""), rows))
    if facts.audit is None:
        command = f"`draftline audit {facts.serving.folder} --target {facts.serving.target}`"
        lines.append(f"No audit of the drafter was given to the export; {command} makes one.")
    if allowed:
        lines.append(f"Trained although the audit had found {', '.join(allowed)}, which the user allowed.")
    return "\n\n".join(lines)


def _number(value: float | None) -> str:
    return "no data" if value is None else f"{value:.3f}"


def _table(head: Sequence[str], rows: Any) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _of_run(state: StateFile) -> ChatMode | None:
    path = state["run_config"].get("data", {}).get("path")
    try:
        data = PreparedDataset.open(path) if path is not None else None
    except DataError:  # moved or deleted: then nothing is known
        return None
    if data is None or data.fingerprint not in state["data_fingerprint"].split("+"):
        return None
    return ChatMode.of_prepared(data.meta, data.report)


def _of_card(path: Path) -> ChatMode | None:
    try:
        _, front_matter, _ = path.read_text(encoding="utf-8").split("---\n", 2)
        return ChatMode.from_json(yaml.safe_load(front_matter)[CARD_KEY]["chat_mode"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):  # no card, or somebody else's
        return None

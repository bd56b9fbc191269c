"""The regression that Draftline started from, reproduced: three silent faults, together and each alone.

    python benchmarks/v5_regression.py audit  --target T --data DATA
    python benchmarks/v5_regression.py train  --target T --data DATA --states STATES --out OUT --seeds 3 \\
        --arms right targets --set train.max_steps=300
    python benchmarks/v5_regression.py summary --out OUT

An arm is the pipeline as it is but for one planted change:

    right        nothing
    fc           `fc` reads all captured layers but the last
    targets      training targets are what the target's norm and head make of the last captured layer
    gamma        loss decay 7 with blocks of 8
    version-5    all three

The target runs once: its states are kept in STATES and every arm reads them, so arms differ in nothing but the
fault. Whatever an arm trains on, it is measured against the target's own predictions on held-out conversations:
during training (accuracy, streak), at the end decoded from held-out prompts. `train` writes OUT/ARM/seed-N, a run
folder each, and decoded.json in it; an arm that is there already is not trained again, one that was interrupted goes
on. `summary` compares the arms with `draftline.compare`. `audit` examines version 5 before any step, and each arm.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn

from draftline.audit.report import run_audit
from draftline.audit.subject import subject_to_come
from draftline.compare import compare_groups
from draftline.compare.curves import Estimate
from draftline.config import PipelineConfig, RunConfig, find_recipe, load_run_config
from draftline.data.dataset import PreparedDataset
from draftline.data.split import Conversations, RunData, choose_conversations
from draftline.engine.process import intra_op_threads
from draftline.evaluate.acceptance import Acceptance, acceptance_interval, split_last_answer, teacher_forced_walk
from draftline.evaluate.generate import generate
from draftline.records import CapturedSample, Sample
from draftline.run import Run, assemble
from draftline.storage import write_text
from draftline.targets.drafter_shape import resolve_drafter_config
from draftline.targets.loop import TargetForwardLoop
from draftline.targets.model import Target, load_target, stop_token_ids
from draftline.train.checkpoint import load_draft_model
from draftline.train.run_folder import RunFolder
from draftline.transfer.pack import CaptureLoop
from draftline.transfer.store import StatesStore, fill_store, folder_name, loop_identity

PUBLISHED = {
    "quickstart": ("optim.learning_rate=3e-3", "train.num_anchors=12"),
    "small-model": ("optim.learning_rate=1e-3",),
}
"""By recipe, what goes with AdamW and the fixed decay: version 5 trained with these, and so do all arms."""

WRONG_GAMMA = 7.0
DONE = "decoded.json"


@dataclass(frozen=True)
class Arm:
    """A pipeline and what is wrong with it.

    Attributes:
        narrow_fc: `fc` does not read the last captured layer.
        early_targets: training targets come from the last captured layer.
        wrong_gamma: the loss decays with `WRONG_GAMMA`.
    """

    narrow_fc: bool = False
    early_targets: bool = False
    wrong_gamma: bool = False


ARMS = {
    "right": Arm(),
    "fc": Arm(narrow_fc=True),
    "targets": Arm(early_targets=True),
    "gamma": Arm(wrong_gamma=True),
    "version-5": Arm(narrow_fc=True, early_targets=True, wrong_gamma=True),
}


class EarlyTargets:
    """The last captured layer's predictions in the place of the target's, each sample's computed once.

    Args:
        target: its norm and head make predictions of states.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._ids: dict[int, Tensor] = {}

    def plant(self, captured: CapturedSample) -> CapturedSample:
        """The sample with wrong targets, in the form that they had."""
        last_captured = captured.hidden_states_SLD[:, -self._target.hidden_size :]
        if captured.target_ids_S is None:
            return replace(captured, verifier_last_hidden_SD=last_captured)
        return replace(captured, target_ids_S=self._target.head.target_ids(last_captured))

    def plant_once(self, captured: CapturedSample) -> CapturedSample:
        """The same for samples that come again in every pass."""
        known = self._ids.setdefault(captured.sample.sample_id, torch.empty(0, dtype=torch.int64))
        if not len(known):
            planted = self.plant(captured).target_ids_S
            assert planted is not None, "states are stored with target ids"
            self._ids[captured.sample.sample_id] = planted
        return replace(captured, target_ids_S=self._ids[captured.sample.sample_id])


@dataclass(frozen=True)
class ArmStates:
    """Stands for the target loop of an arm: stored states, with the arm's faults planted.

    Attributes:
        width: features of each position that the arm's `fc` reads.
        early: plants wrong targets, if the arm has them.
    """

    store: StatesStore
    width: int
    early: EarlyTargets | None

    def capture(self, samples: Sequence[Sample]) -> list[CapturedSample]:
        captured = self.store.capture(samples)
        if self.early is not None:
            captured = [self.early.plant_once(item) for item in captured]
        return [replace(item, hidden_states_SLD=item.hidden_states_SLD[:, : self.width]) for item in captured]


@dataclass(frozen=True, eq=False, kw_only=True)
class ArmRun(Run):
    """A run whose training rows carry the faults of an arm; held-out rows have the right targets.

    Attributes:
        bench: has the states.
        early: plants wrong targets, if the arm has them.
    """

    bench: Bench
    early: EarlyTargets | None

    def source(self, conversations: Conversations, target: Target | None = None) -> CaptureLoop:
        del target  # its states are in the stores
        training = conversations is self.bench.data.training
        store = self.bench.training_states if training else self.bench.heldout_states
        return ArmStates(store, self.drafter.model.fc.in_features, self.early if training else None)


class ArmLoop(TargetForwardLoop):
    """A target loop with the faults of an arm: fewer features handed on, targets of the last captured layer."""

    width: int
    early: EarlyTargets | None

    def capture(self, samples: Sequence[Sample]) -> list[CapturedSample]:
        captured = super().capture(samples)
        if self.early is not None:
            captured = [self.early.plant(item) for item in captured]
        return [replace(item, hidden_states_SLD=item.hidden_states_SLD[:, : self.width]) for item in captured]


@dataclass(frozen=True, eq=False, kw_only=True)
class AuditedRun(Run):
    """A run before its first step, as the faulty pipeline would make it."""

    early: EarlyTargets | None

    def capture_loop(self, target: Target | None = None) -> TargetForwardLoop:
        right = super().capture_loop(target)
        loop = ArmLoop(right.target, right.target_layer_ids, right.send, right.batch_tokens)
        loop.width, loop.early = self.drafter.model.fc.in_features, self.early
        return loop


class Bench:
    """What all arms share: target, data, and the target's states of all data.

    Args:
        states: folder for the states; filled if need be.
    """

    def __init__(self, config: RunConfig, states: Path) -> None:
        assert config.data.path is not None, "the command sets it"
        self.target = load_target(config.target)
        training = PreparedDataset.open(config.data.path)
        heldout = PreparedDataset.open(config.data.path / "heldout")
        self.data: RunData = choose_conversations(config, training, heldout)
        shape = resolve_drafter_config(self.target, config.drafter, training.used_token_ids())
        self.layers = shape.target_layer_ids
        self._loop = TargetForwardLoop(self.target, self.layers)
        self.training_states = self._filled(states, training)
        self.heldout_states = self._filled(states, heldout)
        self.early = EarlyTargets(self.target)

    def _filled(self, states: Path, conversations: PreparedDataset) -> StatesStore:
        data = conversations.fingerprint
        identity, size = loop_identity(self._loop, data), PipelineConfig().states_shard_bytes
        store = StatesStore(states / folder_name(data), identity, conversations.lengths, size)
        with store.lock():
            fill_store(store, store.missing(), self._loop, conversations)
        store.finish()
        return store

    def agreement(self) -> float:
        """Share of held-out answer positions at which the last captured layer predicts what the target predicts."""
        same = positions = 0
        for sample_id in self.data.heldout_ids.tolist():
            captured = self.heldout_states.read(self.data.heldout[sample_id])
            early, right = self.early.plant(captured).target_ids_S, captured.target_ids_S
            assert early is not None, "states are stored with target ids"
            assert right is not None, "states are stored with target ids"
            predicts_answer = captured.sample.loss_mask[1:]
            same += int((early == right)[:-1][predicts_answer].sum())
            positions += int(predicts_answer.sum())
        return same / positions


def main() -> None:
    words = _words()
    if words.job == "summary":
        summary(words.out)
        return
    published = ("optim.name=adamw", "loss.weights=decay", *PUBLISHED.get(words.recipe, ()))
    settings = [f"target.name={words.target}", *published, *words.settings]
    config = load_run_config(None, settings, find_recipe(words.recipe))
    config = config.model_copy(update={"data": config.data.model_copy(update={"path": words.data})})
    with intra_op_threads(1):
        if words.job == "audit":
            audit_arms(config, words.arms)
        else:
            train_arms(config, words)


def train_arms(config: RunConfig, words: argparse.Namespace) -> None:
    """Train and measure every arm with every seed, seed by seed, so that an early end leaves whole groups."""
    bench = Bench(config, words.states)
    words.out.mkdir(parents=True, exist_ok=True)
    write_text(words.out / "bench.json", json.dumps({"layers": bench.layers, "agreement": bench.agreement()}) + "\n")
    for seed in range(words.first_seed, words.first_seed + words.seeds):
        for name in words.arms:
            folder = words.out / name / f"seed-{seed}"
            if not (folder / DONE).exists():
                _say(f"{name}, seed {seed}")
                train_arm(config, bench, ARMS[name], seed, folder)
                measured = measure(bench, folder, words.prompts, words.max_new_tokens)
                write_text(folder / DONE, json.dumps(measured, indent=2) + "\n")


def train_arm(config: RunConfig, bench: Bench, arm: Arm, seed: int, folder: Path) -> None:
    """One run; where it was interrupted, it goes on."""
    loss = config.loss.model_copy(update={"decay_gamma": WRONG_GAMMA if arm.wrong_gamma else config.loss.decay_gamma})
    train = config.train.model_copy(update={"seed": seed})
    pipeline = config.pipeline.model_copy(update={"mode": "inline", "threads_per_loop": 1})
    config = config.model_copy(update={"loss": loss, "train": train, "pipeline": pipeline})
    drafter = {"target_layer_ids": bench.layers[:-1] if arm.narrow_fc else bench.layers}
    config = config.model_copy(update={"drafter": config.drafter.model_copy(update=drafter)})
    run = assemble(config, bench.target, bench.data)
    early = bench.early if arm.early_targets else None
    train(ArmRun(**vars(run), bench=bench, early=early), folder, resume=True)


def measure(bench: Bench, folder: Path, prompts: int, max_new_tokens: int) -> dict[str, object]:
    """Acceptance length decoded from held-out prompts, and by the teacher-forced walk over the target's answers."""
    model, target = load_draft_model(folder), bench.target
    stops = stop_token_ids(target.model, target.require_tokenizer())
    conversations = [bench.data.heldout[sample_id] for sample_id in bench.data.heldout_ids.tolist()]
    turns = [(prompt, answer) for prompt, answer in map(split_last_answer, conversations) if len(answer) > 1]
    counts = []
    for prompt, _ in turns[:prompts]:
        generation = generate(
            target, model, torch.tensor([prompt]), max_new_tokens=max_new_tokens, stop_token_ids=stops
        )
        counts.append(Acceptance(len(generation.output_ids) - 1, generation.target_forwards))
    same_tokens = [(prompt, answer[:max_new_tokens]) for prompt, answer in turns[:prompts]]
    walked = Acceptance.total(teacher_forced_walk(target, model, same_tokens))
    return {
        "acceptance_length": Acceptance.total(counts).length,
        "acceptance_length_interval": acceptance_interval(counts, model.config.block_size),
        "prompts": len(counts),
        "per_prompt": [asdict(count) for count in counts],
        "teacher_forced_acceptance_length": walked.length,
    }


def audit_arms(config: RunConfig, names: Sequence[str]) -> None:
    """What the audit says of each arm before its first step."""
    target = load_target(config.target)
    early = EarlyTargets(target)
    for name in names:
        arm = ARMS[name]
        gamma = WRONG_GAMMA if arm.wrong_gamma else config.loss.decay_gamma
        wrong = config.model_copy(update={"loss": config.loss.model_copy(update={"decay_gamma": gamma})})
        subject = subject_to_come(wrong, target)
        if arm.narrow_fc:
            width = subject.draft_model.fc.in_features - target.hidden_size
            subject.draft_model.fc = nn.Linear(width, target.hidden_size, bias=False)
        run = AuditedRun(**vars(subject.run), early=early if arm.early_targets else None)
        report = run_audit(replace(subject, run=run))
        found = ", ".join(f"{finding.code} ({finding.severity})" for finding in report.findings) or "nothing"
        print(f"{name}: {found}", flush=True)
        for finding in report.findings:
            print(f"  {finding.code} {finding.title}: {finding.evidence}", flush=True)


def summary(out: Path) -> None:
    """Each faulty arm beside the right one, as a table; intervals are 95 %."""
    runs = {name: sorted(path.parent for path in (out / name).glob(f"seed-*/{DONE}")) for name in ARMS}
    bench = json.loads((out / "bench.json").read_text())
    layers = bench["layers"]
    print(f"captured layers {layers}; layer {layers[-1]} predicts the target's token at {bench['agreement']:.1%}")
    titles = (
        "arm",
        "seeds",
        "accuracy",
        "streak",
        "decoded acceptance length",
        "accuracy, right over it",
        "streak, right over it",
        "acceptance, right over it",
        "right reaches the same accuracy",
    )
    print(f"| {' | '.join(titles)} |")
    print("|---" * len(titles) + "|")
    for name, folders in runs.items():
        if folders:
            print(f"| {' | '.join([name, str(len(folders)), *_measured(folders), *_against(runs, name)])} |")


def _measured(folders: Sequence[Path]) -> list[str]:
    """Means over the runs of an arm: accuracy and streak of the last evaluation, decoded acceptance length."""
    metrics = [RunFolder(folder).metrics for folder in folders]
    clusters = _by_prompt(folders)
    low, high = acceptance_interval(clusters, longest=8)
    heldout = ([run[f"heldout_{name}"].values[-1] for run in metrics] for name in ("accuracy", "streak"))
    accuracy, streak = map(fmean, heldout)
    return [f"{accuracy:.3f}", f"{streak:.2f}", f"{Acceptance.total(clusters).length:.2f} ({low:.2f} to {high:.2f})"]


def _by_prompt(folders: Sequence[Path]) -> list[Acceptance]:
    """Decoded counts of each prompt, summed over runs."""
    decoded = [json.loads((folder / DONE).read_text())["per_prompt"] for folder in folders]
    return [Acceptance.total([Acceptance(**count) for count in counts]) for counts in zip(*decoded, strict=True)]


def _paired_acceptance(right: Sequence[Path], faulty: Sequence[Path]) -> str:
    """Ratio of the decoded acceptance lengths over the seeds that both have, with a bootstrap over prompts.

    Both arms decode the same prompts, so what is hard for both cancels; the interval says nothing about other seeds.
    """
    seeds = {path.name for path in right} & {path.name for path in faulty}
    counts = np.array(
        [
            [(count.tokens, count.forwards) for count in _by_prompt([path for path in side if path.name in seeds])]
            for side in (right, faulty)
        ],
        dtype=np.float64,
    )
    drawn = np.random.default_rng(0).integers(counts.shape[1], size=(4000, counts.shape[1]))
    sums = counts[:, drawn].sum(axis=2)
    lengths = sums[..., 0] / sums[..., 1]
    low, high = np.percentile(lengths[0] / lengths[1], [2.5, 97.5])
    whole = counts.sum(axis=1)
    return _words_of(Estimate(float(np.divide(*(whole[:, 0] / whole[:, 1]))), float(low), float(high)))


def _against(runs: Mapping[str, Sequence[Path]], name: str) -> list[str]:
    """The right arm compared with a faulty one: accuracy and streak at equal steps, steps to the same accuracy."""
    if name == "right" or not runs["right"]:
        return ["", "", "", ""]
    pair = compare_groups({name: runs[name], "right": runs["right"]}).pairs[0]
    sooner = pair.steps_to_same_accuracy
    times = "" if sooner is None else f"{_words_of(sooner.times)} times sooner ({sooner.bound}, at {sooner.level:.3f})"
    acceptance = _paired_acceptance(runs["right"], runs[name])
    return [_words_of(pair.ratio), _words_of(pair.streak_ratio), acceptance, times]


def _words_of(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    interval = "" if estimate.low is None or estimate.high is None else f" ({estimate.low:.2f} to {estimate.high:.2f})"
    return f"{estimate.value:.2f}{interval}"


def _words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=("audit", "train", "summary"))
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--states", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--recipe", default="small-model")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--set", nargs="+", default=[], dest="settings", help="section.key=value ...")
    return parser.parse_args()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

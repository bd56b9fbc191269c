"""The judge of a short life: every recorded step beside what the reference run says of it.

Each step is compared as it happens, from the run's own state before it, so that a fault shows where it is and not in
all that follows: rows against the written order, states against the target alone, the gradient against float64 on the
states that arrived, the update on the gradient that arrived, figures on the weights that were there. What the run left
behind when it ended is compared in `whole.py`.

    RUN002  rows and tokens     RUN003  states and labels       RUN004  blocks, anchors, first weights
    RUN005  gradient, counts    RUN006  update, resume

Two right computations differ by rounding. Where it is not the usual of float32 it is measured: the reference is asked
again with operands rounded as the run rounds them, and what that moves is what rounding explains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from draftline.audit import oracle
from draftline.audit.drafter_reference import ReferenceDrafter, drafter_of
from draftline.audit.life import DrafterInput, RecordedStep
from draftline.audit.oracle_decoding import acceptance_length, walks
from draftline.audit.oracle_update import Moment, goes_by_muon, learning_rate, moved, rate_of
from draftline.audit.reference import ReferenceForward, model_forward, role_ids
from draftline.config import OptimConfig, sent_beside_states
from draftline.data.dataset import PreparedDataset
from draftline.data.split import Conversations
from draftline.draft.loss import StepMetrics
from draftline.records import PackedBatch
from draftline.run import Run

_EXACT = 2e-4
"""Relative difference from float64 that float32 explains in a gradient, by tensor."""

_MARGIN = 6.0
"""How many times the measured rounding a right computation may be off: errors of both sides, of the worst tensor."""

_EPS = {torch.float64: 2.0**-23, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

_ORDER = "rows, passes and steps as docs/concepts/semantics.md (section 1) writes them; whole conversations, none twice"
_DELIVER = "hand on each layer's output as it is; targets from the last layer through the target's own norm and head"
_CARRY = "the same states from hook to drafter: no cast, no stale buffer, no scaling, no other target"
_BLOCKS = "anchors drawn by (seed, pass, sample id); [embed(anchor), embed(mask), ..] at anchor .. anchor + P - 1"
_LEARN = "see the LOS and DRF checks; sum over all rows of the step, divide once by the global count, clip once"
_MOVE = "optim.name with the configured numbers, the rate of this step, and the moments that a checkpoint brings back"


@dataclass(frozen=True)
class Difference:
    """Something that the run did otherwise than the reference.

    Attributes:
        evidence: where it first shows, and by how much.
        fix: what is right.
    """

    code: str
    evidence: str
    fix: str


@dataclass(frozen=True, eq=False)
class Text:
    """A conversation as it lies in the data, read without the run's own reader: [S] ids and [S] mask."""

    input_ids: Tensor
    loss_mask: Tensor


@dataclass(frozen=True)
class Evaluated:
    """What the reference measures on held-out rows after a step.

    Attributes:
        counts: exact but for near ties; near: slots at which rounding may decide.
        walk: teacher-forced acceptance length; None where nothing is walked, or a tie decides.
    """

    counts: oracle.Counts
    near: int
    walk: float | None


class Judge:
    """Watches a life and collects differences.

    Args:
        run: the run that the life is one of.

    Attributes:
        differences: the first of each code.
        counts: of each step, as the run counted them, after they were compared.
        evaluated: by steps done, where an evaluation is due.
        steps: the recorded steps without their rows; a_row: the first row of the run.
    """

    def __init__(self, run: Run) -> None:
        self.differences: list[Difference] = []
        self.counts: list[oracle.Counts] = []
        self.evaluated: dict[int, Evaluated] = {}
        self.steps: list[RecordedStep] = []
        self.a_row: PackedBatch | None = None
        self.model = run.target.model
        self._layers = run.shape.target_layer_ids
        self._kept = oracle.kept_narrow(run.config)
        self._reference: ReferenceDrafter | None = None
        self._forwards: dict[tuple[str, int], ReferenceForward] = {}
        self._moments: dict[str, Moment] = {}
        self._texts: dict[str, dict[int, Text]] = {}
        self._plan: dict[int, list[oracle.PlannedRow]] = {}

    def say(self, code: str, evidence: str, fix: str) -> None:
        """Note the first difference of each code: those that follow are most likely its consequences."""
        if code not in {one.code for one in self.differences}:
            self.differences.append(Difference(code, evidence, fix))

    def observe(self, run: Run, record: RecordedStep) -> None:
        """Compare one step; see the head of this file."""
        if not self._plan:
            self._begin(run, record)
            self.a_row = record.batches[0]
        self._continuity(record)
        if self._rows(record):
            self._learning(run, record)
        self._update(run, record)
        if (
            oracle.is_due(record.step + 1, run.config.train.eval_every, run.sampler.total_steps)
            and run.data.heldout_ids.size
        ):
            self.evaluated[record.step + 1] = self._evaluate(run, record)
        self.counts.append(
            counts_of(record.result.metrics if record.result else StepMetrics.zero(run.shape.block_size))
        )
        self.steps.append(replace(record, batches=[], inputs=[], summed={}, gradients={}, before={}))

    # What is trained on, and where it begins.

    def _begin(self, run: Run, record: RecordedStep) -> None:
        data = run.data
        for name, part, ids in (
            ("training", data.training, data.training_ids),
            ("heldout", data.heldout, data.heldout_ids),
        ):
            self._texts[name] = {int(i): text_of(part, int(i)) for i in ids}
        training = self._texts["training"]
        lengths = [len(text.input_ids) for text in training.values()]
        for row in oracle.plan_run(list(training), lengths, run.config.train):
            self._plan.setdefault(row.step, []).append(row)
        self._reference = drafter_of(run.shape, record.before, self.model)
        drafter, kept = run.config.drafter, self._reference.kept_ids
        if kept is not None and drafter.init_from is None:
            stops = role_ids(run.target, "eos") if run.target.tokenizer is not None else set()
            pairs = [(text.input_ids, text.loss_mask) for text in training.values()]
            wanted = oracle.kept_tokens(pairs, len(kept), run.target.vocab_size, stops)
            if kept.tolist() != wanted:
                other = sorted(set(kept.tolist()) ^ set(wanted))
                self.say(
                    "RUN004", f"the drafter's tokens differ from the recipe's in {other[:6]}", "the most frequent ones"
                )
        if drafter.init_from is None and drafter.start_from == "random":
            for name, weight in oracle.first_weights(run.shape, run.config.train.seed).items():
                if not torch.equal(record.before[name].cpu(), weight):
                    fix = "torch.normal(0, 0.02) from one generator seeded by train.seed, in the order of the recipe"
                    self.say("RUN004", f"{name} does not begin with the weights that the seed draws", fix)

    def _continuity(self, record: RecordedStep) -> None:
        if not self.steps:
            return
        last = self.steps[-1]
        when = "over the stop and the resume" if record.resumed else "between two steps"
        if record.step != last.step + 1:
            self.say("RUN006", f"{when}, step {record.step} follows step {last.step}", "go on where the run stood")
        changed = [name for name, tensor in last.after.items() if not torch.equal(tensor, record.before[name])]
        if changed:
            fix = "nothing but the optimiser moves weights; a checkpoint brings them back bit for bit"
            self.say("RUN006", f"{len(changed)} tensors changed {when} (step {record.step}), first {changed[0]}", fix)

    def _rows(self, record: RecordedStep) -> bool:
        """Whether the rows of a step are those of the recipe, token by token."""
        found = [(b.sequence_number, b.epoch, b.sample_ids, b.step, b.last_of_step) for b in record.batches]
        planned = self._plan.get(record.step, [])
        wanted = [(r.sequence_number, r.epoch, r.sample_ids, r.step, r.last_of_step) for r in planned]
        if found != wanted:
            unlike = next((pair for pair in zip(found, wanted, strict=False) if pair[0] != pair[1]), (found, wanted))
            text = f"(row, pass, conversations, step, last of it) is {unlike[0]}, by the recipe {unlike[1]}"
            self.say("RUN002", f"step {record.step}: {text}", _ORDER)
            return False
        for batch in record.batches:
            texts = [self._texts["training"][i] for i in batch.sample_ids]
            lengths = [len(text.input_ids) for text in texts]
            columns = {
                "input_ids": torch.cat([text.input_ids for text in texts]),
                "loss_mask": torch.cat([text.loss_mask for text in texts]).long(),
                "document_ids": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
                "position_ids": torch.cat([torch.arange(length) for length in lengths]),
            }
            for name, column in columns.items():
                given: Tensor = batch.tensors()[name][0].cpu().long()
                if not torch.equal(given, column):
                    self.say("RUN002", f"row {batch.sequence_number}: {name} {_unlike(given, column)}", _ORDER)
                    return False
        return True

    # What reaches the drafter, and what it learns from it.

    def _learning(self, run: Run, record: RecordedStep) -> None:
        train = run.config.train
        rows, drawn, inputs = [], [], list(record.inputs)
        for batch in record.batches:
            forwards = [self._forward("training", i) for i in batch.sample_ids]
            self._delivered(run, batch, forwards)
            row = self._row(run, batch, forwards, batch.hidden_states_packed[0])
            anchors = oracle.row_anchors(row, train.seed, train.num_anchors)
            if any(anchors):
                if not inputs:
                    return self.say("RUN004", f"row {batch.sequence_number}: the drafter was not called", _BLOCKS)
                given = inputs.pop(0)
                if not self._blocks(batch, row, anchors, given):
                    return None
                self._states("what the drafter is given", batch, given.states[0], forwards)
                row = self._row(run, batch, forwards, given.states[0])
            rows.append(row)
            drawn.append(anchors)
        return self._gradient(run, record, rows, drawn)

    def _row(self, run: Run, batch: PackedBatch, forwards: Sequence[ReferenceForward], states: Tensor) -> oracle.Row:
        texts = [self._texts["training"][i] for i in batch.sample_ids]
        ids, mask = torch.cat([t.input_ids for t in texts]), torch.cat([t.loss_mask for t in texts])
        next_ids, best = self._labels(run, batch, forwards)
        lengths, normed = [len(text.input_ids) for text in texts], self._normed(run, batch)
        whole = oracle.Conversation(-1, ids, mask, states, next_ids, best, normed)
        return oracle.split_row(batch.epoch, batch.sample_ids, lengths, whole)

    @torch.no_grad()
    def _normed(self, run: Run, batch: PackedBatch) -> Tensor | None:
        """What the output matrix receives of the last states that were delivered, [S, D]; None where ids were."""
        last = batch.verifier_last_hidden_packed
        return None if last is None else run.target.final_norm.forward(last[0].to(self.model.device)).cpu()

    def _labels(
        self, run: Run, batch: PackedBatch, forwards: Sequence[ReferenceForward]
    ) -> tuple[Tensor, Tensor | None]:
        """The target's greedy tokens, and its best among those the drafter can say.

        Where two logits are within rounding, batches decide it otherwise than a conversation alone: the tokens are
        those that were delivered, or follow from the last states that were.
        """
        assert self._reference is not None
        kept, normed = self._reference.kept_ids, self._normed(run, batch)
        if batch.target_ids is not None:
            own = torch.cat([forward.next_ids for forward in forwards]).cpu()
            return torch.where(torch.cat([f.ties.cpu() for f in forwards]), batch.target_ids[0].cpu(), own), None
        assert normed is not None, "PackedBatch carries one of the two"
        with torch.no_grad():
            logits = self.model.get_output_embeddings()(normed.to(self.model.device)).cpu()
        return logits.argmax(-1), None if kept is None else kept[logits[:, kept].argmax(-1)]

    def _delivered(self, run: Run, batch: PackedBatch, forwards: Sequence[ReferenceForward]) -> None:
        """What the pipeline hands to the drafter's side, against the target alone."""
        name, send = f"row {batch.sequence_number}", sent_beside_states(run.config)
        self._states("what arrives", batch, batch.hidden_states_packed[0], forwards)
        if (batch.target_ids is None) != (send == "last_hidden"):
            self.say("RUN003", f"{name} does not carry {send} beside the captured layers", _DELIVER)
        if batch.target_ids is not None:
            found, own = batch.target_ids[0].cpu(), torch.cat([f.next_ids for f in forwards]).cpu()
            taught = torch.zeros_like(own, dtype=torch.bool)  # where no slot may ask, nothing has to be said
            taught[:-1] = (batch.loss_mask & (batch.position_ids > 0))[0, 1:].cpu()
            wrong = (found != own) & taught & ~torch.cat([f.ties.cpu() for f in forwards])
            if wrong.any():
                place = int(wrong.int().argmax())
                text = f"{name}: {int(wrong.sum())} of {int(taught.sum())} target ids are not the target's own"
                self.say("RUN003", f"{text}, first {int(found[place])} for {int(own[place])} at {place}", _DELIVER)
        elif batch.verifier_last_hidden_packed is not None:
            last = torch.cat([forward.layers[-1] for forward in forwards])
            off = _by_token(batch.verifier_last_hidden_packed[0], last)
            if off > self._rounding_of_states:
                self.say("RUN003", f"{name}: last hidden states are off by {off:.1e} (relative)", _DELIVER)

    def _states(self, where: str, batch: PackedBatch, found: Tensor, forwards: Sequence[ReferenceForward]) -> None:
        wanted = torch.cat([forward.states(self._layers) for forward in forwards])
        off, allowed = _by_token(found, wanted), self._rounding_of_states
        if off > allowed:
            text = f"row {batch.sequence_number}, {where}: states are off by {off:.1e} (relative) from the target alone"
            if found.shape == wanted.shape:
                ours, theirs = found.double().cpu(), wanted.double().cpu()
                text += f", best factor {float((ours * theirs).sum() / theirs.square().sum()):.3f}"
            self.say("RUN003", f"{text}; rounding explains {allowed:.1e}", _CARRY)

    def _blocks(
        self, batch: PackedBatch, row: oracle.Row, anchors: Sequence[Sequence[int]], given: DrafterInput
    ) -> bool:
        """Whether the blocks of a row are those of the recipe."""
        assert self._reference is not None
        view, name = self._reference.view, f"row {batch.sequence_number} (pass {batch.epoch})"
        wanted = oracle.in_row_positions(row, anchors)
        if given.anchors.tolist() != wanted:
            text = f"{name}: anchors {given.anchors.tolist()[:6]}, the recipe draws {wanted[:6]}"
            self.say("RUN004", text, _BLOCKS)
            return False
        positions = torch.cat([torch.arange(len(item.input_ids)) for item in row.conversations])
        if given.positions.tolist() != positions.tolist():
            self.say("RUN004", f"{name}: positions {_unlike(given.positions.cpu(), positions)}", _BLOCKS)
            return False
        assert view.mask_token_id is not None, "assemble settles it"
        ids = torch.cat([item.input_ids for item in row.conversations])[wanted]
        blocks = torch.full((len(wanted), view.block_size), view.mask_token_id)
        blocks[:, 0] = ids
        off = _by_token(given.embeddings[0], self._reference.embed(blocks).flatten(0, 1))
        if off > 4 * _EPS[self.model.dtype]:
            self.say("RUN004", f"{name}: block embeddings are off by {off:.1e} (relative)", _BLOCKS)
        if not given.training:
            self.say("RUN004", f"{name}: the drafter is in evaluation mode while it trains", "model.train() for steps")
        return True

    def _gradient(
        self, run: Run, record: RecordedStep, rows: Sequence[oracle.Row], anchors: list[list[list[int]]]
    ) -> None:
        assert self._reference is not None
        loss, name = run.config.loss, f"step {record.step}"
        drafter = self._reference.with_weights(record.before)
        wanted = oracle.step_gradient(as_computed(run, drafter), rows, anchors, loss)
        rounded, margin = self._rounded(run, drafter, rows, anchors)
        factor = min(1.0, run.config.optim.clip_norm / (wanted.norm + 1e-6)) if wanted.norm else 1.0
        off: dict[str, float] = {}
        for tensor, gradient in wanted.gradients.items():
            found = record.gradients.get(tensor)
            size = float(gradient.norm())
            # rounded operands may by chance move a tensor hardly at all; rounded sums still do
            share = _EXACT if margin == 1.0 else max(_EXACT, _EPS[computed_in(run)] / 4)
            allowed = share * max(size, 1e-3 * wanted.norm)
            if rounded is not None:
                allowed += margin * float((rounded.gradients[tensor] - gradient).norm())
            if found is None:
                off[tensor] = math.inf
            elif (distance := float((found.double().cpu() - factor * gradient).norm())) > factor * allowed:
                off[tensor] = distance / max(factor * size, 1e-30)
        if off:
            worst = max(off, key=off.__getitem__)
            text = f"{name}: {len(off)} of {len(wanted.gradients)} gradients differ from float64"
            self.say("RUN005", f"{text}, most {worst} by {off[worst]:.1e} (relative)", _LEARN)
        self._clipped(record)
        self._counted(record, wanted, rounded, is_narrow(run))
        self._norm(record, wanted, rounded)

    def _clipped(self, record: RecordedStep) -> None:
        """Between autograd and the optimiser every number is multiplied by the same one, and nothing else."""
        pairs = {name: (s.double(), record.gradients[name].double()) for name, s in record.summed.items()}
        squares = sum(float(summed.square().sum()) for summed, _ in pairs.values())
        factor = sum(float((summed * found).sum()) for summed, found in pairs.values()) / max(squares, 1e-300)
        for name, (summed, found) in pairs.items():
            if bool(((found - factor * summed).abs() > 1e-6 * factor * summed.abs() + 1e-30).any()):
                text = f"step {record.step}: gradient of {name} is not what autograd added up times {factor:.6g}"
                return self.say("RUN005", text, "divide and clip all gradients by one number, in float32")
        return None

    def _norm(self, record: RecordedStep, wanted: oracle.StepGradient, rounded: oracle.StepGradient | None) -> None:
        allowed = _EXACT * wanted.norm + (0.0 if rounded is None else _MARGIN * abs(rounded.norm - wanted.norm))
        allowed += 0.0 if rounded is None else 0.02 * wanted.norm
        found = math.nan if record.result is None else record.result.grad_norm
        if not abs(found - wanted.norm) <= allowed:
            text = f"step {record.step}: the gradient norm is given as {found:.5g}, it is {wanted.norm:.5g}"
            self.say("RUN005", text, "the global norm after the division and before clipping")

    def _counted(
        self, record: RecordedStep, wanted: oracle.StepGradient, rounded: oracle.StepGradient | None, narrow: bool
    ) -> None:
        if record.result is None:
            return
        near = sum(near_ties(heard, narrow) for row in wanted.spoken for heard in row)
        drift = 0.0
        if rounded is not None:  # errors of slots cancel in the sum that is measured, and need not in the run's
            drift = _MARGIN * abs(rounded.counts.loss_sum - wanted.counts.loss_sum) + 3e-3 * wanted.counts.loss_sum
        unlike = unlike_counts(counts_of(record.result.metrics), wanted.counts, near, drift)
        if unlike:
            self.say(
                "RUN005", f"step {record.step}: {unlike}", "count every supervised slot once, as section 6 defines"
            )

    def _rounded(
        self, run: Run, drafter: ReferenceDrafter, rows: Sequence[oracle.Row], anchors: list[list[list[int]]]
    ) -> tuple[oracle.StepGradient | None, float]:
        """A gradient whose distance from the wanted one measures rounding, and how many times that is allowed.

        None where everything is float32. Of a narrow head alone, what its rounding moves at all; of narrow products,
        more than what rounded operands move, because sums are rounded as well.
        """
        low = computed_in(run)
        if low == torch.float32:
            return (oracle.step_gradient(drafter, rows, anchors, run.config.loss) if is_narrow(run) else None), 1.0
        rounding = replace(drafter, dtype=low).with_head_in(low)
        return oracle.step_gradient(rounding, rows, anchors, run.config.loss), _MARGIN

    # What the optimiser makes of it.

    def _update(self, run: Run, record: RecordedStep) -> None:
        optim, name = run.config.optim, f"step {record.step}"
        rate = learning_rate(record.step, run.sampler.total_steps, optim)
        if record.updates != (1 if record.gradients else 0):
            return self.say("RUN006", f"{name}: the optimiser moved {record.updates} times", "once a step")
        for tensor, weight in record.before.items():
            gradient, found = record.gradients.get(tensor), record.after[tensor].double().cpu()
            wanted, own = weight.double().cpu(), rate_of(weight, rate, optim)
            if gradient is not None:
                if not math.isclose(record.rates.get(tensor, math.nan), own, rel_tol=1e-6, abs_tol=1e-12):
                    text = f"{name}: rate of {tensor} {record.rates.get(tensor)}, by the schedule {own:.6g}"
                    return self.say("RUN006", text, _MOVE)
                moment = self._moments.get(tensor) or Moment.zero(wanted)
                wanted, self._moments[tensor] = moved(wanted, gradient.double().cpu(), moment, rate, optim)
            off = float((found - wanted).abs().max())
            if not off <= _unsure(weight, own, optim) + 4 * _EPS[torch.float32] * float(wanted.abs().max()):
                after = ", the first after the resume" if record.resumed else ""
                step = float((found - weight.double().cpu()).abs().max())
                text = (
                    f"{name}{after}: {tensor} moves by {step:.2e} and ends {off:.2e} from where {optim.name} brings it"
                )
                return self.say("RUN006", text, _MOVE)
        return None

    # Figures on held-out rows.

    def _evaluate(self, run: Run, record: RecordedStep) -> Evaluated:
        assert self._reference is not None
        drafter, train = as_computed(run, self._reference.with_weights(record.after)), run.config.train
        texts, low = self._texts["heldout"], is_narrow(run)
        lengths = [len(text.input_ids) for text in texts.values()]
        counts, near = oracle.Counts.zero(drafter.view.block_size), 0
        for planned in oracle.plan_heldout(list(texts), lengths, train.tokens_per_row):
            for i in planned.sample_ids:
                forward, text = self._forward("heldout", i), texts[i]
                best = None if drafter.kept_ids is None else forward.best_of(drafter.kept_ids).cpu()
                states, next_ids = forward.states(self._layers).cpu(), forward.next_ids.cpu()
                states = oracle.as_kept(states, len(self._layers), self._kept)
                item = oracle.Conversation(
                    i, text.input_ids, text.loss_mask, states, next_ids, best, forward.normed.cpu()
                )
                anchors = oracle.draw_anchors(
                    text.loss_mask, i, oracle.HELDOUT_EPOCH, oracle.HELDOUT_SEED, train.num_anchors
                )
                with torch.no_grad():
                    heard = oracle.speak(drafter, item, anchors, run.config.loss)
                counts = counts + heard.counts
                ties = forward.ties
                near += near_ties(heard, low) + sum(bool(ties[place - 1]) for _, _, place in heard.slots)
        walked = [(text.input_ids, text.loss_mask) for text in list(texts.values())[: train.eval_walks]]
        taken = walks(drafter, self.model, walked)
        sure = (
            taken and self._kept is None and min(gap for walk in taken for gap in [*walk.gaps, math.inf]) > _near(low)
        )
        tokens, jumps = sum(walk.tokens for walk in taken), sum(walk.jumps for walk in taken)
        return Evaluated(counts, near, acceptance_length(tokens, jumps) if sure else None)

    def _forward(self, part: str, sample_id: int) -> ReferenceForward:
        key = (part, sample_id)
        if key not in self._forwards:
            self._forwards[key] = model_forward(self.model, self._texts[part][sample_id].input_ids)
        return self._forwards[key]

    @property
    def _rounding_of_states(self) -> float:
        """Relative difference of a token's states that batches and kernels explain, from the number formats."""
        if self._kept is not None:
            return oracle.ROUNDING_OF_KEPT[self._kept]
        return 1e-3 if _EPS[self.model.dtype] < 1e-6 else 16 * _EPS[self.model.dtype]


def _unsure(weight: Tensor, rate: float, optim: OptimConfig) -> float:
    """How far from the reference an update may end: its entries are about as large as its rate.

    On an accelerator Muon iterates in bfloat16, which brings each singular value to another place near 1. On a CPU it
    takes the eigenvalues of a float32 product, and singular values under a thousandth of the largest, as few slots
    leave them, are then known to some per cent: up to 1.2 % of an update's largest entry was measured.
    """
    if not goes_by_muon(weight, optim):
        return 0.01 * rate
    return (0.05 if weight.device.type == "cpu" else 0.3) * rate


def as_computed(run: Run, drafter: ReferenceDrafter) -> ReferenceDrafter:
    """The reference with the head in the target's number format: all that a narrow target does to a float32 drafter."""
    wide = run.target.dtype in (torch.float32, torch.float64)
    return drafter if wide else drafter.with_head_in(run.target.dtype)


def computed_in(run: Run) -> torch.dtype:
    """Number format of the drafter's products by the settings, whatever the drafter at hand is left with."""
    wanted = run.config.train.precision
    low = wanted == "bfloat16" or (wanted == "auto" and run.drafter.device.type != "cpu")
    return torch.bfloat16 if low else torch.float32


def is_narrow(run: Run) -> bool:
    """Whether logits of the drafter come in a narrow number format, so that ties are frequent."""
    return computed_in(run) != torch.float32 or run.target.dtype not in (torch.float32, torch.float64)


def near_ties(heard: oracle.Spoken, low: bool) -> int:
    """Slots whose two best logits are so close that rounding may decide."""
    return int((heard.gaps < _near(low)).sum())


def _near(low: bool) -> float:
    """Logits of the size of ten, and the last bit of their format, or of the sums behind them."""
    return 0.12 if low else 2e-3


def counts_of(metrics: StepMetrics) -> oracle.Counts:
    """The run's own counts in the words of the reference."""

    def listed(table: Tensor) -> tuple[int, ...]:
        return tuple(int(value) for value in table.tolist())

    return oracle.Counts(
        slots=listed(metrics.slots_P),
        right=listed(metrics.correct_target_P),
        right_in_data=listed(metrics.correct_data_P),
        run=listed(metrics.run_correct_P),
        reached=listed(metrics.run_slots_P),
        blocks=metrics.blocks,
        tokens=metrics.tokens,
        loss_sum=metrics.loss_sum,
        weight_sum=metrics.weight_sum,
        lost_mass=metrics.lost_mass,
    )


def unlike_counts(found: oracle.Counts, wanted: oracle.Counts, near: int, drift: float) -> str | None:
    """The first count that differs by more than near ties and rounding explain, in words.

    Args:
        near: slots at which either token may be said.
        drift: nats that rounding explains in the summed loss.
    """
    for name in ("slots", "blocks", "tokens"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        if ours != theirs:
            return f"{name} {ours}, by the recipe {theirs}"
    spread = near * len(wanted.slots)
    for name, most in (("right", near), ("right_in_data", near), ("run", spread), ("reached", spread)):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        if sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) > 2 * most:
            return f"{name} {ours}, by the recipe {theirs}"
    for name, allowed in (
        ("loss_sum", drift + _EXACT * abs(wanted.loss_sum)),
        ("weight_sum", drift / max(1e-9, abs(wanted.loss_sum)) * wanted.weight_sum + 1e-4 * wanted.weight_sum),
        ("lost_mass", 1e-3 * sum(wanted.slots)),
    ):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        if not abs(ours - theirs) <= allowed:
            return f"{name} {ours:.6g}, by the recipe {theirs:.6g}"
    return None


def text_of(conversations: Conversations, sample_id: int) -> Text:
    """A conversation from the files of a prepared folder, or from memory where there is none."""
    if not isinstance(conversations, PreparedDataset):
        sample = conversations[sample_id]
        return Text(sample.input_ids, sample.loss_mask)
    row = np.load(conversations.folder / "rows.npy", mmap_mode="r")[sample_id]
    start, end = int(row["start"]), int(row["start"]) + int(row["length"])
    ids = np.fromfile(conversations.folder / "input_ids.bin", np.int32, end - start, offset=4 * start)
    mask = np.fromfile(conversations.folder / "loss_mask.bin", np.uint8, end - start, offset=start)
    return Text(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(mask.astype(bool)))


def _by_token(found: Tensor, wanted: Tensor) -> float:
    """Largest distance of a token's vector, relative to its length; infinite for other shapes."""
    if found.shape != wanted.shape:
        return math.inf
    ours, theirs = found.double().cpu(), wanted.double().cpu()
    off = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-30)
    return float(off.max()) if off.isfinite().all() else math.inf


def _unlike(found: Tensor, wanted: Tensor) -> str:
    if found.shape != wanted.shape:
        return f"has {len(found)} entries, by the recipe {len(wanted)}"
    place = int((found != wanted).int().argmax())
    return f"is {int(found[place])} at position {place}, by the recipe {int(wanted[place])}"

"""Inputs for which the right answer is known, and what the live objects make of them; each is made once per audit.

Three short conversations of random tokens, with gaps in their loss masks and of different lengths, stand for data:
random, because a target that repeats itself, or an easy answer, hides a label that is one place off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from draftline.audit.drafter_reference import DrafterView, view_of_config
from draftline.audit.reference import ReferenceForward, clear_states, naive_anchors, target_forward
from draftline.audit.subject import AuditSubject, NotApplicable
from draftline.config import decay_gamma, sent_beside_states
from draftline.data.sampler import RowPlan
from draftline.draft.attention import BlockLayout
from draftline.draft.vocabulary import kept_ids_of, mapping_fault
from draftline.errors import TargetError
from draftline.records import CapturedSample, PackedBatch, Sample

T = TypeVar("T")

_MAX_ANCHORS = 16
"""Anchors in the probes of loss and labels."""

_LONGEST = 512
"""Tokens of the longest conversation that is examined."""


def _rounding(dtype: torch.dtype) -> float:
    """Sixteen times the last bit of a number format; in float32 a little more, because sums are long."""
    return max(1e-3, 16 * torch.finfo(dtype).eps / 2)


def once_per_audit(function: Callable[[Probe], T]) -> Callable[[Probe], T]:
    """Compute something once per audit: several checks read the same evidence."""
    key = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def kept(probe: Probe) -> T:
        if key not in probe.evidence:
            probe.evidence[key] = function(probe)
        found: T = probe.evidence[key]
        return found

    return kept


class Probe:
    """Shared evidence of one audit.

    Attributes:
        subject: what is examined.
        notes: measured figures that are no fault, for the report.
        evidence: what functions marked `once_per_audit` have computed.
    """

    def __init__(self, subject: AuditSubject, seed: int = 0) -> None:
        self.subject = subject
        self.notes: list[str] = []
        self.evidence: dict[str, Any] = {}
        self.seed = seed

    def generator(self, purpose: int) -> torch.Generator:
        """A generator of its own for each purpose, so that no check depends on which others ran."""
        return torch.Generator().manual_seed(self.seed * 1000 + purpose)

    # The drafter's shape, from its own configuration.

    @cached_property
    def view(self) -> DrafterView:
        return view_of_config(self.subject.draft_model.config)

    @property
    def block_size(self) -> int:
        return self.view.block_size

    @property
    def first(self) -> int:
        return self.view.first

    @property
    def gamma(self) -> float:
        return decay_gamma(self.subject.config.loss, self.block_size)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return self.view.target_layer_ids

    @property
    def kept_ids(self) -> Tensor:
        """[Vd] tokens that the drafter can say, by row of its head, as its own mapping says; all of them by default."""
        d2t = self.subject.draft_model.d2t
        if d2t is None:
            return torch.arange(self.subject.target.vocab_size)
        if self.mapping_fault is not None:
            raise NotApplicable("the drafter's vocabulary is not a mapping, see DRF013")
        return kept_ids_of(d2t.cpu())

    @property
    def mapping_fault(self) -> str | None:
        """What is wrong with the mapping of a reduced vocabulary itself."""
        model = self.subject.draft_model
        return None if model.d2t is None else mapping_fault(model.d2t, model.config.head_rows, model.config.vocab_size)

    def sayable(self, logits: Tensor) -> Tensor:
        """[..., V] logits of the target with minus infinity where the drafter cannot say the token."""
        hidden = torch.full_like(logits, float("-inf"))
        kept_ids = self.kept_ids.to(logits.device)
        return hidden.index_copy(-1, kept_ids, logits.index_select(-1, kept_ids))

    def draft_logits(self, outputs: Tensor) -> Tensor:
        """[n, Vd] float32 logits of drafter outputs through the head that the loss uses, in the run's precision."""
        with self.subject.run.drafter.precision():
            return self.subject.frozen.head.logits(outputs).float()

    @property
    def device(self) -> torch.device:
        """Where the drafter trains."""
        return next(self.subject.draft_model.parameters()).device

    @property
    def tolerance(self) -> float:
        """Relative difference that rounding explains in what the target computes."""
        return _rounding(self.subject.target.dtype)

    @property
    def loss_tolerance(self) -> float:
        """The same in what the loss computes: through the target's head, and in the drafter's precision."""
        return max(self.tolerance, _rounding(self.subject.run.drafter.dtype))

    def clear_states(self, normed_nD: Tensor, ids_n: Sequence[int]) -> Tensor:
        """[n, D] float32 states near the given ones that say these tokens, which the drafter can say, for certain."""
        cap, factor = self.view.final_logit_softcapping, self.view.output_multiplier
        most = float("inf") if cap is None else cap / abs(factor)
        return clear_states(self.subject.target.model, normed_nD, ids_n, self.kept_ids, most).to(self.device)

    # Conversations and what the target makes of them.

    @cached_property
    def samples(self) -> list[Sample]:
        block = self.block_size
        lengths = (3 * block + 10, 2 * block + 7, block + 13)
        masks = [torch.zeros(length, dtype=torch.bool) for length in lengths]
        masks[0][5 : 5 + block + 2] = True
        masks[0][5 + block + 6 : -2] = True
        masks[1][3:] = True
        masks[2][:6] = True  # right behind an answer of another conversation, where a block must end
        masks[2][9:] = True
        generator = self.generator(1)
        return [Sample(7 + 2 * i, self.random_ids(len(mask), generator), mask) for i, mask in enumerate(masks)]

    def random_ids(self, count: int, generator: torch.Generator) -> Tensor:
        """[count] tokens that text can have: rows of the table that the tokenizer knows and that are not special."""
        target = self.subject.target
        known = target.vocab_size if target.tokenizer is None else min(target.vocab_size, len(target.tokenizer))
        special = set() if target.tokenizer is None else set(target.tokenizer.all_special_ids)
        special.add(self.subject.draft_model.config.mask_token_id)
        usable = [i for i in range(known) if i not in special]
        return torch.tensor(usable)[torch.randint(len(usable), (count,), generator=generator)]

    @cached_property
    def reference(self) -> list[ReferenceForward]:
        return [target_forward(self.subject.target, sample.input_ids) for sample in self.samples]

    @cached_property
    def captured(self) -> list[CapturedSample]:
        """The probe's conversations through the run's own target loop, each alone."""
        try:
            return [self.subject.capture([sample])[0] for sample in self.samples]
        except TargetError as error:
            raise NotApplicable("the capture itself refuses, see TGT005") from error

    def target_ids_of(self, captured: CapturedSample) -> Tensor:
        """[S] training targets of a captured sample, as the loss will have them; where ids are sent, -1 in places."""
        if captured.target_ids_S is not None:
            return captured.target_ids_S
        assert captured.verifier_last_hidden_SD is not None, "CapturedSample carries one of the two"
        return self.subject.frozen.head.target_ids(captured.verifier_last_hidden_SD, 2048)

    def taught(self, sample: Sample) -> Tensor:
        """[S] bool: whether the token after each is supervised, so that a slot may ask what the target says there."""
        return torch.tensor([*sample.loss_mask.tolist()[1:], False])

    @torch.no_grad()
    def ids_of_layer(self, layer: int) -> list[Tensor]:
        """Per conversation, [S] greedy tokens that norm and head give for the output of some layer."""
        return [self.norm_and_head(forward.layers[layer]) for forward in self.reference]

    @torch.no_grad()
    def norm_and_head(self, states: Tensor) -> Tensor:
        """[S] greedy tokens of states [S, D] through the target's own norm and head."""
        return self.head_ids(self.subject.target.final_norm(states))

    @torch.no_grad()
    def head_ids(self, normed: Tensor) -> Tensor:
        """[S] argmax of the target's own output head; scaling and soft caps do not change it."""
        return self.subject.target.model.get_output_embeddings()(normed).argmax(-1).cpu()

    @cached_property
    def longest(self) -> Sample | None:
        """The longest conversation of the data, cut off where it would take much time; None without data."""
        data = self.subject.data
        if data is None or not data.samples:
            return None
        longest = max(data.samples, key=len)
        return replace(longest, input_ids=longest.input_ids[:_LONGEST], loss_mask=longest.loss_mask[:_LONGEST])

    # One packed row, made by hand from the reference.

    @cached_property
    def spoken(self) -> tuple[list[int], list[int]]:
        """Per row position, what the target says, and the best of what the drafter can say."""
        own = torch.cat([forward.next_ids.cpu() for forward in self.reference])
        best = torch.cat([self.sayable(forward.logits).argmax(-1).cpu() for forward in self.reference])
        return own.tolist(), best.tolist()

    @cached_property
    def unsure(self) -> list[bool]:
        """Per row position, whether the target may as well say another token, or another of those that can be said."""
        can_say = [replace(f, logits=f.logits[:, self.kept_ids.to(f.logits.device)]) for f in self.reference]
        pairs = zip(self.reference, can_say, strict=True)
        return [bool(a or b) for f, some in pairs for a, b in zip(f.ties, some.ties, strict=True)]

    @cached_property
    def plan(self) -> RowPlan:
        return RowPlan(
            sequence_number=3, step=1, last_of_step=True, epoch=2, sample_ids=tuple(s.sample_id for s in self.samples)
        )

    @cached_property
    def reference_captured(self) -> list[CapturedSample]:
        """What the target loop should deliver for the probe's conversations."""
        wants_ids = sent_beside_states(self.subject.config) == "target_ids"
        return [
            CapturedSample(
                sample,
                torch.cat([forward.layers[i] for i in self.layer_ids], dim=-1),
                target_ids_S=forward.next_ids if wants_ids else None,
                verifier_last_hidden_SD=None if wants_ids else forward.layers[-1],
            )
            for sample, forward in zip(self.samples, self.reference, strict=True)
        ]

    @cached_property
    def row(self) -> PackedBatch:
        return self.row_of(self.reference_captured)

    def row_of(self, captured: list[CapturedSample]) -> PackedBatch:
        """The packed row of captured samples, by the definition of a row."""
        samples = [item.sample for item in captured]
        lengths = [len(sample) for sample in samples]
        last = [item.verifier_last_hidden_SD for item in captured if item.verifier_last_hidden_SD is not None]
        ids = [item.target_ids_S for item in captured if item.target_ids_S is not None]
        return PackedBatch(
            sequence_number=self.plan.sequence_number,
            step=self.plan.step,
            last_of_step=self.plan.last_of_step,
            epoch=self.plan.epoch,
            sample_ids=tuple(sample.sample_id for sample in samples),
            input_ids=torch.cat([s.input_ids for s in samples])[None].to(self.device),
            loss_mask=torch.cat([s.loss_mask for s in samples])[None].to(self.device),
            document_ids=torch.tensor([[i for i, n in enumerate(lengths) for _ in range(n)]], device=self.device),
            position_ids=torch.tensor([[p for n in lengths for p in range(n)]], device=self.device),
            hidden_states_packed=torch.cat([item.hidden_states_SLD for item in captured])[None].to(self.device),
            target_ids=torch.cat(ids)[None].to(self.device) if ids else None,
            verifier_last_hidden_packed=torch.cat(last)[None].to(self.device) if last else None,
        )

    @cached_property
    def anchors(self) -> list[int]:
        """Eligible anchors, thinned out, with those at the borders of answers kept."""
        eligible = naive_anchors(self.samples)
        borders = {a for a in eligible if a - 1 not in eligible or a + 1 not in eligible}
        others = [a for a in eligible if a not in borders]
        room = max(1, _MAX_ANCHORS - len(borders))
        return sorted(borders | set(others[:: max(1, len(others) // room)]))

    @property
    def anchor_positions(self) -> Tensor:
        return torch.tensor(self.anchors, device=self.device)

    # The drafter alone, on random states.

    @cached_property
    def states_width(self) -> int:
        """Features per token that the drafter really takes."""
        model = self.subject.draft_model
        declared = len(self.layer_ids) * model.config.hidden_size
        for width in (declared, model.fc.in_features):
            try:
                self.run_drafter(torch.zeros(1, len(self.row.input_ids[0]), width, device=self.device))
            except RuntimeError:
                continue
            return width
        return declared

    @cached_property
    def states(self) -> Tensor:
        """[1, S, L*D] random states of unit size for the probe's row."""
        length = self.row.input_ids.shape[1]
        return torch.randn(1, length, self.states_width, generator=self.generator(2)).to(self.device)

    @cached_property
    def block_embeddings(self) -> Tensor:
        """[1, Q, D] random embeddings of unit size for `few_anchors`."""
        count, width = len(self.few_anchors) * self.block_size, self.subject.draft_model.config.hidden_size
        return torch.randn(1, count, width, generator=self.generator(3)).to(self.device)

    @cached_property
    def few_anchors(self) -> list[int]:
        """Two overlapping blocks of the first document, and one or two of each other."""
        start, block = [0], self.block_size
        for sample in self.samples:
            start.append(start[-1] + len(sample))
        return [7, 8, start[1] - block - 1, start[1] + 4, start[2] - 2, start[2] + 3, start[3] - 2]

    def starts(self, anchors: list[int]) -> list[int]:
        """Row position of the first token of each anchor's document."""
        positions = self.row.position_ids[0].tolist()
        return [anchor - positions[anchor] for anchor in anchors]

    @torch.no_grad()
    def run_drafter(
        self, states: Tensor, block_embeddings: Tensor | None = None, anchors: list[int] | None = None
    ) -> Tensor:
        """[A, P, D] outputs of the drafter's training forward for `few_anchors`, or others."""
        embeddings = self.block_embeddings if block_embeddings is None else block_embeddings
        positions = torch.tensor(self.few_anchors if anchors is None else anchors, device=self.device)
        layout = BlockLayout.of_row(positions, self.row.position_ids[0], self.block_size)
        output = self.subject.draft_model(states, embeddings, layout, self.subject.run.drafter.attention)
        return output[0].unflatten(0, (len(positions), self.block_size))

    @cached_property
    def drafter_is_random(self) -> bool:
        """Whether two calls with the same input differ, so that nothing can be read from a change of the input."""
        return not torch.equal(self.run_drafter(self.states), self.run_drafter(self.states))

    @contextmanager
    def shaken_weights(self) -> Iterator[None]:
        """Large random weights in the drafter, and its own again afterwards.

        At its first values the drafter hardly depends on anything: matrices are small and norms are 1, which hides
        a norm that is left out. With these weights each input moves the output by a per cent or more.
        """
        model = self.subject.draft_model
        kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        generator = self.generator(4)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    drawn = 0.5 + torch.rand(parameter.shape, generator=generator)
                else:
                    drawn = torch.randn(parameter.shape, generator=generator) * 1.5 / parameter.shape[-1] ** 0.5
                parameter.copy_(drawn)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(kept[name])


class StandIn(nn.Module):
    """A drafter that says what it is told to, and remembers what it was given.

    Attributes:
        config: of the drafter that it stands in for.
        outputs: [Q, D], requires a gradient, so that the loss shows which slots it counts and how much.
        seen_states, seen_embeddings, seen_layout: the arguments of the last call.
    """

    def __init__(self, probe: Probe, outputs: Tensor) -> None:
        super().__init__()
        self.config = probe.subject.draft_model.config
        self.outputs = outputs.detach().clone().requires_grad_(True)
        self.weight = nn.Parameter(torch.zeros((), device=outputs.device))
        self.seen_states: Tensor | None = None
        self.seen_embeddings: Tensor | None = None
        self.seen_layout: BlockLayout | None = None

    def forward(
        self, hidden_states_packed: Tensor, block_embeddings: Tensor, layout: BlockLayout, attention: object = None
    ) -> Tensor:
        del attention
        self.seen_states, self.seen_embeddings, self.seen_layout = hidden_states_packed, block_embeddings, layout
        return self.outputs[None] + 0.0 * self.weight


def perturbed(states: Tensor, positions: slice | list[int] | Tensor, generator: torch.Generator) -> Tensor:
    """A copy of [1, S, F] states with other random values at some positions."""
    changed = states.clone()
    part = changed[:, positions]
    changed[:, positions] = (torch.randn(part.shape, generator=generator) * 2.0).to(states)
    return changed


def relative_difference(found: Tensor, wanted: Tensor) -> float:
    """Largest difference relative to the largest wanted entry; infinite for other shapes or values not finite."""
    if found.shape != wanted.shape or not found.isfinite().all():
        return float("inf")
    scale = wanted.double().abs().max().clamp_min(1e-30)
    return float((found.double().cpu() - wanted.double().cpu()).abs().max() / scale.cpu())


def without(captured: CapturedSample, change: Callable[[Tensor], Tensor]) -> CapturedSample:
    """A captured sample whose states went through `change`."""
    return replace(captured, hidden_states_SLD=change(captured.hidden_states_SLD))

"""EVL009: are sampled answers distributed as the target's own, from the filter of logits to the loop that decodes?

Filters against transformers' own, the rule of rejection over four tokens, the drafter's proposals over a reduced
vocabulary, and the decoding loop itself over a target of fixed logits; each many times, expected counts within five
standard deviations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftline.audit.probe import Probe, relative_difference
from draftline.audit.report import Problem, check
from draftline.evaluate import generate
from draftline.options import Sampling

_DRAWS = 4000
"""Drafted tokens that are verified by sampling."""

_ANSWERS = 500
"""Sampled answers of the decoding loop over fixed logits."""

_RULE = "accept with min(1, p / q); after a rejection draw from what p has more than q (arXiv 2211.17192)"


@check("EVL009", "sampled answers are not distributed as the target's own", needs=("EVL001",))
def sampled_as_target(probe: Probe) -> Problem | None:
    return _wrong_filters(probe) or _wrong_rule(probe) or _wrong_proposal(probe) or _wrong_loop(probe)


def _wrong_filters(probe: Probe) -> Problem | None:
    logits = torch.randn(6, 96, generator=probe.generator(41))
    for sampling in (Sampling(temperature=0.7, top_p=0.9, top_k=60), Sampling(temperature=1.3, top_p=0.2)):
        if relative_difference(generate.probabilities(sampling, logits), _filtered(sampling, logits)) > 1e-5:
            return Problem(
                f"{sampling.describe()} filters other tokens than transformers does, or weighs them in another way",
                "temperature, then top-k, then the smallest set whose probability reaches top-p",
            )
    return None


def _wrong_rule(probe: Probe) -> Problem | None:
    """One drafted token of four."""
    generator = probe.generator(42)
    draft = torch.tensor([[0.7, 0.2, 0.05, 0.05]], dtype=torch.float64)
    target = torch.tensor([[0.05, 0.05, 0.2, 0.7], [0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    first, second = torch.zeros(4), torch.zeros(4)
    for token in torch.multinomial(draft[0], _DRAWS, replacement=True, generator=generator).tolist():
        accepted, following = generate.verify_sampled(torch.tensor([token]), draft, target, generator)
        first[token if accepted else following] += 1
        if accepted:
            second[following] += 1
    return _unlike("first tokens", first, target[0]) or _unlike("second tokens", second, target[1])


def _unlike(what: str, counts: Tensor, wanted: Tensor) -> Problem | None:
    """Counts that are not those of a distribution."""
    number = counts.sum()
    off = (counts - number * wanted).abs() - 5 * (number * wanted * (1 - wanted)).sqrt()
    if not bool((off > 0).any()):
        return None
    return Problem(f"shares of {what} are {_shares(counts / number)}, the target's own {_shares(wanted)}", _RULE)


@torch.no_grad()
def _wrong_proposal(probe: Probe) -> Problem | None:
    """What the drafter draws its tokens from: its own filtered logits, each at the token that it stands for."""
    target, model, sampling = probe.subject.target, probe.subject.draft_model, Sampling(temperature=0.6, top_k=20)
    drafter = generate.BlockDrafter(target, model, sampling, torch.Generator(target.device).manual_seed(5))
    width = len(probe.layer_ids) * model.config.hidden_size
    drafter.extend(torch.randn(1, 5, width, generator=probe.generator(43)).to(target.device))
    anchor = int(probe.samples[0].input_ids[0])
    proposal, logits = drafter.propose(anchor), drafter.head.logits(drafter.block_states(anchor))
    of_rows = _filtered(sampling, logits.float().cpu())
    wanted = torch.zeros(len(of_rows), target.vocab_size, dtype=torch.float64).index_copy_(1, probe.kept_ids, of_rows)
    found = proposal.probabilities_KV
    if found is None or relative_difference(found.cpu(), wanted) > 1e-3:
        return Problem(
            f"with {sampling.describe()}, what the drafter draws from is not its own filtered distribution, or is of "
            "other tokens than its rows stand for",
            "probabilities of rows, each at the id of its token (kept_ids), zero elsewhere",
        )
    whole = drafter.head.to_whole(of_rows.to(logits.device)).cpu()
    drawn = wanted[torch.arange(len(wanted)), proposal.tokens_K.cpu()]
    if not torch.equal(whole[:, probe.kept_ids], of_rows) or not bool((drawn > 0).all()):
        return Problem(
            "rows of the drafter's head come back from the whole vocabulary as others, or tokens are drawn that it "
            "cannot say",
            "to_whole(x)[..., kept_ids] == x, and nothing elsewhere",
        )
    return None


def _wrong_loop(probe: Probe) -> Problem | None:
    """Answers of three tokens through the loop that decodes, over logits that depend on the place alone."""
    generator, sampling = probe.generator(44), Sampling(temperature=0.5, top_p=0.95)
    device = probe.subject.target.device
    logits = torch.randn(3, 6, generator=generator).to(device)
    wanted, counts = _filtered(sampling, logits.cpu()), torch.zeros(3, 6)
    source = torch.Generator(device).manual_seed(7)
    with _fixed_logits(logits):
        for _ in range(_ANSWERS):
            answer = generate.decode(
                probe.subject.target,
                _Guessing(device, source),
                torch.ones(1, 1, dtype=torch.int64),
                3,
                (),
                sampling,
                source,
            )
            for place, token in enumerate(answer.output_ids):
                counts[place, token] += 1
    problems = (_unlike(f"tokens {place} of answers", counts[place], wanted[place]) for place in range(3))
    return next((problem for problem in problems if problem is not None), None)


class _Guessing:
    """Drafts two tokens, each from a distribution that is the same everywhere."""

    target_layer_ids: tuple[int, ...] = ()

    def __init__(self, device: torch.device, source: torch.Generator) -> None:
        row = torch.tensor([0.3, 0.3, 0.1, 0.1, 0.1, 0.1], dtype=torch.float64, device=device)
        self._rows, self._source = row.expand(2, -1), source

    def extend(self, hidden_states: Tensor) -> None:
        """Nothing is read."""

    def propose(self, anchor_id: int) -> generate.Proposal:
        """Whatever came before."""
        del anchor_id
        return generate.Proposal(torch.multinomial(self._rows, 1, generator=self._source)[:, 0], self._rows)


@contextmanager
def _fixed_logits(logits: Tensor) -> Iterator[None]:
    """Decoding over a target that says the same at each place of every answer; the prompt has one token."""

    @contextmanager
    def opened(*_: object) -> Iterator[SimpleNamespace]:
        state = SimpleNamespace(kept=0, replayed_forwards=0)

        def forward(input_ids: Tensor) -> SimpleNamespace:
            places = (state.kept + torch.arange(input_ids.shape[1])).clamp(max=len(logits) - 1)
            return SimpleNamespace(logits_nV=logits[places.to(logits.device)], hidden_states=None)

        def keep(count: int) -> None:
            state.kept += count

        state.forward, state.keep = forward, keep
        yield state

    clean = generate.open_target_state
    generate.open_target_state = opened  # type: ignore[assignment]
    try:
        yield
    finally:
        generate.open_target_state = clean


def _filtered(sampling: Sampling, logits: Tensor) -> Tensor:
    """Distribution by transformers' own filters."""
    ids = torch.zeros(len(logits), 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(sampling.temperature)(ids, logits.clone())
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    return scores.double().softmax(-1)


def _shares(values: Tensor) -> str:
    return ", ".join(f"{value:.3f}" for value in values.tolist())

"""The target answers the prompts itself, in process, and says how much of given answers it would have written.

A drafter is trained to predict what the target would say, so the answers in the data should be the target's own. They
are generated greedily, or sampled by a generator of each answer's own, in batches of similar length, padded on the
left; a row leaves the batch as soon as it ends, is stored at once, and no longer costs anything. Each turn of a
conversation is answered given the answers before it, never given the history that the file had.

Where the answers come from somebody else, a drafter is shown contexts that the target never produces, and its accuracy
on them says little about serving. The share of answer tokens that are the target's own greedy choice tells the two
apart: near 1 for its own greedy answers, clearly lower for anybody else's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftline.data.answers import Answer, AnswerStore, Dialogue, answer_key, counted, make_answer, seed_of
from draftline.data.conversations import Conversation, Unusable
from draftline.data.template import ChatTemplate, Refused
from draftline.errors import TargetError
from draftline.options import GenerationSettings, Sampling
from draftline.progress import OnProgress, say
from draftline.records import Sample
from draftline.targets.cached import cached_forward, last_logits_only, select_rows, unlike
from draftline.targets.head import text_config
from draftline.targets.model import context_limit, stop_token_ids, weights_fingerprint
from draftline.targets.sampling import draw, probabilities

_PROBED_ROWS = 8
"""Rows of the batch that shows whether batches work."""

OWN_ANSWERS_AGREEMENT = 0.95
"""Above this share the answers are taken for the target's own; ties and re-tokenised texts explain the rest."""


@dataclass(frozen=True)
class TargetAnswers:
    """Answers conversations with a live target; what `prepare` takes as its answerer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    store: AnswerStore
    settings: GenerationSettings
    progress: OnProgress | None = None

    def identity(self) -> dict[str, Any]:
        """What determines the answers."""
        return {
            **self.settings.identity(),
            "template_options": self.settings.template_options,
            "target": weights_fingerprint(self.model),
        }

    def __call__(self, conversations: Sequence[Conversation]) -> list[Conversation | Unusable]:
        """The conversations with the target's own answers, in the order given.

        One that the template refuses, or that fills the target's context, is `Unusable` with its reason. Answers that
        the store has are taken from it. Costs one prefill and at most `max_new_tokens` forwards a batch.
        """
        template = ChatTemplate(self.tokenizer, self.settings.template_options)
        fingerprint = weights_fingerprint(self.model)
        dialogues = [Dialogue(conversation) for conversation in conversations]
        report = counted(dialogues, self.progress)
        while going := [dialogue for dialogue in dialogues if not dialogue.done]:
            waiting = [item for dialogue in going if (item := self._next(dialogue, template, fingerprint)) is not None]
            report()
            waiting.sort(key=lambda item: len(item[0]))
            if not waiting:
                continue
            for start in range(0, len(waiting), self._batch_size):
                for dialogue, answer in self._generate(waiting[start : start + self._batch_size]):
                    self.store.add(answer)
                    dialogue.add(answer)
                    report()
        return [dialogue.result() for dialogue in dialogues]

    @functools.cached_property
    def _batch_size(self) -> int:
        return largest_batch(self.model, self.settings.batch_size)

    def _next(self, dialogue: Dialogue, template: ChatTemplate, fingerprint: str) -> _Waiting | None:
        """What the target is to be asked next; None if the answer is known, or cannot be asked for."""
        try:
            prompt_ids = template.prompt_ids(dialogue.prompt())
        except Refused as refused:
            dialogue.drop(f"template_refused: {refused}")
            return None
        if len(prompt_ids) >= context_limit(self.model):
            dialogue.drop("prompt_fills_context")
            return None
        key = answer_key(prompt_ids, self.settings.identity(), fingerprint, dialogue.sample)
        known = self.store.get(key)
        if known is None:
            return prompt_ids, key, dialogue
        dialogue.add(known)
        return None

    def _generate(self, batch: Sequence[_Waiting]) -> Iterator[tuple[Dialogue, Answer]]:
        stop_ids = stop_token_ids(self.model, self.tokenizer)
        prompts, seeds = [prompt_ids for prompt_ids, _, _ in batch], [seed_of(key) for _, key, _ in batch]
        drawn = None if self.settings.sampling.greedy else Drawn(self.settings.sampling, seeds)
        for row, output_ids in generate_batch(self.model, prompts, stop_ids, self.settings.max_new_tokens, drawn):
            _, key, dialogue = batch[row]
            yield dialogue, make_answer(self.tokenizer, key, output_ids, stop_ids, dialogue.prompt())


_Waiting = tuple[list[int], str, Dialogue]
"""Ids of a prompt, the key of its answer, and the dialogue that it belongs to."""


@dataclass(frozen=True)
class Drawn:
    """How the answers of a batch are sampled: each by a generator of its own, so that none depends on the others.

    Attributes:
        seeds: one per row.
    """

    sampling: Sampling
    seeds: Sequence[int]


@torch.no_grad()
def generate_batch(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    stop_ids: frozenset[int],
    max_new_tokens: int,
    drawn: Drawn | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """Answers of one batch, each yielded as `(row, output ids with the stop token)` when it ends.

    They are greedy unless they are to be `drawn`.

    The prompts are padded on the left, so that all rows write their next token into the same column; positions are
    counted from each row's first real token. Rows that ended are taken out of the cache. An answer ends where the
    target's context does.
    """
    budgets = [min(max_new_tokens, context_limit(model) - len(prompt)) for prompt in prompts]
    rows = list(range(len(prompts)))
    outputs: list[list[int]] = [[] for _ in prompts]
    batch = _Batch(model, prompts)
    generators = [torch.Generator(model.device).manual_seed(seed) for seed in (drawn.seeds if drawn else ())]
    for _ in range(max(budgets)):
        logits_BV = batch.forward()
        if drawn is None:
            next_B = logits_BV.argmax(-1)
        else:
            each = zip(probabilities(drawn.sampling, logits_BV), rows, strict=True)
            next_B = torch.cat([draw(chances_V[None], generators[row]) for chances_V, row in each])
        going = []
        for place, (row, token) in enumerate(zip(rows, next_B.tolist(), strict=True)):
            outputs[row].append(token)
            if token in stop_ids or len(outputs[row]) == budgets[row]:
                yield row, outputs[row]
            else:
                going.append(place)
        if not going:
            return
        rows = [rows[place] for place in going]
        batch.go_on(going, next_B)


class _Batch:
    """Rows that grow together, one token in each forward."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> None:
        longest = max(len(prompt) for prompt in prompts)
        # The value of a padding id does not matter: it is masked everywhere.
        self.ids_BS = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=model.device)
        self.mask_BS = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        self.positions_BS = (self.mask_BS.cumsum(-1) - 1).clamp(min=0)
        self.model, self.cache, self.few_logits = model, None, last_logits_only(model)

    def forward(self) -> Tensor:
        """[B, V] logits of each row's next token."""
        logits_B1V, self.cache = cached_forward(
            self.model, self.ids_BS, self.positions_BS, self.cache, attention_mask=self.mask_BS, **self.few_logits
        )
        return logits_B1V[:, -1]

    def go_on(self, places: Sequence[int], next_B: Tensor) -> None:
        """Take out the rows that are not named, and give each of the others its next token."""
        keep = torch.tensor(places, device=next_B.device)
        if len(places) < len(next_B):
            select_rows(self.cache, keep)
        self.ids_BS = next_B[keep, None]
        self.mask_BS = torch.cat([self.mask_BS[keep], torch.ones_like(self.ids_BS)], dim=1)
        self.positions_BS = self.positions_BS[keep, -1:] + 1


@torch.no_grad()
def largest_batch(model: PreTrainedModel, wanted: int) -> int:
    """As many rows at once as are wanted, or one where this target answers otherwise in a batch than alone.

    Found by trying, in a dozen short forwards: prompts of random tokens, and one more token behind some of them.

    Raises:
        TargetError: what transformers computes behind a cache is wrong for a single row, too.
    """
    generator, vocab_size = torch.Generator().manual_seed(0), text_config(model.config).vocab_size
    ids = torch.randint(vocab_size, (_PROBED_ROWS, _PROBED_ROWS + 2), generator=generator).to(model.device)
    prompts, tokens, going = [row[: 2 + i].tolist() for i, row in enumerate(ids)], ids[:, -1], range(0, _PROBED_ROWS, 2)
    alone = [torch.cat([ids[i, : 2 + i], tokens[i : i + 1]]) for i in going]
    right = torch.cat([model(input_ids=row_S[None], use_cache=False).logits[0, -2:] for row_S in alone])
    if wanted == 1 or unlike(_continued(model, prompts, tokens, going), right):
        single = [_continued(model, [prompts[i]], tokens[i : i + 1], [0]) for i in going]
        if unlike(torch.cat(single), right):
            raise TargetError(
                f"{type(model).__name__}: transformers gives other logits behind a cache than without one, so that "
                "answers made here would not be the target's: let a server answer (--base-url)"
            )
        if wanted > 1:
            say("this target answers otherwise in a batch than alone: its answers are made one at a time")
        return 1
    return wanted


def _continued(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], tokens: Tensor, going: Sequence[int]
) -> Tensor:
    """[2n, V] logits behind the n prompts that are named, and behind one more token of each."""
    batch = _Batch(model, prompts)
    before = batch.forward()[list(going)]
    batch.go_on(going, tokens)
    return torch.stack([before, batch.forward()], dim=1).flatten(0, 1)


@dataclass(frozen=True)
class Agreement:
    """Supervised tokens looked at, and how many of them are the target's greedy choice."""

    tokens: int
    agreeing: int

    @property
    def share(self) -> float:
        """Agreeing share; NaN without tokens."""
        return self.agreeing / self.tokens if self.tokens else float("nan")

    @property
    def advice(self) -> str:
        """One line on what to do."""
        if not self.tokens:
            return "no supervised token to compare with the target"
        percent = f"{self.share:.1%} of {self.tokens} answer tokens are the target's own greedy choice"
        if self.share >= OWN_ANSWERS_AGREEMENT:
            return f"{percent}: the answers are its own, train on them as they are"
        return f"{percent}: the answers are not its own; only --regenerate teaches the drafter what will be served"


@torch.no_grad()
def measure_agreement(model: PreTrainedModel, samples: Sequence[Sample]) -> Agreement:
    """Compare the supervised tokens of some samples with the target's argmax; one forward a sample."""
    tokens = agreeing = 0
    for sample in samples:
        supervised_S = sample.loss_mask[1:].to(model.device)
        ids_1S = sample.input_ids[None].to(model.device)
        greedy_S = model(input_ids=ids_1S, use_cache=False).logits[0, :-1].argmax(-1)
        tokens += int(supervised_S.sum())
        agreeing += int((supervised_S & (greedy_S == ids_1S[0, 1:])).sum())
    return Agreement(tokens, agreeing)

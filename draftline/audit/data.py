"""DAT: are the rows what the target's own text looks like, and is the right part of them supervised?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from draftline.audit.probe import Probe
from draftline.audit.reference import role_ids
from draftline.audit.report import Problem, check
from draftline.audit.subject import NotApplicable, PreparedData
from draftline.data.conversations import hash_json
from draftline.data.render import decoded_text
from draftline.data.template import tokenizer_hash
from draftline.draft.vocabulary import count_supervised, coverage_of
from draftline.options import Sampling
from draftline.records import Sample
from draftline.targets.regenerate import OWN_ANSWERS_AGREEMENT, measure_agreement

_LOW_AGREEMENT = 0.8
"""Below this share of answer tokens that the target would have written itself, its own answers teach much more."""

_LEAST_COVERAGE = 0.95
"""Below this share of answer tokens that the drafter can say, every twentieth token costs a rejected block."""

_ROWS_READ, _TOKENS_READ, _MOST_READ = 16, 512, 3000
"""Conversations that are run through the target to measure agreement, and tokens of each."""


@check("DAT001", "a packed row is not its conversations one after another", needs=("TGT001",))
def packed_row(probe: Probe) -> Problem | None:
    packed, row = probe.subject.pack(probe.plan, probe.reference_captured), probe.row
    fix = "concatenate real tokens in the order of the plan, number documents, restart positions in each"
    if packed.sample_ids != row.sample_ids:
        return Problem(f"sample ids {packed.sample_ids}, planned {row.sample_ids}", fix)
    numbers = ("sequence_number", "step", "last_of_step", "epoch")
    for name in numbers:
        if getattr(packed, name) != getattr(row, name):
            return Problem(f"{name} is {getattr(packed, name)}, planned {getattr(row, name)}", fix)
    found, wanted = packed.tensors(), row.tensors()
    for name, tensor in wanted.items():
        other = found.get(name)
        if other is None or other.shape != tensor.shape:
            return Problem(
                f"{name} is {None if other is None else list(other.shape)}, wanted {list(tensor.shape)}", fix
            )
        if not torch.equal(other.to(tensor), tensor):
            return Problem(f"{name} differs at {_first_difference(other.to(tensor), tensor)}", fix)
    return None


@check("DAT002", "too little of the data is supervised")
def supervised_share(probe: Probe) -> Problem | None:
    samples = _data(probe).samples
    tokens = sum(len(sample) for sample in samples)
    supervised = sum(int(sample.loss_mask.sum()) for sample in samples)
    empty = sum(not sample.loss_mask.any() for sample in samples)
    fix = "prepare the data again: the answers were not found in the rendered conversations, or cut off by max_length"
    probe.notes.append(f"data: {supervised} of {tokens} tokens in {len(samples)} conversations read are supervised")
    if empty:
        return Problem(f"{empty} of {len(samples)} conversations have no supervised token", fix)
    if supervised < 0.02 * tokens:
        share = f"{supervised} of {tokens} tokens are supervised ({supervised / tokens:.2%})"
        return Problem(share, f"{fix}; if the prompts are that long, nothing is wrong", "warning")
    return None


@check("DAT003", "supervised spans do not begin where the template begins an answer")
def span_starts(probe: Probe) -> Problem | None:
    data, fix = _data(probe), "prepare the data again; look at it with `draftline inspect`"
    if _all_is_learned(data):
        parts = [sample.sample_id for sample in data.samples if not sample.loss_mask.all()]
        text = f"prepared with --supervise all, but of {len(parts)} conversations only a part is, first {parts[:3]}"
        return Problem(text, fix) if parts else None
    samples = _with_the_templates_mask(data)
    headers = _answer_headers(probe)
    starts = [(sample, start) for sample in samples for start in _span_starts(sample)]
    wrong = [
        (sample, start)
        for sample, start in starts
        if not any(_follows(probe, sample, start, header) for header in headers)
        and not (_is_cut_on_the_left(data, sample) and any(_ends(sample, start, header) for header in headers))
    ]
    if len(wrong) <= 0.05 * len(starts):
        return None
    sample, start = wrong[0]
    tokenizer = probe.subject.target.require_tokenizer()
    before = tokenizer.decode(sample.input_ids[max(0, start - 6) : start])
    after = tokenizer.decode(sample.input_ids[start : start + 6])
    return Problem(
        f"{len(wrong)} of {len(starts)} supervised spans do not follow {tokenizer.decode(headers[0])!r}; in sample "
        f"{sample.sample_id} one begins {before!r} | {after!r}",
        "prepare the data again with this target's own chat template; look at it with `draftline inspect`",
    )


@check("DAT004", "the end of the answer is not supervised")
def answer_ends(probe: Probe) -> Problem | None:
    _refuse_whole_texts(probe)
    end_ids = _turn_end_ids(probe)
    ends = [
        int(sample.input_ids[t])
        for sample in _data(probe).samples
        for t in range(len(sample))
        if sample.loss_mask[t] and (t + 1 == len(sample) or not sample.loss_mask[t + 1])
    ]
    right = sum(end in end_ids for end in ends)
    if right >= 0.5 * len(ends):
        return None
    return Problem(
        f"{right} of {len(ends)} supervised spans end with an end-of-turn token {sorted(end_ids)}",
        "supervise the token that ends each turn: drafters are weakest where they never saw it; check max_length",
        "warning",
    )


@check("DAT005", "the target would not have written these answers")
def own_answers(probe: Probe) -> Problem | None:
    _refuse_whole_texts(probe)
    read = list[Sample]()
    for sample in _data(probe).samples[:_ROWS_READ]:
        if sum(map(len, read)) < _MOST_READ:
            read.append(Sample(sample.sample_id, sample.input_ids[:_TOKENS_READ], sample.loss_mask[:_TOKENS_READ]))
    found = measure_agreement(probe.subject.target.model, read)
    if not found.tokens:
        raise NotApplicable("nothing is supervised")
    share = f"greedy token is that of the data at {found.share:.1%} of {found.tokens} answer tokens"
    probe.notes.append(f"the target's {share}")
    drawn = _data(probe).meta.get("sampling")
    if drawn is not None:
        return Problem(
            f"the answers were sampled ({Sampling(**drawn).describe()}): its {share}. Labels are its greedy tokens "
            "behind what was sampled: behind each other token a block is taught what nothing before it tells, and "
            "greedy decoding never comes there",
            "none needed where it is served at this temperature; for greedy serving prepare without --temperature",
            "warning",
        )
    if found.share >= _LOW_AGREEMENT:
        return None
    return Problem(
        f"its {share}; its own answers give over {OWN_ANSWERS_AGREEMENT:.0%}, and about twice the acceptance",
        "draftline prepare --regenerate",
        "warning",
    )


@check("DAT006", "token ids are not those that the target's template gives")
def token_ids(probe: Probe) -> Problem | None:
    target, samples = probe.subject.target, _data(probe).samples
    fix = "prepare the data again with this target's own tokenizer and unmodified chat template"
    highest = max(int(sample.input_ids.max()) for sample in samples)
    lowest = min(int(sample.input_ids.min()) for sample in samples)
    if highest >= target.vocab_size or lowest < 0:
        return Problem(f"ids {lowest}..{highest} for a table of {target.vocab_size} rows", fix)
    starts = [[bos, bos] for bos in role_ids(target, "bos")]
    doubled = [s.sample_id for s in samples if s.input_ids[:2].tolist() in starts]
    if doubled:
        return Problem(f"{len(doubled)} of {len(samples)} conversations begin with two BOS tokens", fix)
    return _spelled_marks(probe, samples, fix)


def _spelled_marks(probe: Probe, samples: Sequence[Sample], fix: str) -> Problem | None:
    """Control tokens of the template must be tokens: spelled in letters they mean nothing to the target."""
    tokenizer = probe.subject.target.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        return None
    special, conversations = set(tokenizer.all_special_ids), [sample.input_ids.tolist() for sample in samples]
    for token in dict.fromkeys(token for token in _rendered(probe, None) if token in special):
        text = decoded_text(tokenizer, [token])
        letters: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        inner = letters[1:-1] or letters  # those at the ends may have merged with what is beside them
        spelled = sum(token not in ids and _contains(ids, inner) for ids in conversations)
        if spelled > 0.5 * len(samples):
            found = f"{spelled} of {len(samples)} conversations spell {text!r} in {len(letters)} ordinary tokens"
            return Problem(f"{found} where the template has token {token}", fix)
    return None


def _contains(ids: Sequence[int], part: Sequence[int]) -> bool:
    return any(ids[start : start + len(part)] == part for start in range(len(ids) - len(part) + 1))


@check("DAT007", "conversations are repeated, or held-out ones are trained on")
def repeated(probe: Probe) -> Problem | None:
    data = _data(probe)
    train = Counter(tuple(sample.input_ids.tolist()) for sample in data.samples)
    shared = sum(tuple(sample.input_ids.tolist()) in train for sample in data.heldout)
    if shared:
        return Problem(
            f"{shared} of {len(data.heldout)} held-out conversations are also trained on",
            "split by prompt: draftline prepare removes duplicates first",
        )
    copies = sum(train.values()) - len(train)
    if data.meta.get("answers_per_prompt", 1) > 1:
        return None  # equal samples are as frequent as the target says them
    if copies > 0.2 * len(data.samples):
        return Problem(
            f"{copies} of {len(data.samples)} conversations are copies of another", "remove duplicates", "warning"
        )
    return None


@check("DAT008", "many conversations are too short for a block")
def long_enough(probe: Probe) -> Problem | None:
    samples = _data(probe).samples
    useless = sum(not (s.loss_mask[:-1] & s.loss_mask[1:]).any() for s in samples)
    if useless <= 0.2 * len(samples):
        return None
    return Problem(
        f"{useless} of {len(samples)} conversations have no two supervised tokens in a row, so no anchor",
        "use longer answers: these conversations teach nothing",
        "warning",
    )


@check("DAT009", "conversations are longer than the target's or the drafter's positions")
def within_positions(probe: Probe) -> Problem | None:
    limit = probe.subject.draft_model.config.max_position_embeddings
    longest = max(len(sample) for sample in _data(probe).samples)
    if longest <= limit:
        return None
    return Problem(f"the longest has {longest} tokens, positions end at {limit}", f"data.max_length={limit}")


@check("DAT010", "rows of the data files are not accounted for")
def accounted(probe: Probe) -> Problem | None:
    data = _data(probe)
    report = data.report
    if not {"rows_in", "rows_out", "dropped"} <= report.keys():
        raise NotApplicable("no report of `draftline prepare` comes with the data")
    dropped = sum(int(entry["count"]) for entry in report["dropped"].values())
    if report["rows_in"] != report["rows_out"] + dropped:
        return Problem(
            f"{report['rows_in']} rows in, {report['rows_out']} out and {dropped} dropped with a reason: "
            f"{report['rows_in'] - report['rows_out'] - dropped} are missing",
            "prepare the data again",
        )
    if dropped > 0.5 * report["rows_in"]:
        reasons = ", ".join(f"{name} {entry['count']}" for name, entry in report["dropped"].items())
        return Problem(
            f"{dropped} of {report['rows_in']} rows were dropped: {reasons}", "fix the data files", "warning"
        )
    return None


@check("DAT011", "the data was prepared with another tokenizer or template")
def same_template(probe: Probe) -> Problem | None:
    meta = _data(probe).meta
    tokenizer = probe.subject.target.tokenizer
    if "template_hash" not in meta or tokenizer is None:
        raise NotApplicable("the data does not say which template it was made with")
    names = {"chat template": hash_json(tokenizer.chat_template) == meta["template_hash"]}
    if "tokenizer_hash" in meta:
        names["tokenizer"] = tokenizer_hash(tokenizer) == meta["tokenizer_hash"]
    changed = [name for name, same in names.items() if not same]
    if not changed:
        return None
    fix = "prepare the data again, or name the template that it was prepared with (--chat-template)"
    return Problem(f"the {changed[0]} has changed since the data was prepared", fix)


@check("DAT012", "the drafter cannot say much of the answers")
def vocabulary_covers(probe: Probe) -> Problem | None:
    samples, rows = _data(probe).samples, probe.subject.target.vocab_size
    if probe.subject.draft_model.d2t is None:
        raise NotApplicable("the drafter can say every token")
    counts_V = count_supervised(samples, range(len(samples)), rows)
    coverage = coverage_of(counts_V, probe.kept_ids)
    probe.notes.append(f"the drafter can say {len(probe.kept_ids)} tokens, {coverage:.2%} of those in the answers read")
    if coverage >= _LEAST_COVERAGE:
        return None
    left_out = counts_V.index_fill(0, probe.kept_ids, 0)
    return Problem(
        f"{coverage:.2%} of answer tokens are among its {len(probe.kept_ids)}; the most frequent that is not: "
        f"{int(left_out.argmax())}, {int(left_out.max())} times",
        "a larger drafter.draft_vocab_size, or a vocabulary chosen from data like this",
        "warning",
    )


def _data(probe: Probe) -> PreparedData:
    data = probe.subject.data
    if data is None or not data.samples:
        raise NotApplicable("there is no prepared data yet")
    return data


def _span_starts(sample: Sample) -> list[int]:
    mask = sample.loss_mask.tolist()
    return [t for t in range(len(mask)) if mask[t] and (t == 0 or not mask[t - 1])]


def _all_is_learned(data: PreparedData) -> bool:
    """Whether the data was prepared to be learned as a whole, and not its answers alone."""
    return data.meta.get("supervise") == "all"


def _refuse_whole_texts(probe: Probe) -> None:
    """Raise `NotApplicable` where nothing tells answers from the text around them."""
    if _all_is_learned(_data(probe)):
        raise NotApplicable("the data was prepared with --supervise all, and does not tell answers from the rest")


def _with_the_templates_mask(data: PreparedData) -> list[Sample]:
    """Conversations whose masks follow from the template: not rows of token ids, which bring their own.

    Raises:
        NotApplicable: there are none, or the data is from before folders said which.
    """
    chats = sum(data.report.get("thinking", {}).values())
    if "forms" not in data.meta and data.report.get("rows_out", chats) > chats:
        raise NotApplicable("the data has rows of text or token ids, and does not say which")
    samples = [sample for sample in data.samples if sample.sample_id not in data.own_masks]
    if not samples:
        raise NotApplicable("the data is token ids, and says itself what of them is supervised")
    return samples


def _is_cut_on_the_left(data: PreparedData, sample: Sample) -> bool:
    """Whether `prepare` may have cut off the beginning of a conversation; folders once did not say on which side."""
    return data.meta.get("truncation", "left") == "left" and len(sample) == data.meta.get("max_length")


def _ends(sample: Sample, place: int, header: list[int]) -> bool:
    """Whether what is left before a place is the end of a header, or nothing."""
    return place < len(header) and sample.input_ids[:place].tolist() == header[len(header) - place :]


_TOKENS_BEFORE = 64
"""Tokens before a span that are decoded: more than any header has."""


def _follows(probe: Probe, sample: Sample, place: int, header: list[int]) -> bool:
    """Whether a header ends where a span begins.

    Token by token, or where the tokenizer merged the end of the header with the beginning of the answer, within the one
    token that has both: no target ever generates it, so the span begins behind it.
    """
    ids = sample.input_ids[max(0, place - _TOKENS_BEFORE) : place].tolist()
    if not ids or ids[-len(header) :] == header:
        return bool(ids)
    tokenizer = probe.subject.target.require_tokenizer()
    text, written = decoded_text(tokenizer, ids), decoded_text(tokenizer, header)
    end = text.rfind(written) + len(written)
    return written in text and end > len(decoded_text(tokenizer, ids[:-1]))


def _rendered(probe: Probe, answer: str | None, question: str = "Name a colour.", **given: Any) -> list[int]:
    """Ids of a plain chat with a given answer, or up to where the answer begins.

    Args:
        given: keyword arguments of the template.
    """
    tokenizer = probe.subject.target.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise NotApplicable("the target has no chat template")
    messages = [{"role": "user", "content": question}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer is None, **given)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _answer_headers(probe: Probe) -> list[list[int]]:
    """What may come right before an answer: the generation prompt, or what a rendered answer follows.

    The two differ where the template itself writes an empty reasoning block into a finished answer. Both may depend on
    the template's options, and where reasoning is not learned, the end of it may come before what is.
    """
    data, other = _data(probe), "How many legs has a spider?"
    written = [json.loads(text) for text in data.report.get("template_options", {}) if text.startswith("{")]
    shared = data.meta.get("template_options", {})
    thoughts = ["", *(["<think>\nHm.\n</think>\n\n"] if data.meta.get("reasoning") is False else [])]
    found: list[list[int]] = []
    for options in [shared, *({**shared, **own} for own in written if own)]:
        pairs = [(_rendered(probe, None, **options), _rendered(probe, None, other, **options))]
        for thought in thoughts:
            one, two = (
                ids[: _common_prefix(ids, _rendered(probe, f"{thought}Blue!", question, **options))]
                for question in ("Name a colour.", other)
                for ids in [_rendered(probe, f"{thought}Green.", question, **options)]
            )
            pairs.append((one, two))
        found += [one[len(one) - _common_prefix(one[::-1], two[::-1]) :][-4:] for one, two in pairs]
    headers = [header for header in found if header]
    if not headers:
        raise NotApplicable("the template writes nothing before an answer")
    return [header for index, header in enumerate(headers) if header not in headers[:index]]


def _turn_end_ids(probe: Probe) -> set[int]:
    """Tokens that follow an answer, up to and with the first special one, and the configured end tokens."""
    one, other = _rendered(probe, "Green."), _rendered(probe, "Blue!")
    after = one[len(one) - _common_prefix(one[::-1], other[::-1]) :]
    return set(after) | role_ids(probe.subject.target, "eos")


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _first_difference(found: torch.Tensor, wanted: torch.Tensor) -> str:
    different = (found != wanted).reshape(found.shape[0] * found.shape[1], -1).any(-1)
    return f"{int(different.sum())} of {len(different)} positions, first {int(different.int().argmax())}"

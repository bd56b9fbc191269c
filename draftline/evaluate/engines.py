"""How the programs that serve drafters are asked, and where each keeps its counts of drafted tokens.

Prompts travel as token ids and come back as token ids, so that no template, tokenizer or default of the server lies
between what is measured here and what was measured in process. Names are those of vLLM 0.32, SGLang 0.5 and llama.cpp
b11434.

    program     asked at             counts
    vLLM        /v1/completions      /metrics, `vllm:spec_decode_...`: of the whole server, read before and after
    llama.cpp   /completion          the same as `llamacpp:spec_decode_...` with --metrics; else `timings` of a reply
    SGLang      /generate            `meta_info` of every reply
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from draftline.evaluate.acceptance import Acceptance

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class DraftCounts:
    """What a server counted over some answers; additive, and two readings can be subtracted.

    Attributes:
        drafts: forwards of the target that checked a draft; 0 where the server does not count them.
        accepted: drafted tokens that stood, those after the end of an answer included.
        accepted_per_position: the same by place in the block, from the first; empty where not counted.
        tokens: tokens of all answers; what others asked of the server is among them.
    """

    drafts: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    tokens: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return self._with(other, 1)

    def __sub__(self, other: DraftCounts) -> DraftCounts:
        return self._with(other, -1)

    def _with(self, other: DraftCounts, sign: int) -> DraftCounts:
        mine, theirs = self.accepted_per_position, other.accepted_per_position
        longest = max(len(mine), len(theirs))
        padded = ((*counts, *[0] * (longest - len(counts))) for counts in (mine, theirs))
        return DraftCounts(
            self.drafts + sign * other.drafts,
            self.accepted + sign * other.accepted,
            tuple(a + sign * b for a, b in zip(*padded, strict=True)),
            self.tokens + sign * other.tokens,
        )

    def acceptance(self, tokens: int, answers: int) -> Acceptance:
        """Of answers with so many tokens together, by the definition of `evaluate.acceptance`.

        Forwards without a draft (one token left to write) are in no counter, but are seen in that tokens are left
        over; where drafts are not counted at all, all forwards are found that way.
        """
        later = tokens - answers
        return Acceptance(later, max(self.drafts, later - self.accepted))

    def accepted_per_forward(self) -> list[int]:
        """One entry per draft, in no order: how many tokens of it stood; empty where places are not counted."""
        if not self.accepted_per_position:
            return []
        reached = (self.drafts, *self.accepted_per_position, 0)
        return [k for k in range(len(reached) - 1) for _ in range(reached[k] - reached[k + 1])]


@dataclass
class Reply:
    """One answer while it arrives.

    Attributes:
        output_ids: with the stop token where the server sends it; none from a server that sends only text.
        text: as the server writes it, without the stop token.
        tokens: length of the output as the server counts it.
        finished: the server said that the answer is whole.
        stopped: it ended by itself, not by the limit.
        counts: what the reply itself says of drafts.
    """

    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    finished: bool = False
    stopped: bool = False
    counts: DraftCounts | None = None


@dataclass(frozen=True)
class Engine:
    """One program.

    Attributes:
        owner: what it writes as `owned_by` in its list of models.
        path: where it is asked, after the server's address.
        request: body of a request from (model, prompt ids, most new tokens).
        read: takes one event of the streamed answer into the reply.
        metrics: what its counters in `/metrics` are called before `spec_decode_`; None if it has none there.
        tokens_metric: counter of generated tokens.
        fix: how it is started so that it counts.
    """

    name: str
    owner: str
    path: str
    request: Callable[[str, list[int], int], dict[str, Any]]
    read: Callable[[dict[str, Any], Reply], None]
    metrics: str | None
    tokens_metric: str
    fix: str

    def counts(self, metrics_text: str) -> DraftCounts | None:
        """The counters in the text of `/metrics`, summed over all labels; None if there are none.

        Raises:
            LookupError, ValueError: one is missing or no number.
        """
        if self.metrics is None or f"{self.metrics}spec_decode_num_drafts_total" not in metrics_text:
            return None
        sums: dict[str, float] = {}
        positions: dict[int, float] = {}
        for line in metrics_text.splitlines():
            sample = _SAMPLE.match(line)
            if sample is None:
                continue
            name, value = sample["name"], float(sample["value"])
            sums[name] = sums.get(name, 0.0) + value
            if name == f"{self.metrics}spec_decode_num_accepted_tokens_per_pos_total":
                position = _POSITION.search(sample["labels"] or "")
                assert position is not None, line
                positions[int(position[1])] = positions.get(int(position[1]), 0.0) + value
        return DraftCounts(
            drafts=int(sums[f"{self.metrics}spec_decode_num_drafts_total"]),
            accepted=int(sums[f"{self.metrics}spec_decode_num_accepted_tokens_total"]),
            accepted_per_position=tuple(int(positions[place]) for place in sorted(positions)),
            tokens=int(sums[self.tokens_metric]),
        )


def _vllm_request(model: str, input_ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": input_ids,
        "max_tokens": max_new_tokens,
        "temperature": 0.0,
        "repetition_penalty": 1.0,  # else a default from the target's generation_config.json
        "stream": True,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }


def _vllm_read(event: dict[str, Any], reply: Reply) -> None:
    for choice in event["choices"]:
        reply.output_ids += choice.get("token_ids") or []
        reply.text += choice["text"]
        reply.tokens = len(reply.output_ids)
        reply.finished = choice.get("finish_reason") is not None
        reply.stopped = choice.get("finish_reason") == "stop"


def _llama_request(model: str, input_ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    del model  # it serves one
    return {
        "prompt": input_ids,
        "n_predict": max_new_tokens,
        "temperature": 0.0,
        "repeat_penalty": 1.0,
        "stream": True,
        "return_tokens": True,
        "cache_prompt": False,
    }


def _llama_read(event: dict[str, Any], reply: Reply) -> None:
    reply.output_ids += event.get("tokens") or []
    reply.text += event["content"]
    reply.tokens = max(reply.tokens, len(reply.output_ids))
    if event["stop"]:
        reply.finished = True
        timings = event["timings"]
        reply.tokens = timings["predicted_n"]
        reply.stopped = event["stop_type"] != "limit"
        if "draft_n" in timings:
            reply.counts = DraftCounts(accepted=timings["draft_n_accepted"], tokens=reply.tokens)


def _sglang_request(model: str, input_ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    del model
    sampling = {
        "temperature": 0.0,
        "max_new_tokens": max_new_tokens,
        "repetition_penalty": 1.0,
        "skip_special_tokens": False,
    }
    return {"input_ids": input_ids, "sampling_params": sampling, "stream": True}


def _sglang_read(event: dict[str, Any], reply: Reply) -> None:
    """Every event repeats the answer from its beginning."""
    told = event["meta_info"]
    reply.output_ids = list(event.get("output_ids") or [])
    reply.text = event["text"]
    reply.tokens = told["completion_tokens"]
    reply.finished = bool(told.get("finish_reason"))
    reply.stopped = (told.get("finish_reason") or {}).get("type") == "stop"
    if "spec_verify_ct" in told:
        histogram = told.get("spec_correct_drafts_histogram") or told.get("spec_accept_histogram") or []
        places = tuple(sum(histogram[place:]) for place in range(1, len(histogram)))
        accepted = sum(places) if places else reply.tokens - 1 - told["spec_verify_ct"]
        reply.counts = DraftCounts(told["spec_verify_ct"], accepted, places, reply.tokens)


ENGINES = (
    Engine(
        name="vLLM",
        owner="vllm",
        path="/v1/completions",
        request=_vllm_request,
        read=_vllm_read,
        metrics="vllm:",
        tokens_metric="vllm:generation_tokens_total",
        fix="start it with the --speculative-config that `draftline export --for vllm` prints",
    ),
    Engine(
        name="llama.cpp",
        owner="llamacpp",
        path="/completion",
        request=_llama_request,
        read=_llama_read,
        metrics="llamacpp:",
        tokens_metric="llamacpp:tokens_predicted_total",
        fix="start it with the --spec-type and -md that `draftline export --for llama.cpp` prints",
    ),
    Engine(
        name="SGLang",
        owner="sglang",
        path="/generate",
        request=_sglang_request,
        read=_sglang_read,
        metrics=None,
        tokens_metric="",
        fix="start it with the --speculative-algorithm that `draftline export --for sglang` prints",
    ),
)
"""The programs whose counters are known."""

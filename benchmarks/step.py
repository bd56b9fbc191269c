"""A training step beside speculators' and beside the matrix products that it cannot do without.

    python benchmarks/step.py [--case small long wide] [--rounds 5] [--threads 1] [--send last_hidden]

Three in turn: our `row_loss` and its backward, speculators' forward and backward on the same row (its eager attention
is what runs on a CPU), and a product of known size, from whose speed the time of the useful products follows. Each
figure is the best of its rounds. Memory is what the peak of a process rises by when
it takes its first two steps, each program in a process of its own. One JSON line per case.

Seconds are of processor time, so that with one thread other work on the machine matters little. Large pages are on for
all three, as the command `draftline` sets them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from torch.nn import functional as F

from draftline.config import DFlashConfig, LossConfig
from draftline.draft.attention import GroupedAttention
from draftline.draft.block import FrozenTarget, draw_anchors
from draftline.draft.model import DFlashDraftModel, qwen3_config
from draftline.records import PackedBatch
from draftline.targets.head import TargetHead
from draftline.train.step import row_loss

CAPTURED = 5
HEAD_DIM = 64


@dataclass(frozen=True)
class Case:
    """Sizes of one row and its drafter: letters as in `draftline/records.py`; anchors are of the whole row."""

    D: int
    V: int
    layers: int
    P: int
    anchors: int
    S: int
    documents: int
    supervised: float

    @property
    def heads(self) -> int:
        return self.D // HEAD_DIM

    @property
    def kv_heads(self) -> int:
        return self.heads // 3 if self.heads % 3 == 0 else self.heads // 2

    @property
    def width(self) -> int:
        """Of the MLP."""
        return int(2.67 * self.D) // 64 * 64


CASES = {
    "small": Case(D=576, V=49152, layers=3, P=8, anchors=64, S=1024, documents=1, supervised=0.5),
    "long": Case(D=576, V=49152, layers=3, P=8, anchors=256, S=2048, documents=8, supervised=0.3),
    "wide": Case(D=1024, V=151936, layers=2, P=16, anchors=64, S=512, documents=1, supervised=0.5),
}


def shape_of(case: Case) -> DFlashConfig:
    """The drafter's shape."""
    return DFlashConfig(
        vocab_size=case.V,
        hidden_size=case.D,
        intermediate_size=case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=8192,
        layer_types=("full_attention",) * case.layers,
        sliding_window=None,
        block_size=case.P,
        mask_token_id=4,
        target_layer_ids=tuple(range(1, CAPTURED + 1)),
        num_target_layers=12,
        sample_from_anchor=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def random_row(case: Case) -> PackedBatch:
    """Documents of equal length, the last share of each supervised, with random states."""
    generator = torch.Generator().manual_seed(0)
    length = case.S // case.documents
    positions_S = torch.arange(case.S)
    return PackedBatch(
        sequence_number=0,
        step=0,
        last_of_step=True,
        epoch=0,
        sample_ids=tuple(range(case.documents)),
        input_ids=torch.randint(5, case.V, (1, case.S), generator=generator),
        loss_mask=(positions_S % length >= int(length * (1 - case.supervised)))[None],
        document_ids=(positions_S // length)[None],
        position_ids=(positions_S % length)[None],
        hidden_states_packed=torch.randn(1, case.S, CAPTURED * case.D, generator=generator),
        verifier_last_hidden_packed=torch.randn(1, case.S, case.D, generator=generator),
    )


def random_head(case: Case) -> TargetHead:
    """A final norm and a head with random rows."""
    head = TargetHead(torch.nn.RMSNorm(case.D, eps=1e-6), torch.nn.Linear(case.D, case.V, bias=False))
    torch.nn.init.normal_(head.lm_head.weight, std=0.02)
    return head.requires_grad_(False)


def our_step(case: Case, send: Literal["last_hidden", "target_ids"]) -> tuple[Callable[[], None], int]:
    """One of our steps without the optimiser, and how many slots it supervises."""
    model = DFlashDraftModel(shape_of(case))
    model.init_weights(torch.Generator().manual_seed(0))
    head, row = random_head(case), random_row(case)
    if send == "target_ids":
        ids = head.target_ids(row.verifier_last_hidden_packed)
        row = replace(row, target_ids=ids, verifier_last_hidden_packed=None)
    frozen = FrozenTarget(lambda ids: F.embedding(ids, head.lm_head.weight), head)
    anchors = draw_anchors(row, case.anchors // case.documents, 0)

    def step() -> None:
        row_loss(model, row, anchors, frozen, LossConfig(), GroupedAttention)[0].backward()
        model.zero_grad(set_to_none=True)

    return step, row_loss(model, row, anchors, frozen, LossConfig(), GroupedAttention)[1].slots


def speculators_model(shape: DFlashConfig) -> Any:
    """Their drafter of the same shape, weights drawn, with embedding and heads that do not train."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel as TheirModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layers = qwen3_config(shape)
    layers._attn_implementation = "eager"  # the only one that runs without an accelerator
    model = TheirModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=shape.vocab_size,
            block_size=shape.block_size,
            aux_hidden_state_layer_ids=[layer + 1 for layer in shape.target_layer_ids],
            mask_token_id=shape.mask_token_id,
            speculators_config=SpeculatorsConfig(
                algorithm="dflash",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=shape.num_speculative_tokens)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
            ),
        )
    )
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
        frozen = name.split(".")[0] in ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm")
        parameter.requires_grad_(not frozen)
    return model


def their_step(case: Case) -> Callable[[], None]:
    """One of speculators' steps on the same row, with its own draw of as many anchors."""
    from speculators.losses.eager import ce_loss

    model, row = speculators_model(shape_of(case)), random_row(case)
    options: dict[str, Any] = {
        "hidden_states": row.hidden_states_packed,
        "input_ids": row.input_ids,
        "loss_mask": row.loss_mask.long(),
        "verifier_last_hidden_states": row.verifier_last_hidden_packed,
        "document_ids": row.document_ids,
        "position_ids": row.position_ids,
        "loss_config": {"ce": (ce_loss, 1.0)},
        "gamma": 4.0,
        "max_anchors": case.anchors,
    }

    def step() -> None:
        model(**options)[1].backward()
        model.zero_grad(set_to_none=True)

    return step


def useful_flops(case: Case, slots: int, labels: int) -> float:
    """Operations of the matrix products that a step cannot do without; attention's own are left out.

    Args:
        slots: supervised slots; the head goes over their states forward and back.
        labels: row positions whose greedy token is asked for, 0 where the target's side has sent them.
    """
    q, kv, Q, S, D = case.heads * HEAD_DIM, case.kv_heads * HEAD_DIM, case.anchors * case.P, case.S, case.D
    fc = 2 * 2 * S * CAPTURED * D * D  # the states need no gradient
    layer = 3 * (2 * Q * D * (q + 2 * kv) + 2 * Q * q * D + 3 * 2 * Q * D * case.width + 2 * S * D * 2 * kv)
    return fc + case.layers * layer + 2 * D * case.V * (2 * slots + labels)


def product_seconds(case: Case, flops: float) -> float:
    """Seconds that so many operations take here and now, from a product of this width."""
    left, right = torch.randn(1024, case.D), torch.randn(case.D, 4096)
    left @ right
    start = time.process_time()
    for _ in range(6):
        left @ right
    return flops * (time.process_time() - start) / (6 * 2 * 1024 * case.D * 4096)


def needed_labels(case: Case) -> int:
    """Row positions of which some supervised slot asks what the target says next."""
    row = random_row(case)
    anchors = draw_anchors(row, case.anchors // case.documents, 0)
    wanted = (anchors[:, None] + torch.arange(1, case.P)).flatten()
    wanted = wanted[wanted < case.S]
    same = row.document_ids[0][wanted] == row.document_ids[0][anchors].repeat_interleave(case.P - 1)[: len(wanted)]
    return len(torch.unique(wanted[same]))


def elapsed(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def peak_gigabytes() -> float:
    """Largest resident size of this process so far; `getrusage` would count the parent's."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1e6


def extra_memory(name: str, options: argparse.Namespace, program: str) -> float:
    """Gigabytes that the first two steps of a program add, in a process of its own."""
    words = ["--case", name, "--threads", str(options.threads), "--send", options.send, "--memory-of", program]
    result = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=True)
    return float(result.stdout)


def compare(name: str, options: argparse.Namespace) -> dict[str, float | int | str]:
    """Best seconds of each and their ratios."""
    case = CASES[name]
    (ours, slots), theirs = our_step(case, options.send), their_step(case)
    flops = useful_flops(case, slots, needed_labels(case) if options.send == "last_hidden" else 0)
    best = dict.fromkeys(("ours", "speculators", "products"), float("inf"))
    for _ in range(options.rounds + 1):  # the first warms up
        best["products"] = min(best["products"], product_seconds(case, flops))
        best["ours"] = min(best["ours"], elapsed(ours))
        best["speculators"] = min(best["speculators"], elapsed(theirs))
    memory = {program: extra_memory(name, options, program) for program in ("ours", "speculators")}
    return {
        "case": name,
        "send": options.send,
        "slots": slots,
        **{f"{key}_seconds": round(value, 4) for key, value in best.items()},
        "ours/speculators": round(best["ours"] / best["speculators"], 3),
        "ours/products": round(best["ours"] / best["products"], 3),
        "ours_gigabytes": round(memory["ours"], 3),
        "memory ours/speculators": round(memory["ours"] / memory["speculators"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--send", choices=("last_hidden", "target_ids"), default="last_hidden")
    parser.add_argument("--memory-of", choices=("ours", "speculators"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        case = CASES[options.case[0]]
        step = our_step(case, options.send)[0] if options.memory_of == "ours" else their_step(case)
        before = peak_gigabytes()
        step()
        step()
        print(peak_gigabytes() - before)
        return
    for name in options.case:
        print(json.dumps(compare(name, options)), flush=True)


if __name__ == "__main__":
    main()

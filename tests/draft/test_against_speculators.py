"""Our drafter, loss and gradients against speculators, a trainer written by others.

Same weights, same packed row, same anchors. Where the two rules coincide everything must agree; where they differ on
purpose, the last tests show the difference that `docs/concepts/deviations.md` explains.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from transformers import Qwen3Config

from draftline.config import DFlashConfig, LossConfig, decay_gamma
from draftline.draft.attention import Attention, BlockLayout, DenseAttention, GroupedAttention, LayerKind, dense_mask
from draftline.draft.block import draw_anchors, supervised_slots
from draftline.draft.model import DFlashDraftModel
from draftline.draft.vocabulary import membership_of
from draftline.records import PackedBatch
from draftline.train import step
from draftline.train.step import row_loss
from tests.draft.layouts import VOCABULARY, TinyTarget, block_outputs, drafter, drafter_config, make_row, random_mask

pytest.importorskip("speculators", reason="the independent trainer is not installed")
core = pytest.importorskip("speculators.models.dflash.core")

from speculators.config import SpeculatorsConfig, VerifierConfig  # noqa: E402
from speculators.losses.eager import ce_loss, kl_div_loss, tv_loss  # noqa: E402
from speculators.models.dflash import DFlashSpeculatorConfig  # noqa: E402
from speculators.models.dflash.attention import create_anchor_block_mask_mod  # noqa: E402
from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: E402

LOSS = LossConfig()


def their_model(ours: DFlashDraftModel, target: TinyTarget) -> Any:
    """Their model with our weights, built without a hub."""
    config = ours.config
    shape = Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        layer_types=list(config.layer_types),
        use_sliding_window=config.sliding_window is not None,
        sliding_window=config.sliding_window,
        attn_implementation="eager",
    )
    theirs = core.DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=shape,
            draft_vocab_size=config.head_rows,
            block_size=config.block_size,
            aux_hidden_state_layer_ids=[layer + 1 for layer in config.target_layer_ids],
            mask_token_id=config.mask_token_id,
            sliding_window_non_causal=not config.sliding_window_causal,
            sample_from_anchor=config.sample_from_anchor,
            speculators_config=SpeculatorsConfig(
                algorithm="dflash",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=config.num_speculative_tokens)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
            ),
        )
    )
    rows = target.lm_head.weight if ours.kept_ids is None else target.lm_head.weight[ours.kept_ids]
    borrowed = {
        "embed_tokens.weight": target.embedding.weight,
        "lm_head.weight": rows,
        "verifier_lm_head.weight": rows,
        "verifier_norm.weight": target.norm.weight,
    }
    if ours.d2t is not None:
        borrowed["t2d"] = membership_of(ours.d2t, config.vocab_size)
    theirs.load_state_dict({**ours.state_dict(), **borrowed}, strict=True)
    return theirs


def their_logits_and_loss(
    theirs: Any, batch: PackedBatch, anchors: Tensor, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> dict[str, Any]:
    """Logits, target ids, loss mask and loss of their forward, all for the given anchors."""
    monkeypatch.setattr(core, "select_anchors", lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool)))
    seen: dict[str, Any] = {}
    backbone = theirs._backbone_forward

    def recorded(*args: Any, **options: Any) -> Any:
        result = backbone(*args, **options)
        seen.update(logits=result[1][0], target_ids=result[2][0].argmax(-1), loss_mask=result[3][0].bool())
        return result

    monkeypatch.setattr(theirs, "_backbone_forward", recorded)
    _, seen["loss"], _ = theirs(
        hidden_states=batch.hidden_states_packed,
        input_ids=batch.input_ids,
        loss_mask=batch.loss_mask.long(),
        verifier_last_hidden_states=batch.verifier_last_hidden_packed,
        document_ids=batch.document_ids,
        position_ids=batch.position_ids,
        **{"loss_config": {"ce": (ce_loss, 1.0)}, **options},
        gamma=decay_gamma(LOSS, theirs.block_size),
        max_anchors=len(anchors),
    )
    return seen


def their_slots(batch: PackedBatch, anchors: Tensor, config: DFlashConfig) -> Tensor:
    """Slots that they supervise: the mask at the slot's own row position, [A, P]."""
    positions_AP = anchors[:, None] + torch.arange(config.block_size)
    slots_AP = batch.loss_mask[0, positions_AP.clamp(max=batch.loss_mask.shape[1] - 1)].clone()
    if not config.sample_from_anchor:
        slots_AP[:, 0] = False
    return slots_AP


def our_slots(batch: PackedBatch, anchors: Tensor, config: DFlashConfig) -> Tensor:
    return supervised_slots(
        anchors, batch.loss_mask[0], batch.document_ids[0], config.block_size, config.sample_from_anchor
    )


def random_case(seed: int, reduced: bool = False) -> tuple[DFlashConfig, PackedBatch, Tensor]:
    """A drafter, a row padded by an unsupervised document, and the anchors at which both rules supervise the same."""
    rng = random.Random(seed)
    layers, captured = rng.randint(1, 3), rng.randint(1, 5)
    block_size = rng.randint(2, 16)
    changes = {
        "num_hidden_layers": layers,
        "target_layer_ids": tuple(range(captured)),
        "block_size": block_size,
        "num_attention_heads": rng.choice([2, 4]),
        "sample_from_anchor": seed % 4 == 3,
    }
    if seed % 5 == 4:  # no window is short enough here to cut anything off: its lower bound differs
        changes["layer_types"] = tuple(rng.choice(["sliding_attention", "full_attention"]) for _ in range(layers))
        changes["sliding_window"] = 1000
        changes["sliding_window_causal"] = rng.random() < 0.5
    if reduced:
        changes["draft_vocab_size"] = rng.randint(2, VOCABULARY - 1)
    config = drafter_config(changes)
    while True:
        lengths = [rng.randint(8, 50) for _ in range(rng.randint(1, 4))]
        mask = [token for length in lengths for token in random_mask(rng, length, 2 * block_size + 2)]
        padding = block_size + rng.randint(1, 3)
        mask_S = torch.tensor(mask + [False] * padding)
        batch = make_row([*lengths, padding], mask_S, captured=captured, seed=rng.randrange(2**31))
        anchors = draw_anchors(batch, num_anchors=8, seed=seed)
        anchors = anchors[(our_slots(batch, anchors, config) == their_slots(batch, anchors, config)).all(dim=1)]
        if our_slots(batch, anchors, config).sum() >= 16:
            return config, batch, anchors


def labels_of_step(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The labels that the training step hands to the loss, one entry per row."""
    labels: list[Tensor] = []
    slot_loss_sum = step.slot_loss_sum

    def recorded(*args: Any) -> Any:
        labels.append(args[1].labels_n)
        return slot_loss_sum(*args)

    monkeypatch.setattr(step, "slot_loss_sum", recorded)
    return labels


def assert_close(found: Tensor, wanted: Tensor, what: str) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max(), what


@pytest.mark.parametrize(("seed", "reduced"), [*((s, False) for s in range(40)), *((s, True) for s in range(20))])
def test_logits_targets_loss_and_gradients_agree(seed: int, reduced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config, batch, anchors = random_case(seed, reduced)
    ours, target = drafter(config, seed), TinyTarget(seed)
    theirs = their_model(ours, target)
    attention: type[Attention] = GroupedAttention if seed % 2 else DenseAttention

    seen = their_logits_and_loss(theirs, batch, anchors, monkeypatch)
    seen["loss"].backward()
    hidden_APD, _ = block_outputs(ours, batch, anchors, target, attention)
    labels = labels_of_step(monkeypatch)
    frozen = target.frozen(ours.kept_ids)
    loss_sum, metrics = row_loss(ours, batch, anchors, frozen, LOSS, attention)
    loss = loss_sum / metrics.slots
    loss.backward()

    supervised_AP = our_slots(batch, anchors, config)
    assert torch.equal(seen["loss_mask"], supervised_AP.flatten())
    assert metrics.slots == supervised_AP.sum() >= 16
    assert torch.equal(labels[0], seen["target_ids"][seen["loss_mask"]])
    assert_close(frozen.head.logits(hidden_APD).flatten(0, 1), seen["logits"], "logits")
    assert_close(loss, seen["loss"], "loss")
    right_Q = seen["logits"].argmax(-1) == seen["target_ids"]
    if reduced:
        right_Q &= their_labels_are_the_targets_own(theirs, target, batch, anchors, seen["target_ids"])
    correct_AP = right_Q.view_as(supervised_AP) & supervised_AP
    assert metrics.correct_target_P.tolist() == correct_AP.sum(dim=0).tolist()
    theirs_by_name = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert_close(parameter.grad, theirs_by_name[name].grad, name)


KINDS = {
    "dpace": (LossConfig(weights="dpace"), {"per_position_loss_weight": "dpace", "dpace_alpha": 0.5}),
    "kl": (LossConfig(ce=0.0, kl=1.0), {"loss_config": {"kl_div": (kl_div_loss, 1.0)}}),
    "dspark": (LossConfig(ce=0.1, tv=0.9), {"loss_config": {"ce": (ce_loss, 0.1), "tv": (tv_loss, 0.9)}}),
}
"""What else may be taught, and the same in their words."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seed", "reduced"), [*((s, False) for s in range(6)), *((s, True) for s in range(4))])
def test_other_weights_and_distances_agree(
    seed: int, reduced: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, batch, anchors = random_case(seed, reduced)
    ours, target, (settings, options) = drafter(config, seed), TinyTarget(seed), KINDS[kind]
    theirs = their_model(ours, target)
    seen = their_logits_and_loss(theirs, batch, anchors, monkeypatch, **options)
    seen["loss"].backward()
    loss_sum, metrics = row_loss(ours, batch, anchors, target.frozen(ours.kept_ids), settings, GroupedAttention)
    loss = loss_sum / metrics.slots
    loss.backward()
    assert_close(loss, seen["loss"], "loss")
    theirs_by_name = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert_close(parameter.grad, theirs_by_name[name].grad, name)


def their_labels_are_the_targets_own(
    theirs: Any, target: TinyTarget, batch: PackedBatch, anchors: Tensor, target_ids_Q: Tensor
) -> Tensor:
    """Slots whose label, mapped back by their `d2t`, is what the target says with its whole vocabulary, [Q]."""
    first = 1 if theirs.config.sample_from_anchor else 0
    predicted_Q = (anchors[:, None] + first + torch.arange(theirs.block_size)).flatten()
    last = batch.verifier_last_hidden_packed[0]
    own_S = target.lm_head(target.norm(last)).argmax(-1)
    return target_ids_Q + theirs.d2t[target_ids_Q] == own_S[(predicted_Q - 1).clamp(max=len(own_S) - 1)]


# Where we differ on purpose.


def one_answer_row(*lengths: int, unsupervised: tuple[int, ...] = ()) -> PackedBatch:
    mask_S = torch.ones(sum(lengths), dtype=torch.bool)
    mask_S[list(unsupervised)] = False
    return make_row(lengths, mask_S)


def test_they_supervise_past_the_end_of_a_document() -> None:
    config, batch, anchors = drafter_config(), one_answer_row(6, 10), torch.tensor([4])
    assert their_slots(batch, anchors, config).int().tolist() == [[0, 1, 1, 1]]
    assert our_slots(batch, anchors, config).int().tolist() == [[0, 1, 0, 0]]


def test_they_supervise_after_a_gap_of_the_mask() -> None:
    config, batch, anchors = drafter_config(), one_answer_row(12, unsupervised=(4,)), torch.tensor([2])
    assert their_slots(batch, anchors, config).int().tolist() == [[0, 1, 0, 1]]
    assert our_slots(batch, anchors, config).int().tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize(("lengths", "unsupervised"), [((6, 10), ()), ((12,), (4, 6))])
def test_their_loss_has_more_slots_there(
    lengths: tuple[int, ...], unsupervised: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, anchors = one_answer_row(*lengths, unsupervised=unsupervised), torch.tensor([2, 4])
    anchors = anchors[batch.loss_mask[0, anchors]]
    ours, target = drafter(drafter_config()), TinyTarget()
    seen = their_logits_and_loss(their_model(ours, target), batch, anchors, monkeypatch)
    loss_sum, metrics = row_loss(ours, batch, anchors, target.frozen(), LOSS, DenseAttention)
    assert seen["loss_mask"].sum() > metrics.slots
    assert torch.equal(seen["loss_mask"].view(-1, 4), their_slots(batch, anchors, ours.config))
    assert abs(seen["loss"].item() - loss_sum.item() / metrics.slots) > 1e-3


def test_they_leave_out_anchors_in_the_last_block_of_a_row() -> None:
    batch = one_answer_row(12)
    theirs, valid = core.select_anchors(batch.loss_mask, 12, 4)
    assert theirs[valid].tolist() == list(range(8))
    assert draw_anchors(batch, 12, seed=0).tolist() == list(range(11))


def test_they_take_the_last_answer_token_as_an_anchor() -> None:
    batch = one_answer_row(16, unsupervised=(8, 9, 10, 11, 12, 13, 14, 15))
    theirs, valid = core.select_anchors(batch.loss_mask, 12, 4)
    assert 7 in theirs[valid].tolist()
    assert draw_anchors(batch, 12, seed=0).tolist() == list(range(7))


def test_their_budget_is_per_row() -> None:
    batch = one_answer_row(20, 20)
    _, valid = core.select_anchors(batch.loss_mask, 6, 4)
    assert valid.sum() == 6
    assert len(draw_anchors(batch, 6, seed=0)) == 12


def test_where_the_anchor_predicts_they_read_the_mask_one_token_early() -> None:
    config = drafter_config({"sample_from_anchor": True})
    batch, anchors = one_answer_row(12, unsupervised=(8, 9, 10, 11)), torch.tensor([5])
    assert their_slots(batch, anchors, config).int().tolist() == [[1, 1, 1, 0]]
    assert our_slots(batch, anchors, config).int().tolist() == [[1, 1, 0, 0]]


def test_they_add_an_epsilon_to_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one slot the two losses differ by 1e-5 of their value."""
    batch, anchors = one_answer_row(8, unsupervised=(4, 5, 6, 7)), torch.tensor([2])
    ours, target = drafter(drafter_config(), dtype=torch.float64), TinyTarget(dtype=torch.float64)
    batch = make_row((8,), batch.loss_mask[0], dtype=torch.float64)
    theirs = their_model(ours, target).double()
    monkeypatch.setattr(theirs, "_create_mask_fn", lambda *a, **k: core.create_float_mask(*a, **k, dtype=torch.float64))
    seen = their_logits_and_loss(theirs, batch, anchors, monkeypatch)
    loss_sum, metrics = row_loss(ours, batch, anchors, target.frozen(), LOSS, DenseAttention)
    assert metrics.slots == 1
    assert loss_sum.item() / seen["loss"].item() == pytest.approx(1 + 1e-5, abs=3e-7)


def test_they_count_a_token_as_right_that_the_target_would_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their accuracy is against the best kept token, ours against what the target says: only that is accepted."""
    batch, anchors = one_answer_row(20), torch.arange(2, 12)
    config = drafter_config({"draft_vocab_size": 3})
    ours, target = drafter(config), TinyTarget()
    seen = their_logits_and_loss(their_model(ours, target), batch, anchors, monkeypatch)
    _, metrics = row_loss(ours, batch, anchors, target.frozen(ours.kept_ids), LOSS, DenseAttention)
    theirs = (seen["logits"].argmax(-1) == seen["target_ids"])[seen["loss_mask"]].sum()
    assert theirs > 5 > metrics.correct_target_P.sum()


def their_mask(layout: BlockLayout, document_ids_S: Tensor, kind: LayerKind) -> Tensor:
    mask_mod, queries, keys = create_anchor_block_mask_mod(
        document_ids=document_ids_S,
        total_seq_len=len(document_ids_S),
        anchor_positions=layout.anchor_positions_A,
        block_size=layout.block_size,
        sliding_window=kind.window,
        sliding_window_non_causal=not kind.causal,
    )
    return create_mask(mask_mod, None, None, queries, keys)[0, 0]


def test_their_window_starts_from_the_anchor_for_every_slot() -> None:
    """Ours moves with the slot, pos_q - pos_k < W, as z-lab, vLLM and SGLang decode."""
    window, anchor, block = 6, 10, 4
    layout = BlockLayout.of_row(torch.tensor([anchor]), torch.arange(16), block)
    kind = LayerKind(causal=True, window=window)
    ours = dense_mask(layout, kind, 16)[:, :16]
    theirs = their_mask(layout, torch.zeros(16, dtype=torch.int64), kind)[:, :16]
    for slot in range(block):
        assert theirs[slot].nonzero()[:, 0].tolist() == list(range(anchor - window, anchor))
        assert ours[slot].nonzero()[:, 0].tolist() == list(range(anchor + slot - window + 1, anchor))


@pytest.mark.parametrize("seed", range(10))
def test_masks_without_a_binding_window_are_the_same(seed: int) -> None:
    rng = random.Random(seed)
    config, batch, anchors = random_case(seed)
    layout = BlockLayout.of_row(anchors, batch.position_ids[0], config.block_size)
    document_ids_S = batch.document_ids[0]
    kind = rng.choice([LayerKind(False, None), LayerKind(True, 1000), LayerKind(False, 1000)])
    assert torch.equal(dense_mask(layout, kind, len(document_ids_S)), their_mask(layout, document_ids_S, kind))

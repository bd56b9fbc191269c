"""Batches by length give each sample the states that it has alone."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftline.errors import TargetError
from draftline.records import Sample
from draftline.targets.loop import CHECKED_BATCHES, TargetForwardLoop, bucket, pad_right
from draftline.targets.model import build_target
from tests.targets.families import FEW, random_ids, tiny

IDS = (0, 2)


def make_samples(*lengths: int) -> list[Sample]:
    return [
        Sample(10 + i, random_ids(length, seed=i), torch.ones(length, dtype=torch.bool))
        for i, length in enumerate(lengths)
    ]


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 120))
def test_buckets_hold_each_sample_once_and_keep_to_the_bound(lengths: list[int], batch_tokens: int) -> None:
    batches = bucket(lengths, batch_tokens)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = max(lengths[i] for i in batch) * len(batch)
        assert padded <= batch_tokens or len(batch) == 1
    longest = [max(lengths[i] for i in batch) for batch in batches]
    shortest = [min(lengths[i] for i in batch) for batch in batches]
    assert all(low >= high for low, high in zip(shortest, longest[1:], strict=False))


def test_buckets_by_hand() -> None:
    assert bucket([3, 10, 4, 10, 1], 20) == [[1, 3], [2, 0, 4]]
    assert bucket([], 20) == []


def test_padding_repeats_the_last_token() -> None:
    ids, mask = pad_right([torch.tensor([5, 6]), torch.tensor([7, 8, 9])])
    assert ids.tolist() == [[5, 6, 6], [7, 8, 9]]
    assert mask.tolist() == [[1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("family", FEW)
def test_a_sample_alone_and_in_a_batch(family: str) -> None:
    target = build_target(family, tiny(family), None)
    samples = make_samples(9, 23, 2, 16, 9)
    loop = TargetForwardLoop(target, IDS, "last_hidden", batch_tokens=1000)
    together = loop.capture(samples)
    for sample, found in zip(samples, together, strict=True):
        assert found.sample is sample
        (alone,) = loop.capture([sample])
        with torch.no_grad():
            logits = target.model(input_ids=sample.input_ids[None]).logits[0]
        for a, b in (
            (alone.hidden_states_SLD, found.hidden_states_SLD),
            (alone.verifier_last_hidden_SD, found.verifier_last_hidden_SD),
            (logits, target.head(found.verifier_last_hidden_SD)),
        ):
            assert (a - b).abs().max() <= 4e-5 * a.abs().max()  # measured: 2.6e-5, of Gemma 4


def test_ids_sent_are_those_that_the_last_states_give() -> None:
    target = build_target("gemma2", tiny("gemma2"), None)
    samples = [replace(s, loss_mask=torch.arange(len(s)) > len(s) // 3) for s in make_samples(4, 12, 7)]
    by_ids = TargetForwardLoop(target, IDS, "target_ids", batch_tokens=24).capture(samples)
    by_states = TargetForwardLoop(target, IDS, "last_hidden", batch_tokens=24).capture(samples)
    for left, right in zip(by_ids, by_states, strict=True):
        assert left.verifier_last_hidden_SD is None
        assert right.target_ids_S is None
        assert torch.equal(left.hidden_states_SLD, right.hidden_states_SLD)
        taught = torch.tensor([*left.sample.loss_mask[1:].tolist(), False])
        assert 0 < taught.sum() < len(taught) - 1
        assert (left.target_ids_S[~taught] == -1).all()
        assert torch.equal(left.target_ids_S[taught], target.head.target_ids(right.verifier_last_hidden_SD)[taught])
        with torch.no_grad():
            logits = target.model(input_ids=left.sample.input_ids[None]).logits[0]
        assert torch.equal(left.target_ids_S[taught], logits.argmax(-1)[taught])


def test_states_are_constants_that_autograd_accepts() -> None:
    target = build_target("llama", tiny("llama"), None)
    (captured,) = TargetForwardLoop(target, IDS).capture(make_samples(6))
    assert not captured.hidden_states_SLD.is_inference()
    assert not captured.hidden_states_SLD.requires_grad
    weight = torch.randn(64, 3, requires_grad=True)
    (captured.hidden_states_SLD @ weight).sum().backward()
    torch.testing.assert_close(weight.grad[:, 0], captured.hidden_states_SLD.sum(0))


def test_logits_of_all_positions_are_not_computed() -> None:
    target = build_target("llama", tiny("llama"), None)
    widths: list[int] = []
    target.parts.lm_head.register_forward_hook(lambda _m, _a, out: widths.append(out.shape[1]))
    TargetForwardLoop(target, IDS, "last_hidden").capture(make_samples(20, 20))
    assert widths == [1]


def test_a_model_without_logits_to_keep_runs_too() -> None:
    model = tiny("llama")
    target = build_target("llama", model, None)
    samples = make_samples(6, 9)
    wanted = TargetForwardLoop(target, IDS).capture(samples)
    original = model.forward
    model.forward = lambda input_ids, attention_mask, use_cache: original(
        input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache
    )
    for left, right in zip(wanted, TargetForwardLoop(target, IDS).capture(samples), strict=True):
        assert torch.equal(left.hidden_states_SLD, right.hidden_states_SLD)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([3] * 65, "sample 3 has 65 tokens, target llama reads 1 to 64"),
        ([], "sample 3 has 0 tokens"),
        ([5, 96], r"sample 3 has token 96, target llama knows 0\.\.95"),
        ([5, -1], "sample 3 has token -1"),
    ],
)
def test_samples_of_another_target_are_refused(ids: list[int], message: str) -> None:
    loop = TargetForwardLoop(build_target("llama", tiny("llama"), None), IDS)
    sample = Sample(3, torch.tensor(ids, dtype=torch.int64), torch.ones(len(ids), dtype=torch.bool))
    with pytest.raises(TargetError, match=message):
        loop.capture([sample])


def test_bad_states_are_refused_in_the_first_batches_and_nan_always() -> None:
    model = tiny("llama")
    loop = TargetForwardLoop(build_target("llama", model, None), IDS)
    handle = model.model.layers[2].register_forward_hook(lambda _m, _a, out: torch.zeros_like(out))
    with pytest.raises(TargetError, match="layer 2 of the target is all zero at token 0 of sample 10"):
        loop.capture(make_samples(6))
    handle.remove()
    for _ in range(CHECKED_BATCHES):
        loop.capture(make_samples(6))

    def spoil(_module: object, _args: object, out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        out[-1, 1] = float("nan")
        return out

    model.model.layers[2].register_forward_hook(spoil)
    with pytest.raises(TargetError, match="layer 2 of the target is not finite at token 1 of sample 11"):
        loop.capture(make_samples(6, 6))

"""What the drafter takes over from the target, and what it leaves behind."""

import pytest
import torch

from draftline.config import DrafterConfig
from draftline.draft.model import DFlashDraftModel
from draftline.errors import ConfigError, TargetError
from draftline.targets.drafter_shape import resolve_drafter_config
from draftline.targets.model import Target, build_target
from tests.targets.families import FEW, VOCAB, tiny, word_tokenizer

SMALL = DrafterConfig(num_layers=2, num_captured_layers=1)

WHOLE_HEADS = ("llama", "llama-tied", "qwen2", "qwen2-vl-wrapper", "granite", "cohere", "cohere2", "gpt2")
"""Families whose heads share the width among them, or whose configuration has no word for their size."""


def target_of(family: str) -> Target:
    return build_target(family, tiny(family), word_tokenizer())


@pytest.mark.parametrize("family", FEW)
def test_every_family_gives_a_complete_drafter(family: str) -> None:
    target = target_of(family)
    config = resolve_drafter_config(target, SMALL, None)
    assert config.vocab_size == target.embedding.get_parameter("weight").shape[0] == VOCAB
    assert config.hidden_size == 32
    depth = 6 if family == "gemma4-shared" else 4
    assert config.num_target_layers == depth
    assert config.target_layer_ids == (depth // 2,)
    assert config.num_attention_heads == 4
    assert config.num_key_value_heads == (4 if family == "gpt2" else 2)
    assert config.head_dim == (8 if family in WHOLE_HEADS else 12)
    assert config.max_position_embeddings == 64
    assert config.intermediate_size == (96 if family in ("qwen3-moe", "gpt-oss", "gpt2", "afmoe") else 48)
    assert config.rope_parameters["rope_theta"] > 0
    assert not {"partial_rotary_factor", "mrope_section"} & config.rope_parameters.keys()
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)
    assert config.layer_types == ("full_attention", "full_attention")
    DFlashDraftModel(config)


def test_eps_is_read_from_the_norm_when_the_configuration_does_not_say_it() -> None:
    target = target_of("llama")
    target.config.__dict__["rms_norm_eps"] = None
    target.final_norm.variance_epsilon = 3e-4
    assert resolve_drafter_config(target, SMALL, None).rms_norm_eps == 3e-4


def test_scales_travel_with_the_shape() -> None:
    granite = resolve_drafter_config(target_of("granite"), SMALL, None)
    assert (granite.input_embedding_scale, granite.output_multiplier) == (3.0, 0.25)
    gemma = resolve_drafter_config(target_of("gemma2"), SMALL, None)
    assert gemma.input_embedding_scale == pytest.approx(32**0.5)
    assert gemma.final_logit_softcapping == 0.5


def test_what_the_user_sets_wins() -> None:
    drafter = DrafterConfig(
        num_layers=3,
        target_layer_ids=(0, 2),
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        intermediate_size=80,
        sliding_window=12,
        num_sliding_layers=2,
        block_size=5,
        sample_from_anchor=True,
        mask_token_id=93,
    )
    config = resolve_drafter_config(target_of("qwen3-moe"), drafter, None)
    assert config.target_layer_ids == (0, 2)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 3, 16)
    assert config.intermediate_size == 80
    assert config.layer_types == ("sliding_attention", "sliding_attention", "full_attention")
    assert (config.sliding_window, config.block_size, config.num_speculative_tokens) == (12, 5, 5)
    assert config.mask_token_id == 93


@pytest.mark.parametrize(
    ("drafter", "error", "message"),
    [
        (DrafterConfig(), TargetError, "4 layers is too shallow for 5 captured layers: set .* at most 1"),
        (DrafterConfig(target_layer_ids=(1, 3)), ConfigError, "has 3, the last layer"),
        (DrafterConfig(num_captured_layers=1, num_attention_heads=5), ConfigError, "5 heads cannot share 2 key-value"),
        (DrafterConfig(num_captured_layers=1, num_sliding_layers=1), ConfigError, "set drafter.sliding_window"),
        (DrafterConfig(num_captured_layers=1, sliding_window=8), ConfigError, "is used by no layer"),
        (
            DrafterConfig(num_captured_layers=1, sliding_window=8, num_sliding_layers=9),
            ConfigError,
            "num_sliding_layers 9 does not fit a drafter of 5 layers",
        ),
    ],
)
def test_contradictions_are_one_line(drafter: DrafterConfig, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        resolve_drafter_config(target_of("llama"), drafter, None)
    assert "\n" not in str(caught.value)


def test_mask_is_the_first_free_padding_row() -> None:
    target = target_of("llama")
    assert resolve_drafter_config(target, SMALL, None).mask_token_id == 90
    assert resolve_drafter_config(target, SMALL, {90, 91}).mask_token_id == 92
    used = torch.zeros(VOCAB, dtype=torch.bool)
    used[90] = True
    assert resolve_drafter_config(target, SMALL, used).mask_token_id == 91
    target.embedding.weight[90] *= 1e-4
    assert resolve_drafter_config(target, SMALL, None).mask_token_id == 91


@pytest.mark.parametrize(
    ("extra", "used", "chosen"),
    [
        (("<tool>", "<reserved_0>", "<reserved_1>", "<image>"), set(), "<reserved_0>"),
        (("<tool>", "<reserved_0>", "<reserved_1>", "<image>"), {91}, "<reserved_1>"),
        (("<tool>", "<image>"), set(), "<image>"),
        (("<tool>", "<image>"), {91}, "<tool>"),
    ],
)
def test_mask_is_an_unused_special_token_when_the_table_has_no_padding(
    extra: tuple[str, ...], used: set[int], chosen: str
) -> None:
    size = 90
    tokenizer = word_tokenizer(VOCAB - len(extra), extra)
    used = {token - size + VOCAB - len(extra) for token in used}
    target = build_target("llama", tiny("llama"), tokenizer)
    mask = resolve_drafter_config(target, SMALL, used).mask_token_id
    assert tokenizer.convert_ids_to_tokens(mask) == chosen


def test_tokens_of_the_chat_template_are_never_the_mask() -> None:
    tokenizer = word_tokenizer(VOCAB, template="<turn>{{ messages }}")
    target = build_target("llama", tiny("llama"), tokenizer)
    with pytest.raises(ConfigError, match=r"no free embedding row .* set drafter.mask_token_id"):
        resolve_drafter_config(target, SMALL, None)
    tokenizer.chat_template = "{{ messages }}"
    assert resolve_drafter_config(target, SMALL, None).mask_token_id == 3


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (0, "is the pad token of llama.*: 90 would do"),
        (1, "is the bos token"),
        (2, "is the eos token"),
        (7, "is the eos token"),
        (5, "occurs in the data: 90 would do"),
        (VOCAB, "is not a row of the embedding table of llama, which has 96 and is never resized: 90 would do"),
        (-1, "is not a row"),
        (95, "has an embedding row of nearly zero"),
    ],
)
def test_a_mask_that_cannot_serve_is_refused_with_a_proposal(wanted: int, message: str) -> None:
    target = target_of("llama")
    target.model.generation_config.eos_token_id = [2, 7]
    target.embedding.weight[95] *= 1e-4
    with pytest.raises(ConfigError, match=message):
        resolve_drafter_config(target, SMALL.model_copy(update={"mask_token_id": wanted}), {5, 6})


def test_without_a_tokenizer_the_mask_must_be_given() -> None:
    target = build_target("llama", tiny("llama"), None)
    with pytest.raises(ConfigError, match=r"set drafter\.mask_token_id"):
        resolve_drafter_config(target, SMALL, None)
    assert resolve_drafter_config(target, SMALL.model_copy(update={"mask_token_id": 9}), None).mask_token_id == 9

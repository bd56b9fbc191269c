"""The choice of captured layers, and the conversion between the two ways of numbering them."""

import pytest

from draftline.errors import ConfigError, TargetError
from draftline.targets.layers import (
    check_target_layer_ids,
    default_target_layer_ids,
    from_aux_hidden_state_layer_ids,
    to_aux_hidden_state_layer_ids,
)


@pytest.mark.parametrize(
    ("num_layers", "count", "ids"),
    [
        (64, 5, (1, 16, 31, 46, 61)),
        (30, 5, (1, 8, 14, 20, 27)),
        (28, 3, (1, 13, 25)),
        (64, 1, (32,)),
        (8, 5, (1, 2, 3, 4, 5)),
        (3, 1, (1,)),
    ],
)
def test_defaults(num_layers: int, count: int, ids: tuple[int, ...]) -> None:
    assert default_target_layer_ids(num_layers, count) == ids


@pytest.mark.parametrize("num_layers", range(1, 40))
@pytest.mark.parametrize("count", range(1, 8))
def test_a_default_is_usable_or_the_largest_count_is_named(num_layers: int, count: int) -> None:
    try:
        ids = default_target_layer_ids(num_layers, count)
    except TargetError as error:
        text = str(error)
        if "at least 3" in text:
            assert num_layers < 3
            return
        largest = int(text.partition("at most ")[2].partition(",")[0])
        assert largest < count
        assert len(default_target_layer_ids(num_layers, largest)) == largest
        with pytest.raises(TargetError):
            default_target_layer_ids(num_layers, largest + 1)
    else:
        assert len(ids) == count
        assert check_target_layer_ids(ids, num_layers) == ids


@pytest.mark.parametrize("ids", [[0], [0, 1, 2], [2], [0, 2]])
def test_usable_ids_pass(ids: list[int]) -> None:
    assert check_target_layer_ids(ids, 4) == tuple(ids)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([], "empty"),
        ([1, 3], "has 3, the last layer"),
        ([1, 4], "has 4, which is not a layer of a target with 4: use 0..2"),
        ([-1, 1], "has -1, which is not a layer"),
        ([2, 1], "distinct and increasing: use [1, 2]"),
        ([1, 1, 2], "distinct and increasing: use [1, 2]"),
    ],
)
def test_unusable_ids_are_explained(ids: list[int], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_target_layer_ids(ids, 4)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_other_convention_counts_from_the_embedding() -> None:
    assert to_aux_hidden_state_layer_ids((1, 13, 25)) == (2, 14, 26)
    assert from_aux_hidden_state_layer_ids((2, 14, 26)) == (1, 13, 25)
    with pytest.raises(ConfigError, match="reads the embedding"):
        from_aux_hidden_state_layer_ids((0, 2))

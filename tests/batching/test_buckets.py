"""Length classes and their costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.buckets import Buckets, attention_pairs, padded_tokens, padding_share
from batching.errors import InputTooLong

ceilings = st.sets(st.integers(1, 500), min_size=1, max_size=8).map(lambda chosen: tuple(sorted(chosen)))


@given(ceilings, st.data())
def test_ceiling_is_the_smallest_that_holds(chosen: tuple[int, ...], data: st.DataObject) -> None:
    """A row goes to the first ceiling that is not below its length."""
    buckets = Buckets(chosen)
    num_tokens = data.draw(st.integers(1, buckets.limit))
    expected = min(ceiling for ceiling in chosen if ceiling >= num_tokens)
    assert (buckets.ceiling_of(num_tokens), chosen[buckets.index_of(num_tokens)]) == (expected, expected)


@given(ceilings, st.integers(1, 10))
def test_beyond_the_last_ceiling_is_too_long(chosen: tuple[int, ...], excess: int) -> None:
    """The error carries the length, the limit and the caller's name for the field."""
    with pytest.raises(InputTooLong) as caught:
        Buckets(chosen).index_of(chosen[-1] + excess, param="input[3]")
    assert caught.value.args == ("input[3]", chosen[-1] + excess, chosen[-1], False)


def test_ceilings_are_kept_as_a_tuple() -> None:
    """A list from a configuration file becomes immutable."""
    assert Buckets([16, 64]).ceilings == (16, 64)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lengths", "padded", "pairs", "share"),
    [
        pytest.param([10, 50, 100], 300, 12600, 1 - 160 / 300, id="seed-2-example"),
        pytest.param([7], 7, 49, 0.0, id="one-row"),
        pytest.param([4, 4], 8, 32, 0.0, id="equal-rows"),
    ],
)
def test_costs_of_layouts(lengths: list[int], padded: int, pairs: int, share: float) -> None:
    """Padded positions, attention pairs and the padded share follow from the lengths."""
    assert (padded_tokens(lengths), attention_pairs(lengths), padding_share(lengths)) == (padded, pairs, share)

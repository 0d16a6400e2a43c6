"""Length classes: which bucket a row belongs to, and what a rectangle of it costs."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from batching.errors import InputTooLong


@dataclass(frozen=True, slots=True)
class Buckets:
    """Strictly increasing token ceilings, such as (16, 64, 256); a row belongs to the first that holds it.

    Raises ValueError when there are none, or one is not a positive int, or they do not increase.
    """

    ceilings: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ceilings", tuple(self.ceilings))
        if not self.ceilings:
            raise ValueError("buckets: at least one ceiling is needed")
        if any(type(ceiling) is not int or ceiling < 1 for ceiling in self.ceilings):
            raise ValueError("buckets: every ceiling must be an integer of at least 1")
        if any(low >= high for low, high in pairwise(self.ceilings)):
            raise ValueError("buckets: ceilings must increase strictly")

    @property
    def limit(self) -> int:
        """The longest row that any bucket takes, in tokens."""
        return self.ceilings[-1]

    def index_of(self, num_tokens: int, *, param: str = "token_ids") -> int:
        """Position of the bucket for a row of `num_tokens`. Raises InputTooLong beyond the last ceiling."""
        if num_tokens > self.limit:
            raise InputTooLong(param, num_tokens, self.limit)
        return bisect_left(self.ceilings, num_tokens)

    def ceiling_of(self, num_tokens: int, *, param: str = "token_ids") -> int:
        """The ceiling that a row of `num_tokens` is charged in a padded layout. Raises InputTooLong."""
        return self.ceilings[self.index_of(num_tokens, param=param)]


def padded_tokens(lengths: Sequence[int]) -> int:
    """Positions of the rectangle that holds rows of these lengths: B x the longest."""
    return len(lengths) * max(lengths)


def attention_pairs(lengths: Sequence[int]) -> int:
    """Query-key pairs of a packed batch: the sum of squared lengths."""
    return sum(length * length for length in lengths)


def padding_share(lengths: Sequence[int]) -> float:
    """Share of the rectangle that is padding, 0 for equal lengths."""
    return 1.0 - sum(lengths) / padded_tokens(lengths)

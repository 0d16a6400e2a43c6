"""What a caller hands in and gets back, as immutable values. Standard library only.

`TokenRequest` is checked once, here; whoever holds one may rely on it. No tokenizer is implied: ids are the
model's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from batching.errors import EmptyInput, InvalidRequest, TokenIdOutOfRange

MAX_TOKEN_ID = 2**31 - 1
"""Ids travel as int32; vocabularies end around 2^18."""


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One row: `token_ids` may be passed as list or tuple of exact ints and is kept as a tuple.

    Raises InvalidRequest (field and index named, never the value), EmptyInput, TokenIdOutOfRange.
    """

    request_id: str
    tenant: str
    revision: str
    token_ids: Sequence[int]

    def __post_init__(self) -> None:
        for field in ("request_id", "tenant", "revision"):
            value = getattr(self, field)
            if type(value) is not str or not value:
                raise InvalidRequest(field, "must be a non-empty string")
        object.__setattr__(self, "token_ids", _checked_token_ids(self.token_ids))


@dataclass(frozen=True, slots=True)
class TokenPrediction:
    """One number per token of the request with the same `request_id`, in order."""

    request_id: str
    values: tuple[float, ...]


def _checked_token_ids(token_ids: object) -> tuple[int, ...]:
    # Only list and tuple: a generator would be consumed, and arrays carry their own integer types.
    if type(token_ids) not in (list, tuple):
        raise InvalidRequest("token_ids", "must be a list or tuple of integers")
    assert isinstance(token_ids, list | tuple)
    if not token_ids:
        raise EmptyInput("token_ids")
    for index, token_id in enumerate(token_ids):
        if type(token_id) is not int:  # bool is an int subclass, and nothing is coerced
            raise InvalidRequest(f"token_ids[{index}]", "must be an integer")
        if not 0 <= token_id <= MAX_TOKEN_ID:
            raise TokenIdOutOfRange(f"token_ids[{index}]", MAX_TOKEN_ID + 1)
    return tuple(token_ids)

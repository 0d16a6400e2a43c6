"""The rectangle: rows padded to the longest of their batch, one model call, each row's own numbers back.

Standard library only, and strict: the whole output, discarded padding positions included, is checked before any value
of it is returned.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from batching.errors import TokenServeError
from batching.request import TokenPrediction, TokenRequest


class MalformedOutput(TokenServeError):
    """The model's output breaks its contract; `reason` names positions and types, never values."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    @property
    def detail(self) -> str:
        """Name what is wrong with the output."""
        return f"the model returned a malformed output: {self.reason}"


@dataclass(frozen=True, slots=True)
class ModelBatch:
    """B rows of one width W, immutable: `input_ids` and `attention_mask` are B tuples of W ints."""

    input_ids: tuple[tuple[int, ...], ...]
    attention_mask: tuple[tuple[int, ...], ...]

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.input_ids)

    @property
    def width(self) -> int:
        """W, the longest row of this batch."""
        return len(self.input_ids[0])


def collate(requests: Sequence[TokenRequest], *, pad_id: int = 0) -> ModelBatch:
    """Pad `requests`, in order, to the longest of them. The mask comes from lengths, so a real `pad_id` is input.

    Raises ValueError for no rows and for rows of more than one tenant or revision.
    """
    if not requests:
        raise ValueError("cannot collate zero rows")
    if len({(request.tenant, request.revision) for request in requests}) > 1:
        raise ValueError("cannot collate rows of more than one tenant or revision")
    width = max(len(request.token_ids) for request in requests)
    return ModelBatch(
        input_ids=tuple(
            tuple(request.token_ids) + (pad_id,) * (width - len(request.token_ids)) for request in requests
        ),
        attention_mask=tuple(
            (1,) * len(request.token_ids) + (0,) * (width - len(request.token_ids)) for request in requests
        ),
    )


def unbatch(requests: Sequence[TokenRequest], batch: ModelBatch, output: object) -> list[TokenPrediction]:
    """Check `output` (a list or tuple of B lists or tuples of W finite numbers) and cut each row to its length.

    Raises MalformedOutput, and then returns nothing of the batch.
    """
    rows = _checked_rows(output, batch)
    return [
        TokenPrediction(request.request_id, tuple(row[: len(request.token_ids)]))
        for request, row in zip(requests, rows, strict=True)
    ]


def _checked_rows(output: object, batch: ModelBatch) -> Sequence[Sequence[float]]:
    # Exact types: an array or an awaitable is not touched, let alone awaited; its adapter converts it.
    if type(output) not in (list, tuple):
        raise MalformedOutput(f"expected a list or tuple of rows, got {type(output).__name__}")
    assert isinstance(output, list | tuple)
    if len(output) != batch.num_rows:
        raise MalformedOutput(f"expected {batch.num_rows} rows, got {len(output)}")
    for index, row in enumerate(output):
        if type(row) not in (list, tuple):
            raise MalformedOutput(f"row {index} is not a list or tuple but {type(row).__name__}")
        if len(row) != batch.width:
            raise MalformedOutput(f"row {index} has {len(row)} values, expected {batch.width}")
        for position, value in enumerate(row):
            if not _is_finite_number(value):
                raise MalformedOutput(f"row {index}, position {position} is not a finite number")
    return output


def _is_finite_number(value: object) -> bool:
    if type(value) is int:
        # An int beyond the largest float would overflow in whoever computes with it next.
        return abs(value) <= 2**1023
    return type(value) is float and math.isfinite(value)

"""Measured forwards at load, from which the cost model is fitted.

The largest batch that the budget allows runs first: it warms the device up, and memory that is too small shows at
start and not at noon. Then sizes of different shape run in rounds, so that a disturbance of a second does not fall on
one size alone; the median of each counts. A slow device gets smaller sizes instead of a longer start.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np

from batching.cost import ForwardSize, Measurement, padded_size, ragged_size
from deployments.wire import TokenIds

CALIBRATION_S = 3.0
"""About how long all of it may take, the first and largest batch not counted."""
NUM_ROUNDS = 3
MAX_ROWS = 256
"""Of one measured forward: more teach nothing new."""


class SomeForward(Protocol):
    """The part of a forward that is needed here."""

    def __call__(self, rows: Sequence[TokenIds], /) -> object: ...


def size_of(lengths: Sequence[int], *, is_padded: bool) -> ForwardSize:
    """What a forward of rows of these lengths processes."""
    return padded_size(len(lengths), max(lengths)) if is_padded else ragged_size(lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSpec:
    """What the measured forwards may hold."""

    max_tokens: int
    """The longest row."""
    token_budget: int
    vocab_size: int
    is_padded: bool


def calibrate(
    forward: SomeForward, spec: CalibrationSpec, *, timer: Callable[[], float] = time.perf_counter
) -> list[Measurement]:
    """Median durations of forwards between one short row and the whole budget, at least one of each size.

    Ends after NUM_ROUNDS or about CALIBRATION_S. Raises what the forward raises, out of memory for one.
    """
    draw = np.random.default_rng(0)

    def run(length: int, num_rows: int) -> float:
        rows = [draw.integers(0, spec.vocab_size, length).astype(np.int32) for _ in range(num_rows)]
        started = timer()
        forward(rows)
        return timer() - started

    started = timer()
    largest_s = run(spec.max_tokens, max(1, spec.token_budget // spec.max_tokens))
    # Seven sizes, together about three of the largest, in three rounds.
    scale = min(1.0, CALIBRATION_S / (9 * max(largest_s, 1e-9)))
    shapes = _shapes(spec.max_tokens, max(1, int(spec.token_budget * scale)))
    durations: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    for index in range(NUM_ROUNDS):
        for shape in shapes:
            durations[shape].append(run(*shape))
        if index and timer() - started > CALIBRATION_S:
            break
    return [
        Measurement(
            size=size_of([length] * num_rows, is_padded=spec.is_padded), duration_s=median(durations[length, num_rows])
        )
        for length, num_rows in shapes
    ]


def _shapes(max_tokens: int, token_budget: int) -> list[tuple[int, int]]:
    """(length, rows): alone and together, short and long, a little and all of the budget; no two alike."""
    short, middle = min(8, max_tokens), max(1, min(max_tokens, 40))
    longest = min(max_tokens, token_budget)
    shapes = [
        (short, 1),
        (longest, 1),
        (short, token_budget // (4 * short)),
        (middle, token_budget // (2 * middle)),
        (middle, token_budget // middle),
        (longest, token_budget // (2 * longest)),
        (longest, token_budget // longest),
    ]
    return list(dict.fromkeys((length, min(max(1, num_rows), MAX_ROWS)) for length, num_rows in shapes))

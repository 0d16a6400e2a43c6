"""Proof at load that a model gives a row the same vector whatever rows run beside it.

Some models never call the attention function they are told to use, raise nothing, and return wrong vectors for packed
rows. So random rows run alone through the model's ordinary attention first, then together as they would be served, and
a model whose values differ is not served in that layout.

Letters: B rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batching.packing import pack
from deployments.forward import PaddedForward, RaggedForward

# float32 differs by rounding only, about 1e-6 on every architecture that packs correctly (DESIGN.md, section 4).
_FLOAT32_TOLERANCE = 1e-5
# 16-bit values differ visibly with the order of a sum; their direction does not (field report BL-003).
_MIN_COSINE = 0.999
_SEED = 20
_ADVICE = "set layout: padded"
# What model code raises when it meets packed input that it cannot read.
_FORWARD_ERRORS = (ValueError, TypeError, RuntimeError, LookupError, AttributeError)


class SelfCheckFailed(Exception):
    """A row does not get the same finite values alone and beside others; says by how much, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The ids to draw from: below `num_ids`, without `special_ids` (a model may treat those as no text at all)."""

    num_ids: int
    special_ids: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Rows, and their values [B, dimension] when each runs alone through the model's ordinary attention."""

    rows: tuple[NDArray[np.int32], ...]
    alone: NDArray[np.float32]
    dtype: str


def sample_rows(vocabulary: Vocabulary, *, max_tokens: int) -> tuple[NDArray[np.int32], ...]:
    """Draw rows of 1 and of `max_tokens` tokens and lengths between, two of them equal; every row has a late id.

    The draw is seeded. The rows hold about 1.75 * max_tokens tokens in all. Raises SelfCheckFailed when the vocabulary
    holds special ids only.
    """
    generator = np.random.default_rng(_SEED)
    special_ids = np.fromiter(vocabulary.special_ids, dtype=np.int32)
    ids = np.setdiff1d(np.arange(vocabulary.num_ids, dtype=np.int32), special_ids)
    if not len(ids):
        raise SelfCheckFailed("the vocabulary holds no ordinary token, so no row can be checked")
    lengths = np.clip((3, max_tokens, 1, max_tokens // 4, 17, max_tokens // 2, 3), 1, max_tokens)
    rows = []
    for index, length in enumerate(lengths):
        row = generator.choice(ids, size=length).astype(np.int32)
        row[0] = ids[max(len(ids) - 1 - index, 0)]
        rows.append(row)
    return tuple(rows)


def take_sample(rows: Sequence[NDArray[np.int32]], forward: PaddedForward, *, dtype: str) -> Sample:
    """Run each row alone; the model's attention must still be its own.

    Raises SelfCheckFailed when a value is not finite: no layout can mend that.
    """
    alone = np.concatenate([forward([row]).values for row in rows])
    if not np.isfinite(alone).all():
        raise SelfCheckFailed(f"the model's values are not finite in {dtype}; choose another dtype or other weights")
    return Sample(rows=tuple(rows), alone=alone, dtype=dtype)


def check_padded(sample: Sample, forward: PaddedForward) -> float:
    """Return the largest difference between rows alone and in one rectangle, or raise SelfCheckFailed."""
    values = forward(sample.rows).values
    if not _agrees(values, sample):
        raise SelfCheckFailed(
            f"rows in a padded batch differ from the same rows alone by {_difference(values, sample):.3g} "
            f"({sample.dtype}): this model cannot be batched"
        )
    return _difference(values, sample)


def check_ragged(sample: Sample, forward: RaggedForward, *, num_layers: int) -> float:
    """Return the largest difference between rows alone and packed, in two orders, or raise SelfCheckFailed.

    Calls are counted, not modules: a model may run one attention module as each of its layers (ALBERT).
    """
    try:
        values = forward(sample.rows).values
        turned = forward.run_packed(pack(sample.rows[::-1]))
    except _FORWARD_ERRORS as error:
        raise SelfCheckFailed(f"the model cannot run packed rows ({error}); {_ADVICE}") from error
    difference = max(_difference(values, sample), _difference(turned.values[::-1], sample))
    if turned.attention_calls < num_layers:
        raise SelfCheckFailed(
            f"{num_layers - turned.attention_calls} of {num_layers} layers never called the registered attention, as "
            f"in MPNet-like models, and packed rows differ from the same rows alone by {difference:.3g}; {_ADVICE}"
        )
    if not (_agrees(values, sample) and _agrees(turned.values[::-1], sample)):
        raise SelfCheckFailed(
            f"packed rows differ from the same rows alone by {difference:.3g} ({sample.dtype}); {_ADVICE}"
        )
    return difference


def _difference(values: NDArray[np.float32], sample: Sample) -> float:
    """Return the largest absolute difference; NaN when a value is not finite."""
    return float(np.abs(values - sample.alone).max())


def _agrees(values: NDArray[np.float32], sample: Sample) -> bool:
    if not np.isfinite(values).all():
        return False
    if sample.dtype == "float32":
        largest = float(np.abs(sample.alone).max())
        return _difference(values, sample) <= _FLOAT32_TOLERANCE * max(1.0, largest)
    norms = np.linalg.norm(values, axis=1) * np.linalg.norm(sample.alone, axis=1)  # [B]
    return bool(np.all((values * sample.alone).sum(axis=1) >= _MIN_COSINE * norms))

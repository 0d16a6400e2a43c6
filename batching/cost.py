"""What a forward costs in seconds, known before it runs: overhead + per_token x positions + per_pair x pairs.

Positions are what the model processes, pairs are query and key: the sum of squared row lengths where rows lie end to
end, rows x width squared in a rectangle. The three numbers are fitted to measured forwards and then follow, slowly,
those that really run. Seconds of work are the one currency of admission, fair shares, deadlines and Retry-After.

Rules of this file: durations come from outside; no number is ever negative; a fit that explains too little says so and
counts positions only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import median

import numpy as np
from numpy.typing import NDArray

MAX_ERROR = 0.5
"""Median relative error above which the fit is not believed."""
MEMORY_FORWARDS = 200.0
"""How many forwards back the refinement looks, as an exponential memory; the calibration weighs as much."""
REFIT_EVERY = 8
"""Forwards between two fits: each takes about a tenth of a millisecond."""
SLOW_FACTOR = 5.0
"""A forward that takes this many times its predicted time is worth a line in the log."""
SLOW_LEAST_S = 0.1
"""Below this nothing is called slow: a scheduler's hiccup is no finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSize:
    """What one forward processes."""

    num_tokens: int
    """Positions, padding included."""
    num_pairs: int
    """Query-key pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One forward and how long it took."""

    size: ForwardSize
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of a forward on one device."""

    overhead_s: float
    """Of each forward, whatever it holds."""
    per_token_s: float
    per_pair_s: float
    error: float
    """Median relative error of the forwards it was fitted to, or has predicted since."""
    is_reliable: bool
    """False: lengths and overhead could not be told from noise, and only positions count."""

    def row_s(self, num_tokens: int) -> float:
        """What a row of `num_tokens` positions adds to a forward."""
        return self.per_token_s * num_tokens + self.per_pair_s * num_tokens * num_tokens

    def forward_s(self, size: ForwardSize) -> float:
        """A whole forward."""
        return self.overhead_s + self.per_token_s * size.num_tokens + self.per_pair_s * size.num_pairs


def ragged_size(lengths: Sequence[int]) -> ForwardSize:
    """Rows of these lengths, end to end."""
    return ForwardSize(num_tokens=sum(lengths), num_pairs=sum(length * length for length in lengths))


def padded_size(num_rows: int, width: int) -> ForwardSize:
    """A rectangle of rows."""
    return ForwardSize(num_tokens=num_rows * width, num_pairs=num_rows * width * width)


def is_slow(duration_s: float, predicted_s: float) -> bool:
    """Whether a forward took so much longer than predicted that somebody should know."""
    return duration_s > max(SLOW_FACTOR * predicted_s, predicted_s + SLOW_LEAST_S)


@dataclass(slots=True)
class CostEstimator:
    """The cost model in force: fitted to a calibration, refined by every forward that ran.

    Raises ValueError for a calibration without a measurement of positive duration.
    """

    calibration: Sequence[Measurement]
    _gram: NDArray[np.float64] = field(init=False)
    _moment: NDArray[np.float64] = field(init=False)
    _model: CostModel = field(init=False)
    _since_fit: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        usable = [measurement for measurement in self.calibration if measurement.duration_s > 0]
        if not usable:
            raise ValueError("calibration: no forward of positive duration")
        self._gram = np.zeros((3, 3))
        self._moment = np.zeros(3)
        for measurement in usable:
            self._accumulate(measurement, weight=MEMORY_FORWARDS / len(usable))
        fitted = _fitted(self._gram, self._moment, error=0.0)
        error = median(_relative_error(fitted, measurement) for measurement in usable)
        self._model = _fitted(self._gram, self._moment, error=error)

    @property
    def model(self) -> CostModel:
        """The model in force."""
        return self._model

    def record(self, measurement: Measurement) -> None:
        """Learn from a forward that ran; one of no duration teaches nothing."""
        if measurement.duration_s <= 0:
            return
        keep = 1 - 1 / MEMORY_FORWARDS
        # A stochastic median: one step up or down per forward, so that a stall of seconds moves it no further than
        # a stall of milliseconds.
        actual = _relative_error(self._model, measurement)
        step = 0.02 * max(self._model.error, 0.01)
        error = max(self._model.error + (step if actual > self._model.error else -step), 0.0)
        self._gram *= keep
        self._moment *= keep
        self._accumulate(measurement, weight=1.0)
        self._since_fit += 1
        if self._since_fit >= REFIT_EVERY:
            self._since_fit = 0
            self._model = _fitted(self._gram, self._moment, error=error)
        else:
            self._model = replace(self._model, error=error)

    def _accumulate(self, measurement: Measurement, *, weight: float) -> None:
        features = np.array([1.0, measurement.size.num_tokens, measurement.size.num_pairs])
        # Relative errors count, so that small forwards are predicted as well as large ones.
        scale = weight / measurement.duration_s**2
        self._gram += scale * np.outer(features, features)
        self._moment += scale * features * measurement.duration_s


def _fitted(gram: NDArray[np.float64], moment: NDArray[np.float64], *, error: float) -> CostModel:
    if error > MAX_ERROR:
        per_token_s = float(moment[1] / gram[1, 1])
        return CostModel(overhead_s=0.0, per_token_s=per_token_s, per_pair_s=0.0, error=error, is_reliable=False)
    overhead_s, per_token_s, per_pair_s = _non_negative_least_squares(gram, moment)
    return CostModel(
        overhead_s=overhead_s, per_token_s=per_token_s, per_pair_s=per_pair_s, error=error, is_reliable=True
    )


def _relative_error(model: CostModel, measurement: Measurement) -> float:
    return abs(model.forward_s(measurement.size) - measurement.duration_s) / measurement.duration_s


def _non_negative_least_squares(gram: NDArray[np.float64], moment: NDArray[np.float64]) -> tuple[float, float, float]:
    """The best of all solutions in which some of the three numbers are 0 and none is negative; positions always count.

    Seven subsets at most, so each is tried: exact, and nothing to tune.
    """
    scale = np.sqrt(np.diag(gram))
    scale[scale == 0] = 1.0
    normed, target = gram / np.outer(scale, scale), moment / scale
    best, best_loss = np.zeros(3), float("inf")
    for others in ((), *combinations((0, 2), 1), (0, 2)):
        chosen = sorted({1, *others})
        part = normed[np.ix_(chosen, chosen)]
        solution, _, rank, _ = np.linalg.lstsq(part, target[chosen], rcond=1e-9)
        if rank < len(chosen) or (solution < 0).any():
            continue
        loss = float(solution @ part @ solution - 2 * solution @ target[chosen])
        if loss < best_loss - 1e-12:
            best = np.zeros(3)
            best[chosen] = solution
            best_loss = loss
    overhead_s, per_token_s, per_pair_s = (best / scale).tolist()
    return overhead_s, per_token_s, per_pair_s

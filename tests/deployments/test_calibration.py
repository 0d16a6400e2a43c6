"""Measured forwards at load: which sizes, how long, what a slow or small device does."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from batching.cost import CostEstimator, padded_size, ragged_size
from batching.errors import OutOfMemory
from deployments.calibration import CALIBRATION_S, CalibrationSpec, calibrate, size_of


class TimedForward:
    """A device of known speed on a clock of its own."""

    def __init__(self, *, overhead_s: float = 0.01, token_s: float = 1e-4, memory: int = 10**9) -> None:
        self.now = 0.0
        self.forwards: list[list[int]] = []
        self.ids: set[int] = set()
        self._overhead_s = overhead_s
        self._token_s = token_s
        self._memory = memory

    def __call__(self, rows: Sequence[NDArray[np.int32]], /) -> None:
        """Take the time of the rows."""
        lengths = [len(row) for row in rows]
        self.forwards.append(lengths)
        self.ids.update(np.concatenate(rows).tolist())
        if sum(lengths) > self._memory:
            raise OutOfMemory(max(lengths))
        self.now += self._overhead_s + self._token_s * sum(lengths)

    def timer(self) -> float:
        """Seconds."""
        return self.now


def _spec(*, max_tokens: int = 256, token_budget: int = 2048, is_padded: bool = False) -> CalibrationSpec:
    return CalibrationSpec(max_tokens=max_tokens, token_budget=token_budget, vocab_size=100, is_padded=is_padded)


@pytest.mark.parametrize("max_tokens", [1, 3, 64, 256, 2048])
def test_the_device_is_found(max_tokens: int) -> None:
    """Overhead and time per token of a device without noise, whatever the longest row; ids are of the vocabulary."""
    device = TimedForward()
    model = CostEstimator(calibrate(device, _spec(max_tokens=max_tokens), timer=device.timer)).model
    assert model.forward_s(ragged_size([max_tokens])) == pytest.approx(0.01 + 1e-4 * max_tokens, rel=0.01)
    assert device.ids <= set(range(100))


def test_the_largest_batch_runs_first_and_none_is_larger() -> None:
    """What does not fit into memory shows at start."""
    device = TimedForward()
    calibrate(device, _spec(), timer=device.timer)
    assert device.forwards[0] == [256] * 8
    assert max(map(sum, device.forwards)) <= 2048
    with pytest.raises(OutOfMemory):
        calibrate(TimedForward(memory=2000), _spec(), timer=device.timer)


@pytest.mark.parametrize("token_s", [1e-6, 1e-4, 1e-3, 0.05])
def test_time_is_bounded(token_s: float) -> None:
    """A slow device measures smaller sizes: beside the first batch, it takes no longer than a fast one may."""
    device = TimedForward(overhead_s=0.0, token_s=token_s)
    calibrate(device, _spec(max_tokens=64), timer=device.timer)
    assert device.now - 2048 * token_s <= CALIBRATION_S * 2


def test_every_size_is_measured_once_at_least_and_none_twice() -> None:
    """Measurements are medians of one size each."""
    device = TimedForward()
    sizes = [measured.size for measured in calibrate(device, _spec(), timer=device.timer)]
    assert len(sizes) == len(set(sizes)) >= 6


def test_a_budget_of_one_row_is_enough() -> None:
    """A device that holds one row is measured with that row."""
    device = TimedForward()
    assert calibrate(device, _spec(max_tokens=8, token_budget=8), timer=device.timer)


def test_sizes_follow_the_layout() -> None:
    """The padded layout computes its rectangle."""
    assert size_of([10, 50], is_padded=False) == ragged_size([10, 50])
    assert size_of([10, 50], is_padded=True) == padded_size(2, 50)
    device = TimedForward()
    measured = calibrate(device, _spec(is_padded=True), timer=device.timer)
    assert padded_size(8, 256) in [one.size for one in measured]

"""Seconds of work: what is fitted, what noise does, what is followed."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.cost import (
    CostEstimator,
    CostModel,
    ForwardSize,
    Measurement,
    is_slow,
    padded_size,
    ragged_size,
)

SIZES = [ragged_size(lengths) for lengths in ([5], [256], [40] * 20, [256] * 8, [16] * 128, [8] * 32, [128] * 8)]


def _measured(
    sizes: list[ForwardSize], *, overhead_s: float, per_token_s: float, per_pair_s: float, noise: float = 0.0
) -> list[Measurement]:
    draw = random.Random(7)
    true = CostModel(overhead_s=overhead_s, per_token_s=per_token_s, per_pair_s=per_pair_s, error=0.0, is_reliable=True)
    return [
        Measurement(size=size, duration_s=true.forward_s(size) * (1 + draw.uniform(-noise, noise))) for size in sizes
    ]


def test_sizes_of_both_layouts() -> None:
    """Three rows end to end, and the same rows in a rectangle."""
    assert ragged_size([10, 50, 100]) == ForwardSize(num_tokens=160, num_pairs=100 + 2500 + 10_000)
    assert padded_size(3, 100) == ForwardSize(num_tokens=300, num_pairs=30_000)


@pytest.mark.parametrize(
    ("overhead_s", "per_token_s", "per_pair_s"),
    [
        pytest.param(0.008, 1.5e-4, 2e-8, id="a small encoder on two cores"),
        pytest.param(0.002, 1e-6, 1e-10, id="a GPU"),
        pytest.param(0.0, 1e-4, 0.0, id="tokens alone"),
    ],
)
def test_an_exact_machine_is_found(overhead_s: float, per_token_s: float, per_pair_s: float) -> None:
    """Without noise the three numbers come back."""
    model = CostEstimator(_measured(SIZES, overhead_s=overhead_s, per_token_s=per_token_s, per_pair_s=per_pair_s)).model
    assert model.overhead_s == pytest.approx(overhead_s, rel=1e-3, abs=1e-9)
    assert model.per_token_s == pytest.approx(per_token_s, rel=1e-3)
    assert model.per_pair_s == pytest.approx(per_pair_s, rel=1e-2, abs=1e-13)
    assert model.error < 1e-6
    assert model.is_reliable


def test_noise_is_reported_as_the_error() -> None:
    """Twenty percent of noise leaves a believable fit whose error says so."""
    measured = _measured(SIZES * 20, overhead_s=0.008, per_token_s=1.5e-4, per_pair_s=2e-8, noise=0.2)
    model = CostEstimator(measured).model
    assert model.is_reliable
    assert 0.05 < model.error < 0.2
    assert model.forward_s(ragged_size([40] * 50)) == pytest.approx(0.008 + 0.3 + 0.0016, rel=0.15)


def test_a_machine_without_rhyme_falls_back_to_tokens() -> None:
    """Durations that have nothing to do with size: only positions count, and the model says that it is not reliable."""
    durations = [0.1, 0.001, 3.0, 0.002, 0.9, 0.0001, 5.0]
    measured = [Measurement(size=size, duration_s=s) for size, s in zip(SIZES, durations, strict=True)]
    model = CostEstimator(measured).model
    assert not model.is_reliable
    assert (model.overhead_s, model.per_pair_s) == (0, 0)
    assert model.row_s(20) == pytest.approx(2 * model.row_s(10))
    assert model.row_s(10) > 0


@given(
    st.lists(
        st.builds(
            Measurement,
            size=st.lists(st.integers(1, 512), min_size=1, max_size=40).map(ragged_size),
            duration_s=st.floats(1e-6, 100),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_no_number_is_ever_negative(measured: list[Measurement]) -> None:
    """Whatever was measured, a longer row never costs less, and every forward costs something."""
    model = CostEstimator(measured).model
    assert min(model.overhead_s, model.per_pair_s, model.error) >= 0
    assert model.forward_s(ragged_size([512])) >= model.forward_s(ragged_size([1])) > 0


def test_it_follows_a_machine_that_became_slower() -> None:
    """Half the speed, noticed within a few hundred forwards and not at the first one."""
    estimator = CostEstimator(_measured(SIZES, overhead_s=0.008, per_token_s=1.5e-4, per_pair_s=0.0))
    size = ragged_size([40] * 50)
    before_s = estimator.model.forward_s(size)
    slower = _measured(SIZES, overhead_s=0.016, per_token_s=3e-4, per_pair_s=0.0)
    estimator.record(slower[0])
    assert estimator.model.forward_s(size) == pytest.approx(before_s)
    for index in range(1000):
        estimator.record(slower[index % len(slower)])
    assert estimator.model.forward_s(size) == pytest.approx(2 * before_s, rel=0.05)


def test_one_stall_moves_little() -> None:
    """A forward that took a hundred times its time is one of two hundred."""
    estimator = CostEstimator(_measured(SIZES, overhead_s=0.008, per_token_s=1.5e-4, per_pair_s=0.0))
    size = ragged_size([40] * 50)
    before_s = estimator.model.forward_s(size)
    estimator.record(Measurement(size=size, duration_s=100 * before_s))
    for _ in range(8):
        estimator.record(Measurement(size=size, duration_s=before_s))
    assert estimator.model.forward_s(size) == pytest.approx(before_s, rel=0.05)


def test_a_model_that_stays_wrong_stops_being_believed() -> None:
    """Errors above the limit, again and again, end in tokens; regular forwards bring the fit back."""
    estimator = CostEstimator(_measured(SIZES, overhead_s=0.008, per_token_s=1.5e-4, per_pair_s=0.0))
    draw = random.Random(1)
    for _ in range(3000):
        estimator.record(Measurement(size=draw.choice(SIZES), duration_s=10 ** draw.uniform(-4, 1)))
    assert not estimator.model.is_reliable
    for measurement in _measured(SIZES * 800, overhead_s=0.008, per_token_s=1.5e-4, per_pair_s=0.0):
        estimator.record(measurement)
    assert estimator.model.is_reliable


def test_forwards_of_no_duration_teach_nothing() -> None:
    """A clock with coarse ticks may say 0."""
    size = ragged_size([10])
    estimator = CostEstimator([Measurement(size=size, duration_s=0.01)])
    before = estimator.model
    estimator.record(Measurement(size=size, duration_s=0.0))
    assert estimator.model == before
    with pytest.raises(ValueError, match="calibration"):
        CostEstimator([Measurement(size=size, duration_s=0.0)])


@pytest.mark.parametrize(
    ("duration_s", "predicted_s", "slow"),
    [(0.05, 0.001, False), (0.2, 0.001, True), (0.4, 0.1, False), (0.6, 0.1, True)],
)
def test_slow_is_a_large_factor_and_a_noticeable_time(duration_s: float, predicted_s: float, slow: bool) -> None:
    """Both must hold."""
    assert is_slow(duration_s, predicted_s) is slow

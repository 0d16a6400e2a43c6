"""Numbers that could never work are refused when they are declared."""

import math
from typing import Any

import pytest

from batching.limits import BatchLimits, QueueLimits
from tests.fakes import batch_limits, queue_limits

BATCH_MINIMA = {
    "token_budget": 1,
    "max_rows": 1,
    "max_passed_over": 0,
    "max_concurrent_forwards": 1,
    "max_concurrent_per_group": 1,
}
QUEUE_MINIMA = dict.fromkeys(["max_queued_cost", "max_queued_rows", "max_queued_rows_per_group", "max_groups"], 1)


def _table(minima: dict[str, int]) -> list[Any]:
    return [pytest.param(name, minimum, id=name) for name, minimum in minima.items()]


@pytest.mark.parametrize(("name", "minimum"), _table(BATCH_MINIMA))
def test_batch_minimum_is_allowed(name: str, minimum: int) -> None:
    """Each limit may be at its minimum."""
    assert getattr(batch_limits(**{name: minimum}), name) == minimum


@pytest.mark.parametrize("bad", [lambda m: m - 1, float, bool, str], ids=["below", "float", "bool", "text"])
@pytest.mark.parametrize(("name", "minimum"), _table(BATCH_MINIMA))
def test_batch_limit_is_refused(name: str, minimum: int, bad: Any) -> None:
    """Below the minimum, or not exactly an int, is an error that starts with the field's name."""
    with pytest.raises(ValueError, match=f"^{name}: "):
        batch_limits(**{name: bad(minimum)})


@pytest.mark.parametrize("bad", [0, -1, 1.0, True, None], ids=["zero", "negative", "float", "bool", "none"])
@pytest.mark.parametrize("name", QUEUE_MINIMA)
def test_queue_limit_is_refused(name: str, bad: Any) -> None:
    """The same holds for limits on waiting."""
    with pytest.raises(ValueError, match=f"^{name}: "):
        queue_limits(**{name: bad})


@pytest.mark.parametrize("name", ["max_wait_s", "prepare_ahead_s"])
@pytest.mark.parametrize("wait_s", [-0.001, math.inf, math.nan, True], ids=["negative", "inf", "nan", "bool"])
def test_wait_is_refused(name: str, wait_s: float) -> None:
    """A wait must be a finite time."""
    with pytest.raises(ValueError, match=f"^{name}: "):
        batch_limits(**{name: wait_s})


@pytest.mark.parametrize("bound_s", [0.0, -1.0, math.nan], ids=["zero", "negative", "nan"])
def test_bound_on_work_is_refused(bound_s: float) -> None:
    """A bound that admits nothing would refuse everything; no bound is infinity."""
    with pytest.raises(ValueError, match=r"^max_work_s: "):
        batch_limits(max_work_s=bound_s)
    with pytest.raises(ValueError, match=r"^max_backlog_s: "):
        queue_limits(max_backlog_s=bound_s)


def test_all_limits_have_a_minimum() -> None:
    """A new field without a row in this file's tables is noticed."""
    assert {*BatchLimits.__slots__} == {
        *BATCH_MINIMA,
        "max_wait_s",
        "prepare_ahead_s",
        "max_work_s",
        "isolate_failures",
    }
    assert {*QueueLimits.__slots__} == {*QUEUE_MINIMA, "max_backlog_s"}

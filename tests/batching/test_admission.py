"""The door: what is refused, with which error, and how long to stay away."""

from typing import Any

import pytest

from batching.admission import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, DrainRate, admit
from batching.errors import GroupLimit, Overloaded, QueueFull, RequestTooLarge, TokenServeError
from batching.queue import GroupKey, PendingQueue
from tests.fakes import queue_limits, rows


def _admit(waiting: str, new: str, *, running: str = "", length: int = 10, **limits: Any) -> None:
    """Offer one row per letter of `new` to a queue with one row per letter of `waiting`; a letter is a group."""
    queue: PendingQueue[int] = PendingQueue()
    for row in rows([10] * len(waiting), groups=waiting or "-"):
        queue.add(row)
    keys = {GroupKey(group, "rev-1", 0) for group in running}
    admit(rows([length] * len(new), groups=new), queue, queue_limits(**limits), running=keys, retry_after_s=3.0)


@pytest.mark.parametrize(
    ("case", "limits"),
    [
        pytest.param({"waiting": "aa", "new": "a"}, {"max_queued_cost": 30}, id="cost-exact"),
        pytest.param({"waiting": "aa", "new": "a"}, {"max_queued_rows": 3}, id="rows-exact"),
        pytest.param({"waiting": "aab", "new": "a"}, {"max_queued_rows_per_group": 3}, id="group-rows-exact"),
        pytest.param({"waiting": "a", "new": "b"}, {"max_groups": 2}, id="groups-exact"),
        pytest.param({"waiting": "a", "new": "a", "running": "b"}, {"max_groups": 2}, id="known-waiting-group"),
        pytest.param({"waiting": "a", "new": "b", "running": "b"}, {"max_groups": 2}, id="known-running-group"),
        pytest.param({"waiting": "abc", "new": "a"}, {"max_groups": 2}, id="limit-lowered-below-live-groups"),
        pytest.param({"waiting": "", "new": "aaa"}, {"max_queued_rows": 3, "max_queued_cost": 30}, id="empty-queue"),
    ],
)
def test_at_the_limit_is_admitted(case: dict[str, str], limits: dict[str, int]) -> None:
    """What just fits, and what belongs to a live group, gets in."""
    _admit(**case, **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "limits", "expected"),
    [
        pytest.param({"waiting": "aa", "new": "a"}, {"max_queued_cost": 29}, Overloaded(3.0), id="cost"),
        pytest.param({"waiting": "aa", "new": "a"}, {"max_queued_rows": 2}, Overloaded(3.0), id="rows"),
        pytest.param({"waiting": "aab", "new": "a"}, {"max_queued_rows_per_group": 2}, QueueFull(2, 3.0), id="group"),
        pytest.param(
            {"waiting": "a", "new": "bb"},
            {"max_queued_rows_per_group": 1},
            RequestTooLarge("inputs", "rows of one group", 2, 1),
            id="group-rows-never-fit",
        ),
        pytest.param({"waiting": "a", "new": "bc"}, {"max_groups": 2}, GroupLimit(2, 3.0), id="one-group-too-many"),
        pytest.param(
            {"waiting": "a", "new": "b", "running": "c"}, {"max_groups": 2}, GroupLimit(2, 3.0), id="running-counts"
        ),
        pytest.param(
            {"waiting": "", "new": "abc"},
            {"max_groups": 2},
            RequestTooLarge("inputs", "groups", 3, 2),
            id="groups-never",
        ),
        pytest.param(
            {"waiting": "", "new": "aaa"},
            {"max_queued_cost": 29},
            RequestTooLarge("inputs", "tokens of cost", 30, 29),
            id="cost-never-fits",
        ),
        pytest.param(
            {"waiting": "a", "new": "aaa"},
            {"max_queued_rows": 2},
            RequestTooLarge("inputs", "rows", 3, 2),
            id="rows-never-fit",
        ),
    ],
)
def test_above_the_limit_is_refused(case: dict[str, str], limits: dict[str, int], expected: TokenServeError) -> None:
    """One above each limit is refused, with facts; what an empty queue would refuse too is told apart."""
    with pytest.raises(TokenServeError) as caught:
        _admit(**case, **limits)  # type: ignore[arg-type]
    assert (type(caught.value), caught.value.args) == (type(expected), expected.args)


@pytest.mark.parametrize(
    ("samples", "backlog", "expected"),
    [
        pytest.param([], 10**9, MIN_RETRY_AFTER_S, id="nothing-measured"),
        pytest.param([(100, 1.0)], 500, 5.0, id="one-forward"),
        pytest.param([(100, 1.0), (200, 1.0)], 1100, 10.0, id="moving-average"),
        pytest.param([(100, 1.0)], 1, MIN_RETRY_AFTER_S, id="at-least-a-second"),
        pytest.param([(1, 1.0)], 10**6, MAX_RETRY_AFTER_S, id="at-most-a-minute"),
        pytest.param([(100, 0.0), (100, -1.0)], 500, MIN_RETRY_AFTER_S, id="no-duration"),
        pytest.param([(0, 1.0)], 500, MIN_RETRY_AFTER_S, id="no-cost"),
    ],
)
def test_retry_after(samples: list[tuple[int, float]], backlog: int, expected: float) -> None:
    """The estimate is backlog over measured rate, within two bounds."""
    rate = DrainRate()
    for cost, duration_s in samples:
        rate.record(cost, duration_s)
    assert rate.retry_after_s(backlog) == pytest.approx(expected)

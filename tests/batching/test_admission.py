"""The door: what is refused, with which error, and how long to stay away."""

from typing import Any

import pytest

from batching.admission import MAX_RETRY_AFTER_S, WAIT_MARGIN, Moment, PaceMeter, Promises, admit
from batching.errors import (
    DeadlineUnreachable,
    GroupLimit,
    Overloaded,
    QueueFull,
    RequestTooLarge,
    TenantOverShare,
    TokenServeError,
    WaitTooLong,
)
from batching.plan import Pace
from batching.queue import FairQueue
from batching.row import GroupKey
from tests.fakes import queue_limits, rows


def _admit(waiting: str, new: str, *, running: str = "", length: int = 10, **limits: Any) -> None:
    """Offer one row per letter of `new` to a queue with one row per letter of `waiting`; a letter is a group.

    All rows are of one tenant, ten tokens and one second on the clock each.
    """
    queue: FairQueue[int] = FairQueue()
    for row in rows([10] * len(waiting), groups=waiting or "-"):
        queue.add(row)
    keys = {GroupKey(group, "rev-1", 0) for group in running}
    moment = Moment(now=0.0, pace=Pace(wall_per_work=100.0), running=keys)
    admit(rows([length] * len(new), groups=new), queue, queue_limits(**limits), moment=moment, promises=Promises())


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
        pytest.param({"waiting": "aa", "new": "a"}, {"max_queued_cost": 29}, Overloaded(2.0), id="cost"),
        pytest.param({"waiting": "aa", "new": "a"}, {"max_queued_rows": 2}, Overloaded(2.0), id="rows"),
        pytest.param({"waiting": "aab", "new": "a"}, {"max_queued_rows_per_group": 2}, QueueFull(2, 3.0), id="group"),
        pytest.param(
            {"waiting": "a", "new": "bb"},
            {"max_queued_rows_per_group": 1},
            RequestTooLarge("inputs", "rows of one group", 2, 1),
            id="group-rows-never-fit",
        ),
        pytest.param({"waiting": "a", "new": "bc"}, {"max_groups": 2}, GroupLimit(2, 1.0), id="one-group-too-many"),
        pytest.param(
            {"waiting": "a", "new": "b", "running": "c"}, {"max_groups": 2}, GroupLimit(2, 1.0), id="running-counts"
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


def _offer(
    waiting: dict[str, float],
    tenant: str,
    seconds: float,
    *,
    running_s: float = 0.0,
    weight: float = 1.0,
    max_backlog_s: float = 100.0,
    **changes: Any,
) -> TokenServeError | None:
    """What the door says to `seconds` of work of `tenant` while others (and it) have so many seconds waiting."""
    queue: FairQueue[int] = FairQueue()
    for name, work_s in waiting.items():
        for row in rows([1], tenants=name[0], groups=name[0], work_s=work_s, priority=_priority(name)):
            queue.add(row)
    new = rows([1], tenants=tenant, groups=tenant, work_s=seconds, weight=weight, **changes)
    moment = Moment(now=0.0, pace=Pace(), running_s=running_s)
    try:
        admit(new, queue, queue_limits(max_backlog_s=max_backlog_s), moment=moment, promises=Promises())
    except TokenServeError as error:
        return error
    return None


def _priority(name: str) -> str:
    """Of a tenant written as one letter, or with an underscore: batch work."""
    return "batch" if name.endswith("_") else "interactive"


@pytest.mark.parametrize(
    ("waiting", "tenant", "seconds", "expected"),
    [
        pytest.param({}, "a", 100.0, None, id="an empty room takes all that fits"),
        pytest.param({}, "a", 101.0, RequestTooLarge, id="what never fits"),
        pytest.param({"a": 50.0}, "b", 50.0, None, id="a newcomer may use all that is free"),
        pytest.param({"a": 50.0}, "b", 51.0, Overloaded, id="and no more"),
        pytest.param({"a": 45.0}, "a", 10.0, None, id="a flood gets the half"),
        pytest.param({"a": 45.0}, "a", 11.0, TenantOverShare, id="and no more than the half"),
        pytest.param({"a": 30.0, "b": 34.0}, "a", 6.0, None, id="two floods get a third each"),
        pytest.param({"a": 30.0, "b": 34.0}, "a", 7.0, TenantOverShare, id="and no more than a third"),
        pytest.param({"a": 10.0, "b": 85.0}, "a", 16.0, Overloaded, id="others would be in the way too"),
    ],
)
def test_room_is_shared_so_that_a_newcomer_finds_some(
    waiting: dict[str, float], tenant: str, seconds: float, expected: type[TokenServeError] | None
) -> None:
    """100 s of room: a tenant with rows waiting gets as much as is left free; what refuses is named by its cause."""
    refusal = _offer(waiting, tenant, seconds)
    assert type(refusal) is (expected or type(None))


def test_room_follows_weight() -> None:
    """Three times the weight, three quarters of the room."""
    assert _offer({"a": 70.0}, "a", 5.0) is not None
    assert _offer({"a": 70.0}, "a", 5.0, weight=3.0) is None


@pytest.mark.parametrize(
    ("waiting", "changes", "expected"),
    [
        pytest.param({}, {"timeout_s": 1.0}, None, id="an idle replica"),
        pytest.param({}, {"timeout_s": 0.9}, DeadlineUnreachable, id="too long by itself"),
        pytest.param({}, {"timeout_s": 2.0, "running_s": 1.0}, None, id="after the running forward"),
        pytest.param({}, {"timeout_s": 1.9, "running_s": 1.0}, WaitTooLong, id="the running forward takes too long"),
        pytest.param({"a": 40.0}, {"timeout_s": 2.5}, None, id="a flood costs a newcomer its own share only"),
        pytest.param({"a": 40.0}, {"timeout_s": 2.3}, WaitTooLong, id="and that is needed"),
        pytest.param({"a": 0.5}, {"timeout_s": 1.8}, None, id="nor more than all that waits"),
        pytest.param({"b": 3.0}, {"timeout_s": 5.3}, None, id="its own backlog comes first"),
        pytest.param({"b": 3.0}, {"timeout_s": 5.1}, TenantOverShare, id="and is its own doing"),
        pytest.param({"a": 9.0, "b": 3.0}, {"timeout_s": 7.0}, TenantOverShare, id="also beside others"),
        pytest.param({"a": 9.0, "b": 3.0}, {"timeout_s": 1.5}, WaitTooLong, id="unless others alone are too much"),
        pytest.param({"a_": 90.0}, {"timeout_s": 1.2}, None, id="batch work takes a tenth"),
        pytest.param({"a_": 90.0}, {"timeout_s": 1.05}, WaitTooLong, id="and that counts"),
        pytest.param({"a": 90.0}, {"timeout_s": 13.7, "priority": "batch"}, None, id="a tenth is enough in time"),
        pytest.param({"a": 90.0}, {"timeout_s": 13.5, "priority": "batch"}, WaitTooLong, id="or not"),
    ],
)
def test_an_answer_that_would_come_too_late_is_refused_at_once(
    waiting: dict[str, float], changes: dict[str, Any], expected: type[TokenServeError] | None
) -> None:
    """One second of work of tenant b: too late by itself (504), by its own backlog (429), by everybody's (503).

    What is in the way counts WAIT_MARGIN times.
    """
    assert type(_offer(waiting, "b", 1.0, **changes)) is (expected or type(None))


@pytest.mark.parametrize(
    ("waiting", "tenant", "changes", "retry_after_s"),
    [
        pytest.param({"a": 60.0}, "b", {"seconds": 50.0}, 10.0, id="until the room is there"),
        pytest.param({"a": 60.0}, "a", {"seconds": 5.0}, 25.0, id="until enough of its own rows have left"),
        pytest.param(
            {"b": 3.0}, "b", {"seconds": 1.0, "timeout_s": 3.0}, 2.2 / WAIT_MARGIN, id="until the deadline can be met"
        ),
        pytest.param(
            {"a": 500.0},
            "b",
            {"seconds": 999.0, "max_backlog_s": 1000.0},
            MAX_RETRY_AFTER_S,
            id="never more than the bound",
        ),
    ],
)
def test_retry_after_is_when_there_will_be_room(
    waiting: dict[str, float], tenant: str, changes: dict[str, Any], retry_after_s: float
) -> None:
    """Worked out from the backlog and the drain rate of whoever is asked to wait."""
    refusal = _offer(waiting, tenant, **changes)
    assert getattr(refusal, "retry_after_s", None) == pytest.approx(retry_after_s)


def test_promises_are_kept_apart() -> None:
    """Callers refused in one moment are told different places; other tenants are not behind them."""
    promises = Promises()

    def place(tenant: str | None, now: float, wait_s: float) -> float:
        return promises.next_place_s(tenant, now=now, wait_s=wait_s, work_wall_s=2.0)

    assert [place("a", 10.0, 5.0) for _ in range(3)] == [5.0, 7.0, 9.0]
    assert place("b", 10.0, 5.0) == 5.0
    assert place(None, 10.0, 5.0) == 5.0
    assert place("a", 18.0, 1.0) == 3.0
    assert place("a", 100.0, 1.0) == 1.0


def test_kept_promises_are_forgotten() -> None:
    """What is remembered does not grow with tenants that came once, and an empty queue starts anew."""
    promises = Promises()
    for index in range(5000):
        promises.next_place_s(f"t{index}", now=index / 10, wait_s=1.0, work_wall_s=1.0)
    assert len(promises._free_from) <= 40
    promises.clear()
    assert promises.next_place_s("t4999", now=500.0, wait_s=1.0, work_wall_s=1.0) == 1.0


def test_nothing_is_always_admitted() -> None:
    """No rows, no question."""
    admit([], FairQueue(), queue_limits(), moment=Moment(now=0.0, pace=Pace()), promises=Promises())


@pytest.mark.parametrize(
    ("samples", "wall_per_work"),
    [
        pytest.param([], 1.0, id="nothing-measured"),
        pytest.param([(0.9, 2.0)], 2.0, id="the first counts whole"),
        pytest.param([(0.9, 2.0), (0.9, 4.0)], 2.2, id="moving-average"),
        pytest.param([(0.9, 0.0), (0.9, -1.0), (0.0, 1.0)], 1.0, id="nothing to learn"),
        pytest.param([(0.9, 60.0)], 5.0, id="BL-103: a stall counts as five times as slow"),
        pytest.param([(0.9, 0.001)], 0.2, id="and a flash as five times as fast"),
    ],
)
def test_pace_is_measured(samples: list[tuple[float, float]], wall_per_work: float) -> None:
    """Seconds on the clock per predicted second, 100 ms of overhead per forward included."""
    meter = PaceMeter(overhead_s=0.1)
    for work_s, duration_s in samples:
        meter.record(work_s, duration_s)
    assert meter.pace.wall_per_work == pytest.approx(wall_per_work)
    assert meter.pace.forward_s(0.9) == pytest.approx(wall_per_work)

"""Which rows run next, decided on a queue and a moment alone."""

from typing import Any

import pytest

from batching.plan import MAX_LOOK_PAST, Pace, Situation, ready_at, take_batch
from batching.queue import FairQueue
from batching.row import ORDER_HORIZON_S, GroupKey, Row
from tests.fakes import batch_limits, rows


def _queue(*added: Row[int]) -> FairQueue[int]:
    queue: FairQueue[int] = FairQueue()
    for row in added:
        queue.add(row)
    return queue


def _batches(queue: FairQueue[int], **limits: Any) -> list[list[int]]:
    """All batches of a queue that nothing joins, by payload."""
    batches = []
    while (plan := take_batch(queue, batch_limits(**limits), Situation(now=0.0))) is not None:
        batches.append([row.payload for row in plan.rows])
    return batches


def _taken(queue: FairQueue[int]) -> list[Row[int]]:
    """Rows in the order in which batches of one take them."""
    taken: list[Row[int]] = []
    while (plan := take_batch(queue, batch_limits(max_rows=1), Situation(now=0.0))) is not None:
        taken.extend(plan.rows)
    return taken


@pytest.mark.parametrize(
    ("lengths", "limits", "expected"),
    [
        pytest.param([10, 20, 30], {}, [[0, 1, 2]], id="all-fit"),
        pytest.param([50, 50, 1], {}, [[0, 1], [2]], id="budget-exact"),
        pytest.param([50, 51, 1], {}, [[0, 2], [1]], id="budget-one-above"),
        pytest.param([1, 1, 1], {"max_rows": 2}, [[0, 1], [2]], id="rows"),
        pytest.param([100, 100], {}, [[0], [1]], id="one-row-is-the-budget"),
        pytest.param([60, 60, 40, 40], {}, [[0, 2], [1, 3]], id="looks-past-a-misfit"),
        pytest.param([60, 60, 40, 40], {"max_passed_over": 0}, [[0], [1, 2], [3]], id="strict-order"),
        pytest.param([30, 90, 30, 30, 30, 30, 30], {}, [[0, 2, 3], [1], [4, 5, 6]], id="passed-once-then-barrier"),
        pytest.param([60, 60, 60, 40], {}, [[0, 3], [1], [2]], id="two-passed-together"),
    ],
)
def test_batches_of_one_group(lengths: list[int], limits: dict[str, int], expected: list[list[int]]) -> None:
    """Budget, row limit and look-past decide the batches of a burst."""
    assert _batches(_queue(*rows(lengths)), **limits) == expected


def test_groups_of_one_tenant_leave_by_their_oldest_rows() -> None:
    """One tenant's rows of several groups, such as padding ceilings, keep their order as far as groups allow."""
    assert _batches(_queue(*rows([1] * 7, groups="aaaabab")), max_rows=2) == [[0, 1], [2, 3], [4, 6], [5]]


def test_tenants_with_groups_of_their_own_take_turns() -> None:
    """A tenant with much work does not hold up the others."""
    queue = _queue(*rows([1] * 7, tenants="aaaabab", groups="aaaabab"))
    assert _batches(queue, max_rows=2) == [[0, 1], [4, 6], [2, 3], [5]]


@pytest.mark.parametrize(
    ("now", "lengths", "draining", "reason"),
    [
        pytest.param(0.0, [1], False, None, id="young"),
        pytest.param(0.9999, [1], False, None, id="just-before"),
        pytest.param(1.0, [1], False, "waited", id="at-the-wait"),
        pytest.param(0.0, [1], True, "drain", id="draining"),
        pytest.param(0.0, [1, 1, 1], False, "full", id="row-limit"),
        pytest.param(0.0, [50, 50], False, "full", id="budget"),
        pytest.param(0.0, [50, 51], False, "full", id="somebody-does-not-fit"),
    ],
)
def test_reason_for_leaving(now: float, lengths: list[int], draining: bool, reason: str | None) -> None:
    """A batch leaves when full, when its oldest row has waited, or when the batcher drains."""
    limits = batch_limits(max_rows=3, max_wait_s=1.0)
    plan = take_batch(_queue(*rows(lengths)), limits, Situation(now=now, draining=draining))
    assert (plan and plan.reason) == reason


def test_oldest_row_decides_when() -> None:
    """Later rows do not put off the moment of leaving."""
    first, second = rows([1, 1])
    second.arrived = 0.75
    assert ready_at(_queue(first, second), first.key, batch_limits(max_wait_s=1.0)) == 1.0


def test_busy_group_is_skipped_without_losing_its_turn() -> None:
    """The next free group runs, and the busy one is first again afterwards."""
    queue = _queue(*rows([1, 1, 1], groups="abb", tenants="abb"))
    busy = GroupKey("a", "rev-1", 0)
    plan = take_batch(queue, batch_limits(max_rows=1), Situation(now=0.0, busy={busy}))
    assert plan is not None
    assert plan.key.batch_group == "b"
    assert queue.lead(lambda key: True) == busy


def test_only_rows_with_a_later_row_in_the_batch_were_passed() -> None:
    """A row that waits behind the batch's end was not passed over."""
    queue = _queue(*rows([60, 60, 30, 50]))
    plan = take_batch(queue, batch_limits(), Situation(now=0.0))
    assert plan is not None
    assert [(row.payload, row.passed_over) for row in queue.rows(plan.key)] == [(1, 1), (3, 0)]
    assert (plan.cost, plan.work_s) == (90, pytest.approx(0.09))


def test_a_barrier_leads_its_tenant_whatever_arrives_later() -> None:
    """A row that was passed over once goes before later rows of its tenant with nearer deadlines."""
    first, large, small = rows([60, 60, 40], timeout_s=5.0)
    queue = _queue(first, large, small)
    assert take_batch(queue, batch_limits(), Situation(now=0.0)) is not None
    for row in rows([60, 60], timeout_s=1.0):
        queue.add(row)
    plan = take_batch(queue, batch_limits(), Situation(now=0.0))
    assert plan is not None
    assert plan.rows == (large,)


def test_nearest_deadline_first_within_a_tenant() -> None:
    """Order of arrival decides only between equal deadlines."""
    late, soon, soon_too = rows([1, 1, 1], timeout_s=8.0)
    soon.timeout_s = soon_too.timeout_s = 2.0
    assert [row.deadline for row in _taken(_queue(late, soon, soon_too))] == [2.0, 2.0, 8.0]


def test_overtaking_is_bounded_in_time() -> None:
    """A row without a deadline is passed by nearer deadlines only as long as they arrive within the horizon."""
    patient, early, late = rows([1, 1, 1])
    early.timeout_s = late.timeout_s = 2.0
    early.arrived, late.arrived = ORDER_HORIZON_S - 2.5, ORDER_HORIZON_S - 1.5
    assert _taken(_queue(patient, early, late)) == [early, patient, late]


@pytest.mark.parametrize(
    ("timeout_s", "taken"),
    [
        pytest.param(None, 3, id="no deadline"),
        pytest.param(1.0, 3, id="far"),
        pytest.param(0.06, 2, id="the third would make the first late"),
        pytest.param(0.04, 1, id="so would the second"),
        pytest.param(0.001, 1, id="late already: runs, the batcher takes out what cannot be answered"),
    ],
)
def test_a_row_that_joins_must_not_make_the_batch_late(timeout_s: float | None, taken: int) -> None:
    """Three rows of 20 ms, forwards of 10 ms overhead: 30, 50 and 70 ms, at a pace of one."""
    added = rows([20, 20, 20])
    added[0].timeout_s = timeout_s
    pace = Pace(overhead_s=0.01, wall_per_work=1.0)
    plan = take_batch(_queue(*added), batch_limits(), Situation(now=0.0, pace=pace))
    expected = {3: 0.07, 2: 0.05, 1: 0.03}[taken]
    assert plan is not None
    assert len(plan.rows) == taken
    assert pace.forward_s(plan.work_s) == pytest.approx(expected)


def test_work_of_a_forward_is_bounded_too() -> None:
    """Rows of 40 ms, at most 90 ms in a forward; one of 100 ms runs alone."""
    assert _batches(_queue(*rows([40, 40, 40])), max_work_s=0.09) == [[0, 1], [2]]
    assert _batches(_queue(*rows([100, 1])), max_work_s=0.09) == [[0], [1]]


@pytest.mark.parametrize(
    ("num_misfits", "taken"),
    [
        pytest.param(MAX_LOOK_PAST - 1, [0, MAX_LOOK_PAST], id="reached"),
        pytest.param(MAX_LOOK_PAST, [0], id="given-up"),
    ],
)
def test_search_past_misfits_is_bounded(num_misfits: int, taken: list[int]) -> None:
    """Work per batch is bounded when very many rows do not fit."""
    assert _batches(_queue(*rows([60, *[60] * num_misfits, 40])))[0] == taken


def test_empty_queue_has_no_batch() -> None:
    """Nothing waits, nothing runs."""
    assert take_batch(_queue(), batch_limits(), Situation(now=0.0, draining=True)) is None

"""Which rows run next, decided on a queue and a moment alone."""

from typing import Any

import pytest

from batching.plan import MAX_LOOK_PAST, next_batch, ready_at, take
from batching.queue import GroupKey, PendingQueue, Row
from tests.fakes import batch_limits, rows


def _queue(*added: Row[int]) -> PendingQueue[int]:
    queue: PendingQueue[int] = PendingQueue()
    for row in added:
        queue.add(row)
    return queue


def _batches(queue: PendingQueue[int], **limits: Any) -> list[list[int]]:
    """All batches of a queue that nothing joins, by payload."""
    batches = []
    while (plan := next_batch(queue, batch_limits(**limits), 0.0)) is not None:
        take(queue, plan)
        batches.append([row.payload for row in plan.rows])
    return batches


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


def test_groups_take_turns() -> None:
    """A group with much work does not hold up the others."""
    assert _batches(_queue(*rows([1] * 7, groups="aaaabab")), max_rows=2) == [[0, 1], [4, 6], [2, 3], [5]]


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
    plan = next_batch(_queue(*rows(lengths)), limits, now, draining=draining)
    assert (plan and plan.reason) == reason


def test_oldest_row_decides_when() -> None:
    """Later rows do not put off the moment of leaving."""
    first, second = rows([1, 1])
    second.arrived = 0.75
    assert ready_at(_queue(first, second), first.key, batch_limits(max_wait_s=1.0)) == 1.0


def test_busy_group_is_skipped_without_losing_its_turn() -> None:
    """The next free group runs, and the busy one is first again afterwards."""
    queue = _queue(*rows([1, 1], groups="ab"))
    busy = GroupKey("a", "rev-1", 0)
    plan = next_batch(queue, batch_limits(), 0.0, busy={busy})
    assert plan is not None
    take(queue, plan)
    assert (plan.key.batch_group, list(queue.groups())) == ("b", [busy])


def test_only_rows_with_a_later_row_in_the_batch_were_passed() -> None:
    """A row that waits behind the batch's end was not passed over."""
    queue = _queue(*rows([60, 60, 30, 50]))
    plan = next_batch(queue, batch_limits(), 0.0)
    assert plan is not None
    take(queue, plan)
    assert [(row.payload, row.passed_over) for row in queue.rows(plan.key)] == [(1, 1), (3, 0)]
    assert (plan.cost, [row.payload for row in plan.passed_over]) == (90, [1])


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
    assert next_batch(_queue(), batch_limits(), 0.0, draining=True) is None

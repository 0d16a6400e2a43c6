"""FairQueue against a naive list, and the few facts that a list cannot show."""

import gc
import weakref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batching.queue import FairQueue
from batching.row import PRIORITIES, GroupKey, Priority, Row
from tests.fakes import rows

_WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 7.0}


def _filled(*added: Row[int]) -> FairQueue[int]:
    queue: FairQueue[int] = FairQueue()
    for row in added:
        queue.add(row)
    return queue


def test_discarding_twice_is_harmless() -> None:
    """The second discard of a row says False and counts nothing."""
    first, second = rows([3, 4])
    queue = _filled(first, second)
    assert (queue.discard(first), queue.discard(first)) == (True, False)
    assert (queue.num_rows, queue.num_tokens, queue.cost) == (1, 4, 4)


def test_unknown_row_is_not_discarded() -> None:
    """A row of a group that does not exist is not waiting."""
    assert not _filled().discard(rows([1])[0])


def test_tokens_and_cost_are_counted_apart() -> None:
    """Real tokens and what they count against the budget have totals of their own."""
    queue = _filled(*rows([3, 4], cost=16))
    assert (queue.num_tokens, queue.cost) == (7, 32)


def test_equal_deadlines_keep_arrival_order() -> None:
    """Rows are never compared with each other."""
    added = rows([1, 2, 3], timeout_s=5.0)
    assert _filled(*added).expired(5.0) == added


def test_gone_rows_do_not_expire() -> None:
    """A row that left before its deadline is not late."""
    gone, late = rows([1, 2], timeout_s=5.0)
    queue = _filled(gone, late)
    queue.discard(gone)
    assert queue.expired(5.0) == [late]


def test_no_deadline_never_expires() -> None:
    """A row without a timeout waits for ever."""
    queue = _filled(*rows([1]))
    assert (queue.next_latest_start(), queue.expired(1e18)) == (None, [])


def test_payload_of_a_gone_row_is_not_kept() -> None:
    """BL-144: a row that left is forgotten although an earlier deadline still waits in front of its own."""
    waiting, gone = rows([1], timeout_s=1.0) + rows([1], timeout_s=9.0)

    class Ids(list[int]):
        """A payload that can be watched."""

    payload = Ids([1, 2, 3])
    gone.payload = payload  # type: ignore[assignment]
    queue = _filled(waiting, gone)
    queue.discard(gone)
    alive = weakref.ref(payload)
    del payload, gone
    gc.collect()
    assert alive() is None
    assert queue.next_latest_start() == 1.0


def test_deadlines_of_gone_rows_do_not_pile_up() -> None:
    """Bookkeeping stays in proportion to what waits, also when every row leaves long before its deadline."""
    queue = _filled(*rows([1], timeout_s=0.5))
    for row in rows([1] * 5000, timeout_s=3600.0):
        queue.add(row)
        queue.discard(row)
    assert len(queue._starts) < 500


class QueueMachine(RuleBasedStateMachine):
    """The queue and a list of groups, each a list of rows, always agree."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue()
        self.model: list[tuple[GroupKey, list[Row[int]]]] = []
        self.now = 0.0
        self.num_added = 0

    def _waiting(self) -> list[Row[int]]:
        return [row for _, members in self.model for row in members]

    def _remove(self, row: Row[int]) -> None:
        for _, members in self.model:
            if row in members:
                members.remove(row)
        self.model = [(key, members) for key, members in self.model if members]

    @rule(
        group=st.sampled_from("abc"),
        tenant=st.sampled_from("abcd"),
        priority=st.sampled_from(PRIORITIES),
        length=st.integers(1, 9),
        timeout_s=st.none() | st.integers(0, 5),
    )
    def add(self, group: str, tenant: str, priority: Priority, length: int, timeout_s: int | None) -> None:
        """A row arrives."""
        changes = {"timeout_s": timeout_s, "priority": priority, "weight": _WEIGHTS[tenant]}
        (row,) = rows([length], groups=group, tenants=tenant, cost=2 * length, **changes)
        row.arrived, row.payload = self.now, self.num_added
        self.num_added += 1
        self.queue.add(row)
        members = dict(self.model).get(row.key)
        if members is None:
            self.model.append((row.key, [row]))
        else:
            members.append(row)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        """A row leaves from wherever it stands."""
        row = data.draw(st.sampled_from(self._waiting()))
        assert self.queue.discard(row)
        assert not self.queue.discard(row)
        self._remove(row)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), taken=st.lists(st.booleans(), min_size=1, max_size=6))
    def pass_over_a_group(self, data: st.DataObject, taken: list[bool]) -> None:
        """Some rows of a group leave, others are shown and stay; nothing is shown twice, nothing unshown leaves."""
        key, members = data.draw(st.sampled_from(self.model))
        turn = self.queue.turn(key)
        shown = []
        for is_taken in taken:
            row = turn.next()
            if row is None:
                assert len(shown) == len(members)
                break
            shown.append((row, is_taken))
            if is_taken:
                turn.take()
            else:
                turn.skip()
        turn.finish()
        assert len({row for row, _ in shown}) == len(shown)
        for row, is_taken in shown:
            assert row in members
            if is_taken:
                self._remove(row)

    @rule(seconds=st.integers(0, 3))
    def expire(self, seconds: int) -> None:
        """Time passes, and whoever is late is taken out, as the batcher does."""
        self.now += seconds
        late = [row for row in self._waiting() if row.deadline is not None and row.deadline <= self.now]
        expired = self.queue.expired(self.now)
        assert expired == sorted(late, key=lambda row: (row.deadline, row.payload))
        for row in expired:
            assert self.queue.discard(row)
            self._remove(row)

    @invariant()
    def totals_agree(self) -> None:
        """Counts are those of the rows that wait."""
        waiting = self._waiting()
        assert self.queue.num_rows == len(waiting)
        assert self.queue.num_tokens == sum(row.num_tokens for row in waiting)
        assert self.queue.cost == sum(row.cost for row in waiting)
        assert self.queue.num_groups() == len(self.model)
        assert self.queue.work_s == pytest.approx(sum(row.work_s for row in waiting))
        for tenant in "abcd":
            own = [row for row in waiting if row.tenant == tenant]
            assert self.queue.tenant_work_s(tenant) == pytest.approx(sum(row.work_s for row in own))
        for key, members in self.model:
            assert self.queue.cost_of(key) == sum(row.cost for row in members)

    @invariant()
    def backlog_agrees(self) -> None:
        """What a newcomer would see is what waits."""
        for tenant, priority in (("a", "interactive"), ("b", "batch")):
            of = [row for row in self._waiting() if row.priority == priority]
            backlog = self.queue.backlog(tenant, priority)  # type: ignore[arg-type]
            assert backlog.own_s == pytest.approx(sum(row.work_s for row in of if row.tenant == tenant))
            assert backlog.same_priority_s == pytest.approx(sum(row.work_s for row in of))
            others = {row.tenant for row in of} - {tenant}
            assert backlog.weight == pytest.approx(sum(_WEIGHTS[other] for other in others))

    @invariant()
    def next_deadline_agrees(self) -> None:
        """The earliest deadline is that of a waiting row."""
        deadlines = [row.deadline for row in self._waiting() if row.deadline is not None]
        assert self.queue.next_latest_start() == min(deadlines, default=None)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)

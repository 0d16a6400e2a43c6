"""Failures that others reported of their batchers, as far as the core alone can show them (field-reports.md)."""

import asyncio
import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest

from batching.batcher import Batcher
from batching.errors import ForwardFailed, InputTooLong, RequestTooLarge
from batching.groups import GroupSettings
from batching.row import Row
from tests.fakes import (
    FakeClock,
    FakeForward,
    Harness,
    advance,
    batch_limits,
    in_loop,
    kinds,
    outcomes,
    queue_limits,
    requests,
    rows,
    settle,
)


def _batcher(forward: Any, clock: FakeClock | None = None, **limits: Any) -> Batcher[Any, Any]:
    return Batcher(forward, limits=batch_limits(**limits), queue_limits=queue_limits(), clock=clock or FakeClock())


@in_loop
async def test_bl_053_refused_row_leaves_no_trace() -> None:
    """BL-053: after 200 alternating too long and good rows all good ones are answered and the counters are 0."""
    batcher = _batcher(FakeForward())
    refused: list[RequestTooLarge] = []
    futures = []
    for _ in range(200):
        futures += batcher.submit(rows([100]))
        with pytest.raises(RequestTooLarge) as caught:
            batcher.submit(rows([101]))
        refused.append(caught.value)
    assert await outcomes(futures) == [0] * 200
    assert (len(refused), batcher.queued_rows, batcher.queued_tokens) == (200, 0, 0)


@in_loop
async def test_bl_094_raising_forward_ends_only_its_batch() -> None:
    """BL-094: of 32 rows in two batches, those beside the poison fail and the others are answered."""
    batcher = _batcher(FakeForward(fail_on={1: ValueError("poison")}), max_rows=16)
    results = await outcomes(batcher.submit(rows([1] * 32)))
    assert (results[:16], kinds(results[16:])) == (list(range(16)), ["ForwardFailed"] * 16)


@in_loop
async def test_bl_094_poison_row_fails_alone() -> None:
    """BL-094: when the forward tells its rows apart, 31 are answered and exactly one fails."""
    poison = ForwardFailed("poison")
    batcher = _batcher(FakeForward(outcome=lambda row: poison if row.payload == 7 else row.payload), max_rows=32)
    results = await outcomes(batcher.submit(rows([1] * 32)))
    assert results == [*range(7), poison, *range(8, 32)]


@in_loop
async def test_bl_095_bad_cost_reaches_only_its_caller() -> None:
    """BL-095: costs are known before anything is queued; a row without one raises at the door, the next is answered."""
    batcher = _batcher(FakeForward())
    (bad,) = rows([1])
    bad.cost = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        batcher.submit([bad])
    assert await outcomes(batcher.submit(rows([1]))) == [0]
    await batcher.close()
    assert (batcher.queued_rows, batcher.queued_tokens) == (0, 0)


@pytest.mark.parametrize("length", [999, 1000])
@in_loop
async def test_bl_105_row_up_to_the_budget_runs(length: int) -> None:
    """BL-105: a row that just fits into the budget runs alone."""
    assert await outcomes(_batcher(FakeForward(), token_budget=1000).submit(rows([length]))) == [0]


@pytest.mark.parametrize("length", [1001, 3000])
@in_loop
async def test_bl_105_row_above_the_budget_is_refused(length: int) -> None:
    """BL-105: a row above the budget is refused at once instead of waiting for ever."""
    forward = FakeForward()
    with pytest.raises(RequestTooLarge):
        _batcher(forward, token_budget=1000).submit(rows([length]))
    await settle()
    assert forward.calls == []


def test_bl_105_budget_below_the_longest_row_is_a_configuration_error() -> None:
    """BL-105: groups whose last bucket does not fit into a call cannot be made."""
    with pytest.raises(ValueError, match="ceilings: 1001 is above padded_token_budget 1000"):
        GroupSettings(ceilings=(16, 1001), padded_token_budget=1000)


@in_loop
async def test_bl_109_limit_counts_what_is_inside_requests() -> None:
    """BL-109: 20 requests of 64 rows each never make a forward above the row limit or the budget."""
    forward = FakeForward()
    batcher = _batcher(forward, token_budget=512, max_rows=32)
    futures = [future for _ in range(20) for future in batcher.submit(rows([20] * 64))]
    await outcomes(futures)
    assert {len(call) for call in forward.calls} == {25, 20 * 64 % 25}
    assert max(sum(row.cost for row in call) for call in forward.calls) == 500


@in_loop
async def test_bl_112_batch_is_cut_when_the_model_is_free() -> None:
    """BL-112: 20 rows 20 ms apart on a model of 300 ms make at most 4 calls."""
    clock, forward = FakeClock(), FakeForward(held=True)
    batcher = _batcher(forward, clock)
    futures = []
    for tick in range(60):
        if tick < 20:
            futures += batcher.submit(rows([1]))
        if tick % 15 == 14:
            forward.release()
        await advance(clock, (tick + 1) * 0.02)
    assert (await outcomes(futures), [len(call) for call in forward.calls]) == ([0] * 20, [1, 14, 5])


@in_loop
async def test_bl_117_caller_that_left_a_running_batch_is_skipped() -> None:
    """BL-117: the result of a cancelled row is dropped; its neighbours and the next batch are answered."""
    forward = FakeForward(held=True)
    batcher = _batcher(forward)
    gone, stays = batcher.submit(rows([1, 1]))
    await settle()
    gone.cancel()
    forward.release(2)
    assert (await outcomes([stays]), await outcomes(batcher.submit(rows([1])))) == ([1], [0])


@in_loop
async def test_bl_127_backlog_is_served_in_order_of_arrival() -> None:
    """BL-127: under a constant backlog nobody waits longer than first come, first served would make him."""
    forward = FakeForward(held=True)
    batcher = _batcher(forward, token_budget=64, max_rows=64)
    futures = []
    for number in range(80):
        for row in rows([1] * 64):
            row.payload = 64 * number + row.payload
            futures += batcher.submit([row])
        await settle()
        if number >= 30:
            forward.release()
    forward.release_all()
    await outcomes(futures)
    assert [payload for call in forward.payloads for payload in call] == list(range(64 * 80))


@in_loop
async def test_bl_128_misfit_keeps_its_place() -> None:
    """BL-128: in the reported burst the large second row runs in batch 2, all in at most 5 batches."""
    forward = FakeForward()
    await outcomes(_batcher(forward, max_rows=32).submit(rows([10, 95, *[10] * 24])))
    assert forward.payloads == [[0, *range(2, 11)], [1], [*range(11, 21)], [*range(21, 26)]]


@in_loop
async def test_bl_131_small_rows_pass_a_large_one_once() -> None:
    """BL-131: small rows use the room beside a large one that waits, which leaves next."""
    forward = FakeForward()
    await outcomes(_batcher(forward).submit(rows([60, 100, 20, 20, 20])))
    assert forward.payloads == [[0, 2, 3], [1], [4]]


@in_loop
async def test_bl_131_large_row_of_one_group_does_not_block_others() -> None:
    """BL-131: while a large row runs, rows of another group run beside it."""
    forward = FakeForward(held=True)
    batcher = _batcher(forward, max_concurrent_forwards=2)
    batcher.submit(rows([100, 1, 1], groups="abb"))
    await settle()
    assert forward.payloads == [[0], [1, 2]]
    await _finish(forward, batcher)


@in_loop
async def test_bl_136_small_request_does_not_wait_for_a_huge_one() -> None:
    """BL-136: each request is done with its own rows, although a huge one is still at work."""
    forward = FakeForward(held=True)
    batcher = _batcher(forward, max_rows=10)
    huge = batcher.submit(rows([1] * 600))
    small = batcher.submit(rows([1] * 2, groups="s", tenants="s"))
    forward.release(2)
    await settle()
    assert ([future.done() for future in small], sum(future.done() for future in huge)) == ([True, True], 10)
    await _finish(forward, batcher)


async def _finish(forward: FakeForward, batcher: Batcher[Any, Any]) -> None:
    forward.release_all()
    await batcher.close()


@dataclass(eq=False)
class Ids:
    """A payload that can be watched."""

    token_ids: list[int] = field(default_factory=lambda: [1, 2, 3])


def _watched(batcher: Batcher[Any, Any], *, timeout_s: float) -> tuple[weakref.ref[Ids], asyncio.Future[Any]]:
    (row,) = rows([1], timeout_s=timeout_s)
    payload = Ids()
    row.payload = payload  # type: ignore[assignment]
    (future,) = batcher.submit([row])
    return weakref.ref(payload), future


@dataclass
class Forgetful:
    """A forward that keeps nothing of its rows; call k fails if told so."""

    fails: bool = False

    async def __call__(self, batch: Any, /) -> list[Any]:
        """Run one batch."""
        if self.fails:
            raise ValueError("no")
        return [type(row).__name__ for row in batch]


@pytest.mark.parametrize(("fails", "ending"), [(False, "str"), (True, "ForwardFailed")], ids=["answered", "failed"])
@in_loop
async def test_bl_144_payload_is_dead_after_the_response(fails: bool, ending: str) -> None:
    """BL-144: once a row has ended nothing refers to its payload, although an earlier deadline still waits."""
    batcher = _batcher(Forgetful(fails), max_wait_s=5.0, max_rows=2)
    (waiting,) = batcher.submit(rows([1], timeout_s=1.0, groups="z"))
    first, future = _watched(batcher, timeout_s=9.0)
    second, neighbour = _watched(batcher, timeout_s=9.0)
    assert kinds(await outcomes([future, neighbour])) == [ending, ending]
    del future, neighbour  # a caller that keeps an error keeps its cause
    await settle()
    gc.collect()
    assert (first(), second(), waiting.done()) == (None, None, False)
    await batcher.close()


@in_loop
async def test_bl_144_payload_of_a_cancelled_row_is_dead() -> None:
    """BL-144: a row whose caller left while it waited is forgotten at once."""
    batcher = _batcher(Forgetful(), max_wait_s=5.0)
    batcher.submit(rows([1], timeout_s=1.0))
    payload, future = _watched(batcher, timeout_s=9.0)
    future.cancel()
    await settle()
    gc.collect()
    assert payload() is None
    await batcher.close()


@in_loop
async def test_bl_053_too_long_token_row_leaves_no_trace() -> None:
    """BL-053: at the token level, too, a row one token too long changes nothing for the next."""
    harness = Harness(max_groups=1, max_queued_rows_per_group=1)
    results = await harness.outcomes(requests([257], tenants="b") + requests([256], tenants="a"))
    assert (type(results[0]), results[1].values[-1], harness.model.shapes) == (InputTooLong, 510, [(1, 256)])


def test_row_does_not_show_its_payload() -> None:
    """The text form of a row, as a log line or an assertion would print it, holds no token."""
    row: Row[list[int]] = Row(key=rows([1])[0].key, tenant="a", num_tokens=1, cost=1, work_s=1.0, payload=[987654321])
    assert "987654321" not in repr(row)

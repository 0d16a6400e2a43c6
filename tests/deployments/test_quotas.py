"""Quotas: what is charged, refused and given back, and what a store that is down or slow does to requests."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from pydantic import ValidationError

from batching.errors import ForwardFailed, QuotaExceeded, QuotaStoreDown, RequestTooLarge, TokenServeError
from benchmarks.redis_server import RedisServer
from deployments import quotas as module
from deployments.quotas import (
    FIRST_RUN_S,
    LOG_INTERVAL_S,
    MIN_RETRY_S,
    STORE_RETRY_S,
    Charge,
    OnStoreFailure,
    Quota,
    QuotaKeeper,
    quota_of,
)
from deployments.token_bucket import BucketStore, MemoryBuckets, RedisBuckets, Shortage, Take
from tests.deployments.test_token_bucket import Clock

SLOW = 0.001
"""A rate that gives nothing back while a test runs."""
HANG_S = 20.0
"""Far more than any test needs."""


def quota(revisions: str = "*", **limits: Any) -> Quota:
    """One entry of the tenants file."""
    return Quota(revisions=revisions, **limits)


TOKENS = quota(tokens_per_s=SLOW, burst_tokens=100)


class FakeStore:
    """A store that works, holds still or fails, as a test says."""

    failures: tuple[type[Exception], ...] = (OSError,)

    def __init__(self) -> None:
        self.buckets = MemoryBuckets(Clock())
        self.is_broken = False
        self.asked = 0
        self.free = asyncio.Event()
        self.free.set()
        self.is_held = asyncio.Event()

    async def take(self, takes: Sequence[Take]) -> Shortage | None:
        """Count it when free, or raise."""
        self.asked += 1
        if not self.free.is_set():
            self.is_held.set()
        await self.free.wait()
        if self.is_broken:
            raise ConnectionError("redis://:secret@host refused")
        return await self.buckets.take(takes)

    async def close(self) -> None:
        """Nothing to let go of."""


def keeper(
    store: BucketStore | None = None,
    *,
    on_store_failure: OnStoreFailure = "open",
    timeout_s: float = HANG_S,
    clock: Clock | None = None,
) -> QuotaKeeper:
    """A keeper on a clock that stands still."""
    clock = clock or Clock()
    return QuotaKeeper(
        store or MemoryBuckets(clock), on_store_failure=on_store_failure, timeout_s=timeout_s, clock=clock
    )


async def charge(kept: QuotaKeeper, tokens: int, *quotas: Quota, revision: str = "minilm@v1") -> Charge:
    """Charge tenant acme, with 100 tokens at once if nothing else is said."""
    return await kept.charge("acme", revision, quotas or (TOKENS,), tokens=tokens, param="inputs")


async def outcome(kept: QuotaKeeper, tokens: int, *quotas: Quota, revision: str = "minilm@v1") -> str:
    """`counted`, `uncounted`, or the name of the error."""
    try:
        charged = await charge(kept, tokens, *quotas, revision=revision)
    except TokenServeError as error:
        return type(error).__name__
    return "counted" if charged.takes else "uncounted"


async def refusal(kept: QuotaKeeper, tokens: int, *quotas: Quota) -> TokenServeError:
    """The error that a charge ends in."""
    with pytest.raises(TokenServeError) as caught:
        await charge(kept, tokens, *quotas)
    return caught.value


class Counted:
    """`ray.serve.metrics`, as far as it is used here."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def Counter(self, name: str, **ignored: Any) -> "Counted":
        """Declare."""
        self.name = name
        return self

    def inc(self, value: float) -> None:
        """Grow."""
        self.values[self.name] = self.values.get(self.name, 0) + value


@pytest.fixture(autouse=True)
def failures(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Ray's metrics need a replica to be tagged with; these do not."""
    counted = Counted()
    monkeypatch.setattr(module, "metrics", counted)
    return counted.values


# ---- the setting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "path"),
    [
        pytest.param({"revisions": ""}, "revisions", id="empty glob"),
        pytest.param({"token_per_s": 5}, "token_per_s", id="unknown key"),
        pytest.param({"tokens_per_s": 0}, "tokens_per_s", id="rate of 0"),
        pytest.param({"tokens_per_s": "5"}, "tokens_per_s", id="rate as text"),
        pytest.param({"tokens_per_s": True}, "tokens_per_s", id="rate as truth"),
        pytest.param({"tokens_per_s": float("inf")}, "tokens_per_s", id="no end"),
        pytest.param({"tokens_per_s": 1e300}, "tokens_per_s", id="more than any arithmetic holds"),
        pytest.param({"tokens_per_s": 1e-300, "burst_tokens": 100}, "tokens_per_s", id="less than ever"),
        pytest.param({"requests_per_s": 1e300}, "requests_per_s", id="requests without end"),
        pytest.param({"requests_per_s": -1}, "requests_per_s", id="rate below 0"),
        pytest.param({"tokens_per_s": 5, "burst_tokens": 0}, "burst_tokens", id="burst of 0"),
        pytest.param({"tokens_per_s": 5, "burst_tokens": 7.5}, "burst_tokens", id="half a token"),
        pytest.param({"max_concurrent_tokens": 0}, "max_concurrent_tokens", id="nothing at once"),
    ],
)
def test_bad_quota_names_its_key(limits: dict[str, Any], path: str) -> None:
    """Each limit has a type and a range."""
    with pytest.raises(ValidationError) as caught:
        Quota(**{"revisions": "*", **limits})
    assert [item["loc"] for item in caught.value.errors()] == [(path,)]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"burst_tokens": 5}, "burst_tokens: means nothing without tokens_per_s"),
        ({"burst_requests": 5}, "burst_requests: means nothing without requests_per_s"),
        ({"tokens_per_s": 10, "burst_tokens": 9}, "burst_tokens: 9 is below one second's worth, 10"),
        ({"requests_per_s": 2.5, "burst_requests": 2}, "burst_requests: 2 is below one second's worth, 2.5"),
    ],
)
def test_bursts_fit_their_rates(limits: dict[str, Any], expected: str) -> None:
    """A burst belongs to a rate and holds a second's worth."""
    with pytest.raises(ValidationError, match=expected):
        quota(**limits)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        pytest.param({"tokens_per_s": 2000}, [(2000, 2000, 7)], id="a second's worth"),
        pytest.param({"tokens_per_s": 2000, "burst_tokens": 4000}, [(2000, 4000, 7)], id="as set"),
        pytest.param({"tokens_per_s": 0.5}, [(0.5, 1, 7)], id="one token at least"),
        pytest.param({"requests_per_s": 2.5}, [(2.5, 3, 1)], id="whole requests"),
        pytest.param({"requests_per_s": 2, "tokens_per_s": 9}, [(9, 9, 7), (2, 2, 1)], id="both"),
        pytest.param({"max_concurrent_tokens": 9}, [], id="neither"),
    ],
)
def test_what_a_request_takes(limits: dict[str, Any], expected: list[tuple[float, int, int]]) -> None:
    """Rate, burst and amount of each bucket for a request of 7 tokens."""
    takes = quota(**limits).takes("acme/minilm@v1", tokens=7)
    assert [(take.rate_per_s, take.burst, take.amount) for take in takes] == expected


def test_first_quota_that_covers_a_revision_applies() -> None:
    """As with routes: from top to bottom, and none is no limit."""
    entries = [quota("minilm@v1", tokens_per_s=1), quota("minilm@*", tokens_per_s=2)]
    found = [quota_of(entries, name) for name in ("minilm@v1", "minilm@v2", "other@v1")]
    assert found == [entries[0], entries[1], None]


# ---- charging --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "first", "expected"),
    [
        pytest.param(
            {"tokens_per_s": 10, "burst_tokens": 100}, 100, ("tokens_per_s", 10, pytest.approx(5.0)), id="tokens"
        ),
        pytest.param({"requests_per_s": 0.5}, 1, ("requests_per_s", 0.5, pytest.approx(2.0)), id="requests"),
        pytest.param(
            {"max_concurrent_tokens": 100}, 80, ("max_concurrent_tokens", 100, FIRST_RUN_S), id="concurrent tokens"
        ),
        pytest.param(
            {"tokens_per_s": 10, "burst_tokens": 100, "requests_per_s": 0.1},
            100,
            ("requests_per_s", 0.1, pytest.approx(10.0)),
            id="the one that takes longest",
        ),
    ],
)
def test_refusal_names_limit_and_time(limits: dict[str, Any], first: int, expected: tuple[str, float, float]) -> None:
    """A second request of 50 tokens is refused with the setting, its value, and when to come again."""

    async def run() -> TokenServeError:
        kept = keeper()
        await charge(kept, first, quota(**limits))
        return await refusal(kept, 50, quota(**limits))

    error = asyncio.run(run())
    assert isinstance(error, QuotaExceeded)
    assert (error.setting, error.limit, error.retry_after_s) == expected


@pytest.mark.parametrize(
    ("limits", "setting"),
    [
        pytest.param({"tokens_per_s": 100}, "burst_tokens of this tenant's quota", id="burst by default"),
        pytest.param({"tokens_per_s": 9, "burst_tokens": 100}, "burst_tokens of this tenant's quota", id="burst"),
        pytest.param({"max_concurrent_tokens": 100}, "max_concurrent_tokens of this tenant's quota", id="concurrent"),
    ],
)
def test_request_above_a_limit_by_itself_is_not_told_to_come_again(limits: dict[str, Any], setting: str) -> None:
    """One token above is too large for ever; exactly the limit passes."""

    async def run() -> tuple[TokenServeError, Charge]:
        kept = keeper()
        return await refusal(kept, 101, quota(**limits)), await charge(kept, 100, quota(**limits))

    error, _ = asyncio.run(run())
    assert isinstance(error, RequestTooLarge)
    assert error.args == ("inputs", "tokens", 101, 100, setting)


def test_revisions_and_tenants_are_counted_on_their_own() -> None:
    """One entry over several revisions is a quota for each, and other tenants have theirs."""

    async def run() -> list[str]:
        kept = keeper()
        results = [await outcome(kept, 100, revision=name) for name in ("minilm@v1", "minilm@v2", "minilm@v1")]
        await kept.charge("globex", "minilm@v1", (TOKENS,), tokens=100, param="inputs")
        return results

    assert asyncio.run(run()) == ["counted", "counted", "QuotaExceeded"]


def test_without_a_quota_nothing_is_held() -> None:
    """Tenants and revisions without a quota cost nothing."""

    async def run() -> tuple[str, int]:
        store = FakeStore()
        return await outcome(keeper(store), 10**9, quota("other@*", tokens_per_s=1)), store.asked

    assert asyncio.run(run()) == ("uncounted", 0)


# ---- giving back -----------------------------------------------------------------------------------------------------


def test_answered_request_stays_charged() -> None:
    """What ran is not given back."""

    async def run() -> str:
        kept = keeper()
        async with kept.charged("acme", "minilm@v1", (TOKENS,), tokens=100, param="inputs"):
            pass
        return await outcome(kept, 1)

    assert asyncio.run(run()) == "QuotaExceeded"


def test_failed_request_is_given_back() -> None:
    """A body that raises leaves all limits as they were, and its error goes on."""
    limits = quota(tokens_per_s=SLOW, burst_tokens=100, requests_per_s=SLOW, max_concurrent_tokens=100)

    async def run() -> str:
        kept = keeper()
        with pytest.raises(ForwardFailed):
            async with kept.charged("acme", "minilm@v1", (limits,), tokens=100, param="inputs"):
                raise ForwardFailed("ValueError")
        return await outcome(kept, 100, limits)

    assert asyncio.run(run()) == "counted"


def test_refund_counts_once() -> None:
    """A second refund of the same charge changes nothing."""

    async def run() -> list[str]:
        kept = keeper()
        first = await charge(kept, 50)
        await charge(kept, 50)
        await kept.refund(first)
        await kept.refund(first)
        return [await outcome(kept, tokens) for tokens in (51, 50, 1)]

    assert asyncio.run(run()) == ["QuotaExceeded", "counted", "QuotaExceeded"]


def test_cancelled_request_is_given_back() -> None:
    """A client that leaves while its request runs gets everything back."""

    async def run() -> str:
        kept = keeper()
        entered = asyncio.Event()

        async def request() -> None:
            async with kept.charged("acme", "minilm@v1", (TOKENS,), tokens=100, param="inputs"):
                entered.set()
                await asyncio.sleep(HANG_S)

        task = asyncio.create_task(request())
        await entered.wait()
        task.cancel()
        await asyncio.wait([task])
        return await outcome(kept, 100)

    assert asyncio.run(run()) == "counted"


def test_client_that_leaves_while_the_store_counts_gets_it_back() -> None:
    """What the store counts after the client has left is given back, and the concurrent part is free at once."""
    limits = quota(tokens_per_s=SLOW, burst_tokens=100, max_concurrent_tokens=100)

    async def run() -> tuple[str, int]:
        store = FakeStore()
        kept = keeper(store)
        store.free.clear()
        task = asyncio.create_task(charge(kept, 100, limits))
        await store.is_held.wait()
        task.cancel()
        await asyncio.wait([task])
        store.free.set()
        await kept.stop()
        return await outcome(kept, 100, limits), store.asked

    assert asyncio.run(run()) == ("counted", 3)


def test_client_that_leaves_twice_does_not_stop_the_refund() -> None:
    """A refund that has begun goes on when its caller is cancelled again."""

    async def run() -> str:
        store = FakeStore()
        kept = keeper(store)
        charged = await charge(kept, 100)
        store.free.clear()
        task = asyncio.create_task(kept.refund(charged))
        await store.is_held.wait()
        task.cancel()
        await asyncio.wait([task])
        store.free.set()
        await kept.stop()
        return await outcome(kept, 100)

    assert asyncio.run(run()) == "counted"


# ---- concurrent tokens -----------------------------------------------------------------------------------------------

AT_ONCE = quota(max_concurrent_tokens=100)


def test_finished_work_makes_room() -> None:
    """Room is what is not running; finishing twice makes it once; at the end nothing is remembered."""

    async def run() -> tuple[list[str], int]:
        kept = keeper()
        first, second = await charge(kept, 60, AT_ONCE), await charge(kept, 40, AT_ONCE)
        results = [await outcome(kept, 1, AT_ONCE)]
        kept.finish(first)
        kept.finish(first)
        results += [await outcome(kept, 61, AT_ONCE)]
        third = await charge(kept, 60, AT_ONCE)
        for each in (second, third):
            kept.finish(each)
        return results, len(kept._running)

    assert asyncio.run(run()) == (["QuotaExceeded", "QuotaExceeded"], 0)


def test_refusal_by_the_store_frees_the_concurrent_part() -> None:
    """A request that the rate refuses does not stand in the way of others."""
    limits = quota(tokens_per_s=SLOW, burst_tokens=100, max_concurrent_tokens=150)

    async def run() -> list[str]:
        kept = keeper()
        first = await charge(kept, 90, limits)
        results = [await outcome(kept, 60, limits), await outcome(kept, 10, limits)]
        kept.finish(first)
        return results

    assert asyncio.run(run()) == ["QuotaExceeded", "counted"]


@pytest.mark.parametrize(
    ("tokens", "now", "expected"),
    [
        pytest.param(10, 0.5, FIRST_RUN_S - 0.5, id="the oldest is enough"),
        pytest.param(50, 0.5, FIRST_RUN_S - 0.5, id="the oldest is just enough"),
        pytest.param(51, 0.5, FIRST_RUN_S, id="the one after it is needed"),
        pytest.param(10, 0.75, FIRST_RUN_S - 0.75, id="less as time passes"),
        pytest.param(10, 9.0, MIN_RETRY_S, id="never in the past"),
    ],
)
def test_time_until_running_work_makes_room(tokens: int, now: float, expected: float) -> None:
    """It is counted from the start of the work that has to end: here 50 tokens at 0 s and 50 more at 0.5 s."""
    clock = Clock()

    async def run() -> TokenServeError:
        kept = keeper(clock=clock)
        for clock.now in (0.0, 0.5):
            await charge(kept, 50, AT_ONCE)
        clock.now = now
        return await refusal(kept, tokens, AT_ONCE)

    error = asyncio.run(run())
    assert isinstance(error, QuotaExceeded)
    assert error.retry_after_s == pytest.approx(expected)


def test_work_is_expected_to_last_as_long_as_before() -> None:
    """After many runs of 3 s, room is promised in 3 s."""
    clock = Clock()

    async def run() -> TokenServeError:
        kept = keeper(clock=clock)
        await charge(kept, 1, AT_ONCE)
        for _ in range(50):
            ended = await charge(kept, 99, AT_ONCE)
            clock.now += 3.0
            kept.finish(ended)
        await charge(kept, 99, AT_ONCE)
        return await refusal(kept, 50, AT_ONCE)

    error = asyncio.run(run())
    assert isinstance(error, QuotaExceeded)
    assert error.retry_after_s == pytest.approx(3.0, abs=0.01)


# ---- a store that fails ----------------------------------------------------------------------------------------------

OUTCOMES: list[tuple[OnStoreFailure, str]] = [("open", "uncounted"), ("closed", "QuotaStoreDown")]
on_failure = pytest.mark.parametrize(("setting", "expected"), OUTCOMES)


@on_failure
def test_broken_store(
    setting: OnStoreFailure, expected: str, failures: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    """Requests run uncounted or are refused; the failure is counted and logged, without the text of the error."""

    async def run() -> str:
        store = FakeStore()
        store.is_broken = True
        return await outcome(keeper(store, on_store_failure=setting), 100)

    with caplog.at_level(logging.ERROR, logger="deployments"):
        assert asyncio.run(run()) == expected
    assert failures == {"raggedserve_quota_store_failures": 1}
    assert "quota store: ConnectionError" in caplog.text
    assert "secret" not in caplog.text


@on_failure
def test_slow_store(setting: OnStoreFailure, expected: str, failures: dict[str, float]) -> None:
    """A store that does not answer in time is one that failed."""

    async def run() -> str:
        store = FakeStore()
        store.free.clear()
        return await outcome(keeper(store, on_store_failure=setting, timeout_s=0.01), 100)

    assert asyncio.run(run()) == expected
    assert failures == {"raggedserve_quota_store_failures": 1}


def test_closed_store_says_when_to_come_again() -> None:
    """The refusal names the setting and the time after which the store is asked again."""

    async def run() -> TokenServeError:
        store = FakeStore()
        store.is_broken = True
        return await refusal(keeper(store, on_store_failure="closed"), 100)

    error = asyncio.run(run())
    assert isinstance(error, QuotaStoreDown)
    assert error.args == ("quota_on_store_failure", STORE_RETRY_S)


def test_failed_store_is_left_alone_for_a_while(failures: dict[str, float]) -> None:
    """Just before the time nobody asks it; at the time one does, and the others do not wait with that one."""
    clock = Clock()

    async def run() -> list[int]:
        store = FakeStore()
        kept = keeper(store, clock=clock)
        store.is_broken = True
        asked = []
        for moment in (0.0, STORE_RETRY_S - 0.001, STORE_RETRY_S):
            clock.now = 1000.0 + moment
            await asyncio.gather(*(outcome(kept, 1) for _ in range(5)))
            asked.append(store.asked)
        return asked

    assert asyncio.run(run()) == [1, 1, 2]
    assert failures == {"raggedserve_quota_store_failures": 15}


def test_store_that_works_again_counts_again() -> None:
    """The first answer ends the pause for everyone."""
    clock = Clock()

    async def run() -> list[str]:
        store = FakeStore()
        kept = keeper(store, clock=clock)
        store.is_broken = True
        results = [await outcome(kept, 60)]
        store.is_broken = False
        clock.now += STORE_RETRY_S
        return results + [await outcome(kept, tokens) for tokens in (60, 60, 40)]

    assert asyncio.run(run()) == ["uncounted", "counted", "QuotaExceeded", "counted"]


def test_dead_store_is_not_logged_for_every_request(caplog: pytest.LogCaptureFixture) -> None:
    """One line, and another one when the time has passed."""
    clock = Clock()

    async def run() -> list[int]:
        store = FakeStore()
        kept = keeper(store, clock=clock)
        store.is_broken = True
        lines = []
        for moment in (0.0, LOG_INTERVAL_S - STORE_RETRY_S, LOG_INTERVAL_S):
            clock.now = 1000.0 + moment
            await outcome(kept, 1)
            lines.append(len(caplog.records))
        return lines

    with caplog.at_level(logging.ERROR, logger="deployments"):
        assert asyncio.run(run()) == [1, 1, 2]


def test_refund_to_a_broken_store_is_no_error() -> None:
    """A request that failed ends in its own error, whatever the store does."""

    async def run() -> None:
        store = FakeStore()
        kept = keeper(store)
        async with kept.charged("acme", "minilm@v1", (TOKENS,), tokens=100, param="inputs"):
            store.is_broken = True
            raise ForwardFailed("ValueError")

    with pytest.raises(ForwardFailed):
        asyncio.run(run())


# ---- Redis -----------------------------------------------------------------------------------------------------------


async def with_keepers(server: RedisServer, stack: AsyncExitStack, number: int, **more: Any) -> list[QuotaKeeper]:
    """Keepers on one Redis, stopped with the stack."""
    kept = [keeper(RedisBuckets(server.uri), **more) for _ in range(number)]
    for each in kept:
        stack.push_async_callback(each.stop)
    return kept


def test_keepers_share_a_redis(redis_server: RedisServer) -> None:
    """What one ingress replica admitted, the other does not, and what it gives back, the other may admit."""

    async def run() -> list[str]:
        async with AsyncExitStack() as stack:
            one, other = await with_keepers(redis_server, stack, 2)
            charged = await charge(one, 70)
            results = [await outcome(other, 40)]
            await one.refund(charged)
            return results + [await outcome(each, 50) for each in (other, one, other)]

    assert asyncio.run(run()) == ["QuotaExceeded", "counted", "counted", "QuotaExceeded"]


def test_crowd_does_not_overshoot_in_redis(redis_server: RedisServer) -> None:
    """Of 100 charges at once over two keepers, exactly those pass for which there is room."""

    async def run() -> list[str]:
        async with AsyncExitStack() as stack:
            kept = await with_keepers(redis_server, stack, 2)
            return await asyncio.gather(*(outcome(kept[index % 2], 7) for index in range(100)))

    results = asyncio.run(run())
    assert (results.count("counted"), results.count("QuotaExceeded")) == (14, 86)


def test_cancelled_crowd_leaves_nothing_in_redis(redis_server: RedisServer) -> None:
    """Whenever the clients leave, before, while or after Redis counts, the whole quota is there afterwards."""

    async def run() -> str:
        async with AsyncExitStack() as stack:
            (kept,) = await with_keepers(redis_server, stack, 1)

            async def request() -> None:
                async with kept.charged("acme", "minilm@v1", (TOKENS,), tokens=5, param="inputs"):
                    await asyncio.sleep(HANG_S)

            tasks = [asyncio.create_task(request()) for _ in range(60)]
            for task in tasks:
                await asyncio.sleep(0)
                task.cancel()
            await asyncio.wait(tasks)
            await asyncio.gather(*kept._tasks)
            return await outcome(kept, 100)

    assert asyncio.run(run()) == "counted"


@on_failure
def test_redis_that_dies_and_comes_back(setting: OnStoreFailure, expected: str, redis_server: RedisServer) -> None:
    """While it is gone the setting decides; when it is back, quotas count again, from full."""
    clock = Clock()

    async def run() -> list[str]:
        async with AsyncExitStack() as stack, asyncio.timeout(HANG_S):
            (kept,) = await with_keepers(redis_server, stack, 1, on_store_failure=setting, clock=clock)
            results = [await outcome(kept, 60)]
            redis_server.stop()
            results += [await outcome(kept, 60), await outcome(kept, 60)]
            redis_server.start()
            clock.now += STORE_RETRY_S
            return [*results, await outcome(kept, 60), await outcome(kept, 60)]

    assert asyncio.run(run()) == ["counted", expected, expected, "counted", "QuotaExceeded"]


@on_failure
def test_redis_that_hangs(setting: OnStoreFailure, expected: str, redis_server: RedisServer) -> None:
    """A Redis that takes the connection and says nothing costs the timeout once, also with a crowd."""

    async def run() -> list[str]:
        async with AsyncExitStack() as stack, asyncio.timeout(HANG_S / 2):
            (kept,) = await with_keepers(redis_server, stack, 1, on_store_failure=setting, timeout_s=0.1)
            redis_server.hold()
            return await asyncio.gather(*(outcome(kept, 1) for _ in range(50)))

    assert asyncio.run(run()) == [expected] * 50


def test_redis_that_refuses_us_is_down() -> None:
    """No server behind the address is a failure like any other."""

    async def run() -> str:
        kept = keeper(RedisBuckets("redis://127.0.0.1:1"))
        result = await outcome(kept, 1)
        await kept.stop()
        return result

    assert asyncio.run(run()) == "uncounted"

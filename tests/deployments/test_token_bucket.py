"""Buckets in memory and in a real Redis: what is admitted, when there is room, and what is given back."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from redis.asyncio import Redis

from benchmarks.redis_server import RedisServer
from deployments.token_bucket import (
    KEY_PREFIX,
    MIN_KEPT_S,
    BucketStore,
    MemoryBuckets,
    RedisBuckets,
    Shortage,
    Take,
    given_back,
    open_store,
)

HOUR = 3600.0


class Clock:
    """Monotonic seconds that pass when told."""

    now = 1000.0

    def __call__(self) -> float:
        """The time."""
        return self.now


def take(amount: int, *, key: str = "a", burst: int = 100, rate_per_s: float = 1.0) -> Take:
    """Out of a bucket of 100 that takes 100 s to fill: on a real clock, a test sees nothing of that."""
    return Take(key=key, rate_per_s=rate_per_s, burst=burst, amount=amount, setting="tokens_per_s")


@asynccontextmanager
async def opened(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[BucketStore]:
    """A store, empty."""
    store: BucketStore = MemoryBuckets(Clock())
    if kind == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        store = RedisBuckets(server.uri)
    yield store
    await store.close()


async def outcomes(store: BucketStore, *takes: Take) -> list[bool]:
    """Whether each take, one after the other, was admitted."""
    return [await store.take([each]) is None for each in takes]


both = pytest.mark.parametrize("kind", ["memory", "redis"])


@both
def test_burst_is_there_at_once_and_no_more(kind: str, request: pytest.FixtureRequest) -> None:
    """A full bucket gives exactly its burst, and then says when there is room."""

    async def run() -> tuple[list[bool], Shortage | None]:
        async with opened(kind, request) as store:
            return await outcomes(store, take(60), take(40)), await store.take([take(10)])

    admitted, shortage = asyncio.run(run())
    assert admitted == [True, True]
    assert shortage is not None
    assert shortage.index == 0
    assert shortage.wait_s == pytest.approx(10.0, abs=1.0)


@both
def test_refused_take_changes_nothing(kind: str, request: pytest.FixtureRequest) -> None:
    """However often more than there is was asked for, what there is can be had."""

    async def run() -> list[bool]:
        async with opened(kind, request) as store:
            return await outcomes(store, take(70), *[take(60)] * 50, take(30))

    assert asyncio.run(run()) == [True, *[False] * 50, True]


@both
@pytest.mark.parametrize("order", [1, -1], ids=["short one last", "short one first"])
def test_all_buckets_or_none(kind: str, order: int, request: pytest.FixtureRequest) -> None:
    """When one bucket has no room, the other keeps what it has; the shortage names the one that is short."""

    async def run() -> tuple[int, list[bool]]:
        async with opened(kind, request) as store:
            await store.take([take(100, key="b")])
            pair = [take(80, key="a"), take(1, key="b")][::order]
            shortage = await store.take(pair)
            assert shortage is not None
            return pair[shortage.index].amount, await outcomes(store, take(100, key="a"))

    assert asyncio.run(run()) == (1, [True])


@both
def test_longest_wait_is_told(kind: str, request: pytest.FixtureRequest) -> None:
    """Of two buckets without room, the one that takes longer counts."""

    async def run() -> Shortage | None:
        async with opened(kind, request) as store:
            await store.take([take(100, key="a"), take(100, key="b")])
            return await store.take([take(20, key="a"), take(50, key="b")])

    shortage = asyncio.run(run())
    assert shortage is not None
    assert shortage.index == 1
    assert shortage.wait_s == pytest.approx(50.0, abs=1.0)


@both
def test_what_is_given_back_can_be_taken_again(kind: str, request: pytest.FixtureRequest) -> None:
    """Exactly the amount comes back, also out of a bucket that was emptied by others."""

    async def run() -> list[bool]:
        async with opened(kind, request) as store:
            await store.take([take(60)])
            await store.take([take(40)])
            await store.take(given_back([take(40)]))
            return await outcomes(store, take(50), take(40), take(10))

    assert asyncio.run(run()) == [False, True, False]


@both
def test_no_bucket_gets_fuller_than_full(kind: str, request: pytest.FixtureRequest) -> None:
    """Giving back to a full bucket, or to one that is not there any more, adds nothing."""

    async def run() -> list[bool]:
        async with opened(kind, request) as store:
            await store.take(given_back([take(50)]))
            return await outcomes(store, take(100), take(10))

    assert asyncio.run(run()) == [True, False]


@both
def test_concurrent_takes_do_not_overshoot(kind: str, request: pytest.FixtureRequest) -> None:
    """Of 100 at the same time, exactly those are admitted for which there is room."""

    async def run() -> Sequence[Shortage | None]:
        async with opened(kind, request) as store:
            each = take(10, burst=500, rate_per_s=500 / HOUR)
            return await asyncio.gather(*(store.take([each]) for _ in range(100)))

    assert asyncio.run(run()).count(None) == 50


@pytest.mark.parametrize("burst", [2000, 4000], ids=["one second's worth", "two"])
def test_flood_gets_its_quota(burst: int) -> None:
    """Five times the quota for 60 s is admitted as the burst and the rate, within 2 % and never above."""
    clock = Clock()
    sizes = random.Random(0)

    async def run() -> int:
        store, admitted = MemoryBuckets(clock), 0
        for arrival in range(60 * 250):
            clock.now = 1000.0 + arrival / 250
            amount = sizes.randint(20, 60)
            if await store.take([take(amount, burst=burst, rate_per_s=2000.0)]) is None:
                admitted += amount
        return admitted

    assert 0.98 * (2000 * 60 + burst) <= asyncio.run(run()) <= 2000 * 60 + burst


def test_room_comes_when_it_was_told() -> None:
    """A millisecond before the time there is none, and at the time there is."""
    clock = Clock()

    async def run() -> list[bool]:
        store = MemoryBuckets(clock)
        await store.take([take(100)])
        shortage = await store.take([take(25)])
        assert shortage is not None
        started, results = clock.now, []
        for moment in (shortage.wait_s - 0.001, shortage.wait_s):
            clock.now = started + moment
            results += await outcomes(store, take(25))
        return results

    assert asyncio.run(run()) == [False, True]


@pytest.mark.parametrize("rate_per_s", [1 / 3, 0.7, 3, 7, 1e6 / 7], ids=str)
def test_odd_rates_give_the_whole_burst(rate_per_s: float) -> None:
    """Rounding never costs the last token of a burst, and never adds one."""

    async def run() -> list[bool]:
        store = MemoryBuckets(Clock())
        return await outcomes(store, *[take(1, burst=30, rate_per_s=rate_per_s)] * 31)

    assert asyncio.run(run()) == [*[True] * 30, False]


def test_redis_refills_by_its_own_clock(redis_server: RedisServer) -> None:
    """After the time that was told, a real Redis has room."""

    async def run() -> list[bool]:
        store = RedisBuckets(redis_server.uri)
        each = take(50, rate_per_s=200.0)
        results = await outcomes(store, each, each)
        shortage = await store.take([each])
        assert shortage is not None
        await asyncio.sleep(shortage.wait_s)
        results += await outcomes(store, each)
        await store.close()
        return results

    assert asyncio.run(run()) == [True, True, True]


def test_memory_forgets_buckets_that_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that came once leaves nothing behind."""
    clock = Clock()
    monkeypatch.setattr("limits.aio.storage.memory.time", SimpleNamespace(time=clock))

    async def run() -> list[int]:
        store, kept = MemoryBuckets(clock), []
        for tenant in range(20):
            await store.take([take(5, key=f"tenant-{tenant}")])
        for seconds in (5.0, MIN_KEPT_S):
            kept.append(len(store._storage.storage))
            clock.now += seconds
        await store.take([take(1)])
        await asyncio.sleep(0)  # the library clears in a task of its own
        return [*kept, len(store._storage.storage), len(store._storage.expirations), len(store._storage.locks)]

    assert asyncio.run(run()) == [20, 20, 1, 1, 1]


def test_redis_keeps_nothing_for_long_and_under_our_prefix(redis_server: RedisServer) -> None:
    """Every key has our prefix and ends when its bucket is full again."""

    async def run() -> dict[str, int]:
        store = RedisBuckets(redis_server.uri)
        await store.take([take(5, key="a"), take(90, key="b")])
        async with Redis.from_url(redis_server.uri, decode_responses=True) as client:
            found = {key: await client.pttl(key) for key in await client.keys("*")}
        await store.close()
        return found

    found = asyncio.run(run())
    assert found == {
        f"{KEY_PREFIX}:a": pytest.approx((5 + MIN_KEPT_S) * 1000, abs=1000),
        f"{KEY_PREFIX}:b": pytest.approx((90 + MIN_KEPT_S) * 1000, abs=1000),
    }


def test_more_callers_than_connections_wait(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowd is served over the connections there are."""
    monkeypatch.setattr("deployments.token_bucket.MAX_CONNECTIONS", 2)

    async def run() -> Sequence[Shortage | None]:
        store = RedisBuckets(redis_server.uri)
        results = await asyncio.gather(*(store.take([take(1)]) for _ in range(100)))
        await store.close()
        return results

    assert asyncio.run(run()).count(None) == 100


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the Redis client the gateway says what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"raggedserve\[redis\]"):
        open_store("redis://127.0.0.1:1")


def test_store_follows_the_uri() -> None:
    """Without a URI in memory, with one in Redis, to which nothing is said before the first take."""
    assert isinstance(open_store(None), MemoryBuckets)
    assert isinstance(open_store("redis://127.0.0.1:1"), RedisBuckets)

"""Token buckets in the storages of the `limits` library: a burst, then a steady rate; what was taken can be given back.

Rules of this file: a take of several buckets is all or nothing, and a refused one changes nothing; nothing is stored
for longer than the bucket takes to be full again.

The library's own strategies count windows, and none fits here. A fixed window counts refused hits too, and two bursts
meet at its edge. A moving window keeps one entry per token. Neither it nor the sliding counter can give back, and in
both a burst uses up the rate of its window instead of coming on top. So this is one more strategy beside them, made as
they are: a script that Redis runs as a whole, and the same in memory.
"""

import asyncio
import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.storage.redis.redispy import RedispyBridge

KEY_PREFIX = "raggedserve"
MAX_CONNECTIONS = 32
"""To Redis, per process; a call is a fraction of a millisecond, and further ones wait for a free connection."""
MIN_KEPT_S = 1.0
"""How much longer than needed a bucket is kept: clocks are coarse, and a bucket that is lost is a full one."""

TAKE_SCRIPT = """
-- KEYS: buckets. ARGV: rate per second, burst and amount of each. A negative amount gives back.
-- Returns the 1-based bucket that has no room for the longest time, and that time in seconds; 0 when all was taken.
-- The clock is that of Redis, so that the clocks of its users need not agree.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local levels, short, wait_s = {}, 0, 0
for i, key in ipairs(KEYS) do
    local rate, burst, amount = tonumber(ARGV[3 * i - 2]), tonumber(ARGV[3 * i - 1]), tonumber(ARGV[3 * i])
    local saved = redis.call('HMGET', key, 'level', 'at')
    local level = tonumber(saved[1] or 0)
    local drained = math.max(0, now - tonumber(saved[2] or now)) * rate / 1000000
    levels[i] = math.max(0, math.max(0, level - drained) + amount)
    local missing_s = (levels[i] - burst) / rate
    if amount > 0 and missing_s > wait_s then
        short, wait_s = i, missing_s
    end
end
if short > 0 then
    return {short, string.format('%.6f', wait_s)}
end
for i, key in ipairs(KEYS) do
    redis.call('HSET', key, 'level', string.format('%.17g', levels[i]), 'at', string.format('%.0f', now))
    redis.call('PEXPIRE', key, math.ceil((levels[i] / tonumber(ARGV[3 * i - 2]) + MIN_KEPT_S) * 1000))
end
return {0, '0'}
""".replace("MIN_KEPT_S", str(MIN_KEPT_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """`amount` out of the bucket `key`, which holds `burst` and is refilled with `rate_per_s`."""

    key: str
    rate_per_s: float
    burst: int
    amount: int
    """At most `burst`, else there is never room."""
    setting: str
    """What the operator calls the rate."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why nothing was taken: of the takes, `index` has to wait longest, for `wait_s`."""

    index: int
    wait_s: float


class BucketStore(Protocol):
    """Where the buckets are."""

    failures: tuple[type[Exception], ...]
    """What `take` raises when the store does not work."""

    async def take(self, takes: Sequence[Take]) -> Shortage | None:
        """Take from all buckets, or from none when one of them has no room."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


def given_back(takes: Sequence[Take]) -> list[Take]:
    """The takes that undo `takes`; there is always room for these."""
    return [replace(take, amount=-take.amount) for take in takes]


def open_store(uri: str | None) -> BucketStore:
    """Buckets in the Redis behind `uri`, or in this process. Raises ValueError where the extra `redis` is missing."""
    if uri is None:
        return MemoryBuckets()
    if importlib.util.find_spec("redis") is None:
        raise ValueError("quota_storage needs the extra `redis`: pip install 'raggedserve[redis]'")
    return RedisBuckets(uri)


class MemoryBuckets:
    """Buckets of this process. The storage holds, per bucket, the nanosecond at which it will be full again."""

    failures: tuple[type[Exception], ...] = ()

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._storage = MemoryStorage()
        self._lock = asyncio.Lock()

    async def take(self, takes: Sequence[Take]) -> Shortage | None:
        """Take from all buckets, or from none when one of them has no room."""
        async with self._lock:
            now = int(self._clock() * 1e9)
            full_at = [
                max(max(await self._storage.get(take.key), now) + int(take.amount * 1e9 / take.rate_per_s), now)
                for take in takes
            ]
            missing = [
                at - now - math.ceil(take.burst * 1e9 / take.rate_per_s) if take.amount > 0 else 0
                for take, at in zip(takes, full_at, strict=True)
            ]
            longest = max(range(len(takes)), key=missing.__getitem__)
            if missing[longest] > 0:
                return Shortage(longest, missing[longest] / 1e9)
            for take, at in zip(takes, full_at, strict=True):
                # The library sets the time to live with the first increment only, so each value is a first one.
                await self._storage.clear(take.key)
                await self._storage.incr(take.key, (at - now) / 1e9 + MIN_KEPT_S, amount=at)
            return None

    async def close(self) -> None:
        """Forget everything."""
        await self._storage.reset()


class RedisBuckets:
    """Buckets that all processes with the same Redis share."""

    def __init__(self, uri: str) -> None:
        # Comes with the extra `redis` only.
        from redis.asyncio import BlockingConnectionPool
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError

        self.failures: tuple[type[Exception], ...] = (RedisError, OSError)
        # One more try at once: a connection that Redis closed while it was idle says nothing about Redis.
        self._pool = BlockingConnectionPool.from_url(
            uri, max_connections=MAX_CONNECTIONS, timeout=None, retry=Retry(NoBackoff(), 1)
        )
        storage = RedisStorage(
            f"async+{uri}",
            implementation="redispy",
            key_prefix=KEY_PREFIX,
            connection_pool=self._pool,  # type: ignore[arg-type]  # documented, and missing in the annotation
        )
        assert isinstance(storage.bridge, RedispyBridge), "asked for above"
        self._prefixed = storage.bridge.prefixed_key
        self._take = storage.bridge.get_connection().register_script(TAKE_SCRIPT.encode())

    async def take(self, takes: Sequence[Take]) -> Shortage | None:
        """Take from all buckets, or from none when one of them has no room."""
        short, wait_s = await self._take(
            keys=[self._prefixed(take.key) for take in takes],
            args=[argument for take in takes for argument in (take.rate_per_s, take.burst, take.amount)],
        )
        return Shortage(int(short) - 1, float(wait_s)) if short else None

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.disconnect()

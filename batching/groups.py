"""Token-level batching for a synchronous Python model: groups of padded rows on the caller's thread pool.

    with ThreadPoolExecutor(max_workers=1) as pool:            # outlives the groups
        async with inference_groups(model, executor=pool, ...) as groups:
            prediction = await groups.process(TokenRequest("r1", "acme", "demo-v1", [1, 2, 3]))

The order of nesting is the order of ownership: model, then pool, then groups. The groups drain before they end and
never close the pool or the model; a model must live until its pool has joined, because a running call cannot be
interrupted.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass

from batching.batcher import Batcher
from batching.buckets import Buckets
from batching.forwards import Clock
from batching.limits import BatchLimits, QueueLimits
from batching.padding import ModelBatch, collate, unbatch
from batching.request import TokenPrediction, TokenRequest
from batching.row import GroupKey, Row

Model = Callable[[ModelBatch], object]
"""Called once per batch, in a pool thread; returns a list or tuple of rows of numbers (see `padding.unbatch`)."""

NOMINAL_TOKEN_S = 1e-6
"""Nothing is known of the model's speed; the batcher measures how far this is from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """Defaults are those of the published recipe for variable-length inference."""

    ceilings: tuple[int, ...] = (16, 64, 256)
    padded_token_budget: int = 256
    max_rows: int = 16
    max_wait_s: float = 0.01
    max_queued_rows_per_group: int = 64
    max_groups: int = 64
    max_concurrent_calls: int = 1
    """Over all groups; give the pool at least as many workers."""
    pad_id: int = 0

    def __post_init__(self) -> None:
        limit = Buckets(self.ceilings).limit
        if limit > self.batch_limits.token_budget:
            raise ValueError(f"ceilings: {limit} is above padded_token_budget {self.padded_token_budget}")
        _ = self.queue_limits  # checks itself

    @property
    def batch_limits(self) -> BatchLimits:
        """The part that governs one call."""
        return BatchLimits(
            token_budget=self.padded_token_budget,
            max_rows=self.max_rows,
            max_wait_s=self.max_wait_s,
            max_concurrent_forwards=self.max_concurrent_calls,
        )

    @property
    def queue_limits(self) -> QueueLimits:
        """The part that governs waiting: the groups' limits bound the total."""
        most_rows = self.max_groups * self.max_queued_rows_per_group
        return QueueLimits(
            max_queued_rows=most_rows,
            max_queued_cost=most_rows * max(self.ceilings),
            max_queued_rows_per_group=self.max_queued_rows_per_group,
            max_groups=self.max_groups,
        )


class InferenceGroups:
    """Rows of one (tenant, revision, ceiling) share calls; every row is charged its ceiling."""

    def __init__(
        self, model: Model, *, executor: Executor, settings: GroupSettings, clock: Clock | None = None
    ) -> None:
        self.call_shapes: Counter[tuple[int, int]] = Counter()
        """How often a call of (rows, padded width) was made; holds no payload."""
        self._model = model
        self._executor = executor
        self._buckets = Buckets(settings.ceilings)
        self._pad_id = settings.pad_id
        self._batcher: Batcher[TokenRequest, TokenPrediction] = Batcher(
            self._forward, limits=settings.batch_limits, queue_limits=settings.queue_limits, clock=clock
        )

    async def process(self, request: TokenRequest) -> TokenPrediction:
        """Answer one request. Raises InputTooLong before any group is touched, and what `Batcher.submit` raises."""
        ceiling = self._buckets.ceiling_of(len(request.token_ids))
        row = Row(
            key=GroupKey(batch_group=request.tenant, revision=request.revision, bucket=ceiling),
            tenant=request.tenant,
            num_tokens=len(request.token_ids),
            cost=ceiling,
            work_s=ceiling * NOMINAL_TOKEN_S,
            payload=request,
        )
        (future,) = self._batcher.submit([row])
        return await future

    async def close(self, timeout_s: float | None = None) -> None:
        """Drain. Raises TimeoutError without cancelling anything; may be called again."""
        await self._batcher.close(timeout_s)

    def abort(self) -> None:
        """End every waiting and running request in Draining now."""
        self._batcher.abort()

    async def _forward(self, rows: Sequence[Row[TokenRequest]]) -> list[TokenPrediction]:
        requests = [row.payload for row in rows]
        batch = collate(requests, pad_id=self._pad_id)
        self.call_shapes[batch.num_rows, batch.width] += 1
        output = await asyncio.get_running_loop().run_in_executor(self._executor, self._model, batch)
        return unbatch(requests, batch, output)


@asynccontextmanager
async def inference_groups(
    model: Model, *, executor: Executor, settings: GroupSettings | None = None, clock: Clock | None = None
) -> AsyncIterator[InferenceGroups]:
    """Open groups over `model`, drain them on the way out, also when the body raises."""
    groups = InferenceGroups(model, executor=executor, settings=settings or GroupSettings(), clock=clock)
    try:
        yield groups
    finally:
        await groups.close()

"""One replica of one bucket of one revision: rows in, through admission, queue and plan, one packed forward, rows out.

The batcher is the gate in front of `@serve.batch`: it holds rows until a forward may start and releases a finished plan
into the batched method in one turn of the loop. On its own, `@serve.batch` would close batches while the model is busy,
put a row that does not fit at the back, and die for good on an error in a size function.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray import serve

from batching.batcher import Batcher
from batching.buckets import Buckets
from batching.cost import CostEstimator, Measurement, is_slow
from batching.errors import DeviceLost, ForwardFailed, InputTooLong, TokenIdOutOfRange, TokenServeError
from batching.forwards import FinishedForward
from batching.isolation import BudgetGovernor
from batching.limits import BatchLimits
from batching.padding import MalformedOutput
from batching.row import GroupKey, Row
from deployments.calibration import size_of
from deployments.counters import PROBE_TENANT, ReplicaCounters
from deployments.logs import join_serve_logs
from deployments.replica_model import Model, ReplicaSettings, RowValue, default_token_budget, load
from deployments.settings import MAX_ROWS_PER_FORWARD, BucketSettings
from deployments.wire import CostStats, InferCall, InferReply, ReplicaStats, RevisionInfo, TokenIds

logger = logging.getLogger(__name__)

PROBE_FRESH_S = 2.0
"""A forward that succeeded this recently answers a readiness probe; otherwise the probe runs one."""
STOP_TIMEOUT_S = 30.0
MIN_WORK_S = 1e-9
"""Work is never 0, whatever was fitted: nobody runs for free."""


class ModelReplica:
    """A plain class; `serve_app.app` makes it a deployment."""

    def __init__(
        self,
        settings: ReplicaSettings,
        siblings: Sequence[object] = (),
        load: Callable[[ReplicaSettings], Model] = load,
    ) -> None:
        # `siblings` are handles of the other buckets: Ray deploys what the root deployment is bound to.
        join_serve_logs()
        self._settings = settings
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward")
        # In the thread that will run it, because OpenMP keeps a team of workers for each thread that calls it.
        self._model = self._pool.submit(load, settings).result()
        self._default_budget = default_token_budget(self._model.info.device)
        self._ceilings = Buckets(settings.ceilings) if settings.ceilings else None
        self._estimator = CostEstimator(self._model.calibration)
        self._counters = ReplicaCounters()
        self._last_success: float | None = None
        self._computed_tokens = 0  # of the forward that is finishing; read once by `_observe`
        self._is_device_lost = False
        self._run_batch = serve.batch(
            self._run_rows, max_batch_size=MAX_ROWS_PER_FORWARD, batch_wait_timeout_s=0, max_concurrent_batches=2
        )
        self._bucket_settings = BucketSettings()
        limits = self._batch_limits(self._bucket_settings)
        self._governor = BudgetGovernor(configured=limits.token_budget, floor=settings.max_tokens)
        self._batcher: Batcher[TokenIds, RowValue] = Batcher(
            self._forward, limits=limits, queue_limits=self._bucket_settings.queue_limits(), observe=self._observe
        )
        self._batcher.set_overhead(self._estimator.model.overhead_s)
        self._info = self._revision_info()
        self._fingerprint = sha256(repr(replace(self._info, created=0)).encode()).hexdigest()

    # ---- called by Ray -------------------------------------------------------------------------------------------

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take new limits while rows wait and run. Raises pydantic.ValidationError or ValueError and keeps the old."""
        settings = BucketSettings.model_validate(user_config)
        limits = self._batch_limits(settings)
        self._bucket_settings = settings
        self._governor.configured = limits.token_budget
        limits = replace(limits, token_budget=self._governor.budget)
        self._batcher.reconfigure(limits, settings.queue_limits(), batch_share=settings.batch_share)

    async def check_health(self) -> None:
        """Raise when no forward can end well any more: a dead batch task, a lost device, a forward that is stuck."""
        if self._is_device_lost:
            raise RuntimeError("the device of the model is lost")
        if self._governor.is_exhausted:
            raise RuntimeError("the device has run out of memory for forwards that fitted at load")
        if not await self._run_batch._is_batching_task_alive():
            raise RuntimeError("the batching task has ended; no further batch would run")
        running_s = self._batcher.oldest_forward_s()
        if running_s > self._bucket_settings.stuck_forward_s:
            raise RuntimeError(f"a forward has been running for {running_s:.0f} s")

    async def __del__(self) -> None:
        """Finish what was accepted. Ray calls this once no more requests are routed here."""
        if not hasattr(self, "_batcher"):
            return  # construction failed; its error is the one to see
        try:
            await self._batcher.close(STOP_TIMEOUT_S)
        except TimeoutError:
            self._batcher.abort()
        self._pool.shutdown(wait=False)

    # ---- called by the ingress -----------------------------------------------------------------------------------

    async def infer(self, call: InferCall) -> InferReply:
        """Run the rows of `call`; one outcome each, in order, or a refusal of all.

        Refused is what `Batcher.submit` refuses, and ids or lengths that the ingress should not have let through:
        nothing outside the vocabulary may reach an embedding table.
        """
        try:
            rows = self._rows(call)
            futures = self._batcher.submit(rows)
        except TokenServeError as error:
            if len(call.lengths):
                self._counters.refused(call.tenant, rows=len(call.lengths))
            return InferReply(values=np.zeros((0, self._model.info.dimension), dtype=np.float32), refusal=error)
        self._update_gauges()
        try:
            await asyncio.wait(futures)
        except asyncio.CancelledError:
            # The caller left, or its time is over: its rows must not run, and nobody gets what has been computed.
            for future in futures:
                future.cancel()
            self._counters.abandoned(call.tenant, rows=len(rows))
            raise
        finally:
            self._update_gauges()
        return self._reply(rows, futures)

    async def describe(self, known_fingerprint: str | None = None) -> tuple[str, RevisionInfo] | None:
        """What the ingress must know, with a fingerprint of it; None when the caller's fingerprint still holds."""
        return None if known_fingerprint == self._fingerprint else (self._fingerprint, self._info)

    async def probe(self, timeout_s: float) -> None:
        """Return when a real forward has just succeeded. Raises what the forward ended in otherwise."""
        now = time.monotonic()
        if self._last_success is not None and now - self._last_success < PROBE_FRESH_S:
            return
        call = InferCall(
            token_ids=np.zeros(1, dtype=np.int32),
            lengths=np.ones(1, dtype=np.int32),
            tenant=PROBE_TENANT,
            batch_group=PROBE_TENANT,
            timeout_s=timeout_s,
        )
        reply = await self.infer(call)
        for error in (*reply.errors.values(), reply.refusal):
            if error is not None:
                raise error

    async def stats(self) -> ReplicaStats:
        """Counters of this replica."""
        return self._counters.stats(
            queued_rows=self._batcher.queued_rows,
            queued_tokens=self._batcher.queued_tokens,
            backlog_s=self._batcher.backlog_s,
            token_budget=self._batcher.limits.token_budget,
            cost=CostStats(**asdict(self._estimator.model), wall_per_work=self._batcher.pace.wall_per_work),
        )

    # ---- rows ----------------------------------------------------------------------------------------------------

    def _rows(self, call: InferCall) -> list[Row[TokenIds]]:
        vocab_size = self._model.info.vocab_size
        if len(call.token_ids) and (int(call.token_ids.min()) < 0 or int(call.token_ids.max()) >= vocab_size):
            raise TokenIdOutOfRange("inputs", vocab_size)
        bounds = np.cumsum(call.lengths)
        if len(bounds) == 0 or int(call.lengths.min()) < 1 or int(bounds[-1]) != len(call.token_ids):
            raise ForwardFailed("lengths do not describe the token ids")
        return [self._row(call, token_ids) for token_ids in np.split(call.token_ids, bounds[:-1])]

    def _row(self, call: InferCall, token_ids: TokenIds) -> Row[TokenIds]:
        num_tokens = len(token_ids)
        if num_tokens > self._settings.max_tokens:
            raise InputTooLong("inputs", num_tokens, self._settings.max_tokens)
        ceiling = self._ceilings.ceiling_of(num_tokens, param="inputs") if self._ceilings else 0
        return Row(
            key=GroupKey(batch_group=call.batch_group, revision=self._settings.revision, bucket=ceiling),
            tenant=call.tenant,
            num_tokens=num_tokens,
            cost=ceiling or num_tokens,
            work_s=max(self._estimator.model.row_s(ceiling or num_tokens), MIN_WORK_S),
            payload=token_ids,
            weight=call.weight,
            priority=call.priority,
            timeout_s=call.timeout_s,
        )

    def _reply(self, rows: Sequence[Row[TokenIds]], futures: Sequence[asyncio.Future[RowValue]]) -> InferReply:
        values = np.zeros((len(rows), self._model.info.dimension), dtype=np.float32)
        errors: dict[int, TokenServeError] = {}
        computed_tokens = tokens = 0
        for index, (row, future) in enumerate(zip(rows, futures, strict=True)):
            error = future.exception()
            if error is None:
                values[index] = future.result().values
                computed_tokens += future.result().computed_tokens
                tokens += row.num_tokens
            else:
                assert isinstance(error, TokenServeError), "the batcher resolves with its own errors only"
                errors[index] = error
                self._counters.failed(row.tenant, error)
        if len(errors) < len(rows):
            self._counters.answered(rows[0].tenant, rows=len(rows) - len(errors), tokens=tokens)
        return InferReply(values=values, errors=errors, computed_tokens=computed_tokens)

    # ---- forwards ------------------------------------------------------------------------------------------------

    async def _forward(self, rows: Sequence[Row[TokenIds]]) -> list[RowValue | TokenServeError]:
        slots = [_Slot(row) for row in rows]
        try:
            # All puts of one turn are seen by the batching task together, so the plan stays one batch. Positional, as
            # `@serve.batch` counts on it.
            await asyncio.gather(*(self._run_batch(slot) for slot in slots))
            return [slot.taken_value() for slot in slots]
        finally:
            # `@serve.batch` keeps its last batch until the next one comes: nothing of a request may stay in it.
            for slot in slots:
                slot.row = slot.value = None

    async def _run_rows(self, slots: list["_Slot"]) -> list[None]:
        rows = [slot.row for slot in slots if slot.row is not None]
        if len(rows) != len(slots) or len({row.key for row in rows}) != 1:
            raise ForwardFailed("rows of several groups or of an abandoned batch met in one batch")
        payloads = [row.payload for row in rows]
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._pool, self._model.forward, payloads)
        except DeviceLost:
            self._is_device_lost = True
            raise
        self._computed_tokens = result.computed_tokens
        _check_output(result.values, num_rows=len(rows), width=self._model.info.dimension)
        self._last_success = time.monotonic()
        for slot, row, values in zip(slots, rows, result.values, strict=True):
            share = row.num_tokens if self._ceilings is None else result.computed_tokens // len(rows)
            slot.value = RowValue(values=values, computed_tokens=share)
        return [None] * len(slots)

    def _observe(self, finished: FinishedForward[TokenIds]) -> None:
        computed_tokens, self._computed_tokens = self._computed_tokens, 0
        self._counters.forward(finished, computed_tokens=computed_tokens)
        if finished.out_of_memory_cost is not None:
            self._governor.out_of_memory(finished.out_of_memory_cost)
        elif finished.num_failed == 0:
            self._governor.succeeded()
            self._learn(finished)
        if self._batcher.limits.token_budget != self._governor.budget:
            logger.warning("token budget: %d, configured %d", self._governor.budget, self._governor.configured)
            self._batcher.set_token_budget(self._governor.budget)
        self._counters.cost(self._estimator.model)
        self._update_gauges()

    def _learn(self, finished: FinishedForward[TokenIds]) -> None:
        if finished.num_attempts > 1:
            return
        lengths = [row.num_tokens for row in finished.plan.rows]
        size = size_of(lengths, is_padded=self._ceilings is not None)
        self._estimator.record(Measurement(size=size, duration_s=finished.duration_s))
        self._batcher.set_overhead(self._estimator.model.overhead_s)
        if is_slow(finished.duration_s, finished.predicted_s):
            self._counters.slow_forward()
            logger.warning(
                "slow forward: %.3f s, predicted %.3f s, rows=%d cost=%d",
                finished.duration_s,
                finished.predicted_s,
                len(lengths),
                finished.plan.cost,
            )

    def _update_gauges(self) -> None:
        batcher = self._batcher
        self._counters.queued(rows=batcher.queued_rows, tokens=batcher.queued_tokens, backlog_s=batcher.backlog_s)

    # ---- settings ------------------------------------------------------------------------------------------------

    def _batch_limits(self, settings: BucketSettings) -> BatchLimits:
        return settings.batch_limits(
            max_tokens=self._settings.max_tokens,
            default_token_budget=self._default_budget,
            overhead_s=self._estimator.model.overhead_s,
        )

    def _revision_info(self) -> RevisionInfo:
        info = self._model.info
        return RevisionInfo(
            revision=self._settings.revision,
            task=info.task,
            layout=info.layout,
            dtype=info.dtype,
            attention_backend=info.attention_backend,
            dimension=info.dimension,
            supports_dimensions=info.supports_dimensions,
            vocab_size=info.vocab_size,
            buckets=self._settings.buckets,
            tokenizer_json=self._model.tokenizer_json,
            created=int(time.time()),
        )


@dataclass(slots=True, eq=False)
class _Slot:
    """A row on its way through `@serve.batch`, and what it got."""

    row: Row[TokenIds] | None
    value: RowValue | None = None

    def taken_value(self) -> RowValue:
        """What it got."""
        assert self.value is not None, "a batch that did not raise fills every slot"
        return self.value


def _check_output(values: NDArray[np.float32], *, num_rows: int, width: int) -> None:
    if values.shape != (num_rows, width):
        raise MalformedOutput(f"expected an array of shape {(num_rows, width)}, got {values.shape}")
    if not np.isfinite(values).all():
        raise MalformedOutput("a value is not finite")

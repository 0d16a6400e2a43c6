"""One replica of one bucket of one revision: rows in, through admission, queue and plan, one packed forward, rows out.

The batcher is the gate in front of `@serve.batch`: it holds rows until a forward may start and releases a finished plan
into the batched method in one turn of the loop. On its own, `@serve.batch` would close batches while the model is busy,
put a row that does not fit at the back, and die for good on an error in a size function.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from ray import serve

from batching.batcher import Batcher, FinishedForward
from batching.buckets import Buckets
from batching.errors import ForwardFailed, InputTooLong, TokenIdOutOfRange, TokenServeError
from batching.limits import BatchLimits
from batching.padding import MalformedOutput
from batching.queue import GroupKey, Row
from deployments.counters import PROBE_TENANT, ReplicaCounters
from deployments.logs import join_serve_logs
from deployments.settings import (
    DEFAULT_CPU_TOKEN_BUDGET,
    DEFAULT_GPU_TOKEN_BUDGET,
    MAX_ROWS_PER_FORWARD,
    BucketSettings,
    Dtype,
    Layout,
    Task,
)
from deployments.wire import BucketInfo, InferCall, InferReply, ReplicaStats, RevisionInfo

PROBE_FRESH_S = 2.0
"""A forward that succeeded this recently answers a readiness probe; otherwise the probe runs one."""
STOP_TIMEOUT_S = 30.0

TokenIds = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """Fixed for the life of a replica; a change restarts it. See `serve_app.config.RevisionArgs` for the meaning."""

    revision: str
    model: str
    task: Task
    layout: Layout
    dtype: Dtype
    device: str
    threads: int | None
    max_tokens: int
    """The longest row of this bucket."""
    ceilings: tuple[int, ...]
    """Padding ceilings of the padded layout; empty for ragged."""
    buckets: tuple[BucketInfo, ...]
    """All buckets of the revision, this one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowValue:
    """What one row got: `values` [width] float32 and the positions that the model processed for it."""

    values: NDArray[np.float32]
    computed_tokens: int


class ModelResult(Protocol):
    """What one forward gives."""

    @property
    def values(self) -> NDArray[np.float32]:
        """[B, width]."""

    @property
    def computed_tokens(self) -> int:
        """Positions processed for all rows, padding included."""


class Model(Protocol):
    """The part of `deployments.model.LoadedModel` that a replica uses."""

    @property
    def info(self) -> Any:
        """`deployments.model.ModelInfo`."""

    @property
    def tokenizer_json(self) -> str:
        """The tokenizer, without padding and truncation."""

    @property
    def forward(self) -> Callable[[Sequence[TokenIds]], ModelResult]:
        """Runs the model once; called from a worker thread."""


def _load(settings: ReplicaSettings) -> Model:
    # OpenMP reads this once, when torch is imported. Its workers wait for each other dozens of times in a forward; by
    # default they spin, which takes the CPU from the other buckets, the ingress and Ray's proxy on the same machine:
    # 5,000 tokens/s of two buckets on two CPUs became 2,000. Sleeping costs nothing measurable alone.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Here and not above: the ingress and the build task import this module and must not pay for torch.
    from deployments.model import ModelSpec, load_model

    return load_model(
        ModelSpec(
            model=settings.model,
            task=settings.task,
            layout=settings.layout,
            dtype=settings.dtype,
            device=settings.device,
            threads=settings.threads,
            max_tokens=settings.buckets[-1].max_tokens,
        )
    )


class ModelReplica:
    """A plain class; `serve_app.app` makes it a deployment."""

    def __init__(
        self,
        settings: ReplicaSettings,
        siblings: Sequence[object] = (),
        load: Callable[[ReplicaSettings], Model] = _load,
    ) -> None:
        # `siblings` are handles of the other buckets: Ray deploys what the root deployment is bound to.
        join_serve_logs()
        self._settings = settings
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward")
        # In the thread that will run it, because OpenMP keeps a team of workers for each thread that calls it.
        self._model = self._pool.submit(load, settings).result()
        self._default_budget = (
            DEFAULT_GPU_TOKEN_BUDGET if self._model.info.device.startswith("cuda") else DEFAULT_CPU_TOKEN_BUDGET
        )
        self._ceilings = Buckets(settings.ceilings) if settings.ceilings else None
        self._counters = ReplicaCounters()
        self._last_success: float | None = None
        self._computed_tokens = 0  # of the forward that is finishing; read once by `_observe`
        self._run_batch = serve.batch(
            self._run_rows, max_batch_size=MAX_ROWS_PER_FORWARD, batch_wait_timeout_s=0, max_concurrent_batches=1
        )
        self._bucket_settings = BucketSettings()
        self._batcher: Batcher[TokenIds, RowValue] = Batcher(
            self._forward,
            limits=self._batch_limits(self._bucket_settings),
            queue_limits=self._bucket_settings.queue_limits(),
            observe=self._observe,
        )
        self._info = self._revision_info()
        self._fingerprint = sha256(repr(replace(self._info, created=0)).encode()).hexdigest()

    # ---- called by Ray -------------------------------------------------------------------------------------------

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take new limits while rows wait and run. Raises pydantic.ValidationError or ValueError and keeps the old."""
        settings = BucketSettings.model_validate(user_config)
        limits = self._batch_limits(settings)
        self._bucket_settings = settings
        self._batcher.reconfigure(limits, settings.queue_limits())

    async def check_health(self) -> None:
        """Raise when no forward can end any more: a dead batch task, or a forward stuck for `stuck_forward_s`."""
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
        return self._counters.stats(queued_rows=self._batcher.queued_rows, queued_tokens=self._batcher.queued_tokens)

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
            payload=token_ids,
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
        # All puts of one turn are seen by the batching task together, so the plan stays one batch. Positional, as
        # `@serve.batch` counts on it.
        return list(await asyncio.gather(*(self._run_batch(row) for row in rows)))

    async def _run_rows(self, rows: list[Row[TokenIds]]) -> list[RowValue]:
        if len({row.key for row in rows}) != 1:
            raise ForwardFailed("rows of several groups met in one batch")
        payloads = [row.payload for row in rows]
        result = await asyncio.get_running_loop().run_in_executor(self._pool, self._model.forward, payloads)
        self._computed_tokens = result.computed_tokens
        _check_output(result.values, num_rows=len(rows), width=self._model.info.dimension)
        self._last_success = time.monotonic()
        if self._ceilings is None:
            shares = [row.num_tokens for row in rows]
        else:
            shares = [result.computed_tokens // len(rows)] * len(rows)
        return [
            RowValue(values=values, computed_tokens=share) for values, share in zip(result.values, shares, strict=True)
        ]

    def _observe(self, finished: FinishedForward[TokenIds]) -> None:
        computed_tokens, self._computed_tokens = self._computed_tokens, 0
        self._counters.forward(finished, computed_tokens=computed_tokens)
        self._update_gauges()

    def _update_gauges(self) -> None:
        self._counters.queued(rows=self._batcher.queued_rows, tokens=self._batcher.queued_tokens)

    # ---- settings ------------------------------------------------------------------------------------------------

    def _batch_limits(self, settings: BucketSettings) -> BatchLimits:
        return settings.batch_limits(max_tokens=self._settings.max_tokens, default_token_budget=self._default_budget)

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


def _check_output(values: NDArray[np.float32], *, num_rows: int, width: int) -> None:
    if values.shape != (num_rows, width):
        raise MalformedOutput(f"expected an array of shape {(num_rows, width)}, got {values.shape}")
    if not np.isfinite(values).all():
        raise MalformedOutput("a value is not finite")

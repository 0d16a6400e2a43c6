"""Rows to bucket deployments and back: the only place where the ingress calls a replica with work.

Inference is idempotent, so a part whose replica died or was stopping is sent once more within the deadline; whatever
else goes wrong is turned into one of our errors, because `str` of what Ray raises is a remote traceback.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
)

from batching.errors import (
    DeviceLost,
    Draining,
    ForwardFailed,
    Overloaded,
    ReplicaLost,
    RevisionUnavailable,
    TokenServeError,
)
from batching.row import Priority
from deployments.revisions import LiveRevision
from deployments.tokenization import EncodedInput
from deployments.wire import InferCall, InferReply, TokenIds

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
REPLICA_GONE = (RayActorError, ReplicaUnavailableError, TaskCancelledError, ObjectLostError, Draining, DeviceLost)
"""The replica died, disappeared, dropped the call, lost its answer, is stopping or useless: another may answer."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BucketPart:
    """The rows of one request for one bucket: `indices` into the request, and their ids in the same order."""

    bucket: int
    indices: tuple[int, ...]
    token_ids: tuple[TokenIds, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """On whose behalf rows run."""

    tenant: str
    batch_group: str
    weight: float = 1.0
    priority: Priority = "interactive"


def cut_by_bucket(rows: Sequence[EncodedInput | TokenServeError], live: LiveRevision) -> list[BucketPart]:
    """Group the good rows by length bucket, each part in the order of the request."""
    by_bucket: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        if isinstance(row, EncodedInput):
            by_bucket.setdefault(live.buckets.index_of(len(row.token_ids)), []).append(index)
    return [
        BucketPart(
            bucket=bucket,
            indices=tuple(indices),
            token_ids=tuple(row.token_ids for index in indices if isinstance(row := rows[index], EncodedInput)),
        )
        for bucket, indices in sorted(by_bucket.items())
    ]


async def call_bucket(live: LiveRevision, part: BucketPart, caller: Caller, *, deadline: float) -> InferReply:
    """Run one part on a replica of its bucket, on a second one if the first is lost.

    `deadline` is on the running loop's clock; the caller bounds the wait with it. Raises TokenServeError only.
    """
    try:
        return await _call_once(live, part, caller, deadline=deadline)
    except REPLICA_GONE as error:
        logger.warning("replica lost, trying once more: revision=%s error=%s", live.info.revision, _name(error))
    try:
        return await _call_once(live, part, caller, deadline=deadline)
    except REPLICA_GONE as error:
        raise ReplicaLost(RETRY_AFTER_S) from error


async def all_or_cancel(calls: Mapping[BucketPart, Coroutine[Any, Any, Result]]) -> dict[BucketPart, Result]:
    """Await all; when one raises, or this is cancelled, cancel the others, so that their rows leave the queues."""
    tasks = [asyncio.ensure_future(call) for call in calls.values()]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return dict(zip(calls, results, strict=True))


async def _call_once(live: LiveRevision, part: BucketPart, caller: Caller, *, deadline: float) -> InferReply:
    call = InferCall(
        token_ids=np.concatenate(part.token_ids),
        lengths=np.fromiter(map(len, part.token_ids), dtype=np.int32, count=len(part.token_ids)),
        tenant=caller.tenant,
        batch_group=caller.batch_group,
        weight=caller.weight,
        priority=caller.priority,
        timeout_s=max(deadline - asyncio.get_running_loop().time(), 0.001),
    )
    try:
        reply = await live.handles[part.bucket].infer(call)
    except REPLICA_GONE:
        raise
    except BackPressureError as error:
        raise Overloaded(RETRY_AFTER_S) from error
    except DeploymentUnavailableError as error:
        raise RevisionUnavailable(live.info.revision, RETRY_AFTER_S) from error
    except (RayError, RayServeException) as error:
        # An error of ours arrives as a mixture of its class and RayTaskError; the original is what callers want.
        if isinstance(error, RayTaskError) and isinstance(error.cause, TokenServeError):
            raise error.cause from None
        logger.error("replica failed: revision=%s error=%s", live.info.revision, _name(error))
        raise ForwardFailed(_name(error)) from None
    if reply.refusal is not None:
        raise reply.refusal
    for outcome in reply.errors.values():
        if isinstance(outcome, REPLICA_GONE):
            raise outcome  # rows that were inside when the replica stopped or its device failed
    return reply


def _name(error: BaseException) -> str:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return type(cause).__name__

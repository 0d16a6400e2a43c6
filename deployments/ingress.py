"""From a parsed request to its answer, without HTTP: resolve, tokenise, check, cut by bucket, call, put together again.

Rules of this file: a request works on one snapshot of settings and revision from start to end; rows are answered in the
order they came; a replica that dies is tried again once, elsewhere, within the deadline.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from batching.errors import (
    DeadlineExceeded,
    InvalidRequest,
    RequestTooLarge,
    RevisionUnavailable,
    TokenServeError,
    UnknownRevision,
)
from deployments.dispatch import RETRY_AFTER_S, BucketPart, all_or_cancel, call_bucket, cut_by_bucket
from deployments.quotas import QuotaKeeper
from deployments.requests import (
    InferAnswer,
    InferRequest,
    Tenant,
    caller_of,
    check_num_rows,
    timeout_of,
    with_given_time,
)
from deployments.revisions import CALL_FAILED, NOT_ANSWERED, Connect, LiveRevision, RevisionDirectory, ServeConnect
from deployments.settings import GatewaySettings
from deployments.shedding import Shedder, Size
from deployments.token_bucket import open_store
from deployments.tokenization import EncodedInput
from deployments.wire import InferReply, ReplicaStats, TokenIds

TOKENIZER_THREADS = 2
"""Tokenisation releases the GIL and uses all cores for a large batch by itself."""
MAX_PIECE_CHARS = 65_536
"""Text that is tokenised in one go: some tens of milliseconds of a core."""
PROBE_TIMEOUT_S = 3.0
FIRST_ANSWERS_TIMEOUT_S = 4.0
"""How long a fresh ingress holds requests back to learn of revisions that are up already."""
MAX_INDICES_IN_ERROR = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionStatus:
    """Whether a revision answers, and if not, why."""

    revision: str
    is_ready: bool
    reason: str | None = None


class Ingress:
    """A plain class; `serve_app` gives it HTTP and makes it a deployment."""

    def __init__(self, connect: Connect | None = None, quotas: QuotaKeeper | None = None) -> None:
        self.directory = RevisionDirectory(connect or ServeConnect())
        self._quotas = quotas or QuotaKeeper(open_store(None), on_store_failure="open")
        self._shedder = Shedder()
        self._settings: GatewaySettings | None = None
        self._pool = ThreadPoolExecutor(max_workers=TOKENIZER_THREADS, thread_name_prefix="tokenize")

    @property
    def settings(self) -> GatewaySettings:
        """The settings in force. Raises RuntimeError before the first `reconfigure`: there is nothing to serve."""
        if self._settings is None:
            raise RuntimeError("the ingress needs a user_config with `revisions`")
        return self._settings

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take new revisions, aliases and limits. Raises pydantic.ValidationError and keeps the old ones."""
        settings = GatewaySettings.model_validate(user_config)
        is_first = self._settings is None
        self._settings = settings
        self.directory.configure(settings.revisions)
        if is_first:
            # Ray sends requests here once this returns; a restarted ingress must not refuse what others would serve.
            await self.directory.first_answers(FIRST_ANSWERS_TIMEOUT_S)

    async def stop(self) -> None:
        """End background work."""
        await self.directory.stop()
        await self._quotas.stop()
        self._pool.shutdown(wait=False)

    # ---- what the dialects ask -----------------------------------------------------------------------------------

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Answer `request` within its time.

        Raises UnknownRevision, RevisionUnavailable, InvalidRequest and its kinds, DeadlineExceeded and whatever a row
        ended in; with `partial`, errors of single rows are in the answer instead.
        """
        settings = self.settings
        timeout_s = timeout_of(request, settings)
        caller = caller_of(request)
        live = self.resolve(request.tenant, request.revision, param=request.revision_param)
        check_num_rows(len(request.inputs), settings, param=request.inputs_param)
        now = asyncio.get_running_loop().time()
        deadline = now + timeout_s
        shed_key = (caller.tenant, live.info.revision, caller.priority)
        size = Size(num_chars=sum(map(len, request.inputs)), timeout_s=timeout_s)
        self._shedder.check(shed_key, size, now)
        try:
            async with asyncio.timeout_at(deadline):
                rows = await self._encode(request, live)
                num_tokens = _check(rows, request, max_tokens=settings.max_tokens_per_request)
                async with self._quotas.charged(
                    caller.tenant,
                    live.info.revision,
                    request.tenant.quotas,
                    tokens=num_tokens,
                    param=request.inputs_param,
                ) as charge:
                    parts = cut_by_bucket(rows, live)
                    replies = await all_or_cancel(
                        {part: call_bucket(live, part, caller, deadline=deadline) for part in parts}
                    )
                    errors = _errors(rows, replies, timeout_s=timeout_s)
                    if errors and not request.partial:
                        raise errors[min(errors)]
                    await self._quotas.refund_tokens(charge, _failed_tokens(rows, errors))
        except TimeoutError:
            raise DeadlineExceeded(timeout_s) from None
        except TokenServeError as error:
            self._shedder.note(shed_key, size, error, asyncio.get_running_loop().time())
            raise with_given_time(error, timeout_s) from None
        self._shedder.answered(shed_key)
        return _assemble(rows, replies, errors, live)

    def resolve(self, tenant: Tenant, name: str, *, param: str) -> LiveRevision:
        """The snapshot behind a revision or alias.

        Raises UnknownRevision, also for what the tenant may not use, and RevisionUnavailable.
        """
        settings = self.settings
        revision = settings.aliases.get(name, name)
        if revision not in settings.revisions or not tenant.may_use(revision):
            raise UnknownRevision(param)
        return self.directory.get(revision)

    def usable(self, tenant: Tenant) -> list[str]:
        """The revisions that a tenant may use, up or not."""
        return [revision for revision in self.settings.revisions if tenant.may_use(revision)]

    def aliases_of(self, revision: str) -> list[str]:
        """The other names of a revision."""
        return [alias for alias, target in self.settings.aliases.items() if target == revision]

    async def status(self, revisions: Sequence[str]) -> list[RevisionStatus]:
        """Whether each revision runs a real forward in every bucket right now."""
        return list(await asyncio.gather(*(self._status(revision) for revision in revisions)))

    async def stats(self, revision: str) -> dict[str, list[ReplicaStats]]:
        """Counters of a revision per bucket deployment, one entry per replica. Raises RevisionUnavailable."""
        live = self.directory.get(revision)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                answers = await asyncio.gather(*(handle.stats() for handle in live.handles))
        except CALL_FAILED as error:
            # A replica that died or hangs a moment ago: its counters are gone or late, and Ray's text is nobody's.
            raise RevisionUnavailable(revision, RETRY_AFTER_S) from error
        return {bucket.deployment: stats for bucket, stats in zip(live.info.buckets, answers, strict=True)}

    # ---- steps ---------------------------------------------------------------------------------------------------

    async def _encode(self, request: InferRequest, live: LiveRevision) -> list[EncodedInput | TokenServeError]:
        # Piece by piece, so that a large request shares the threads with others, and stops when its time is over.
        rows: list[EncodedInput | TokenServeError] = []
        for start, end in _pieces(request.inputs):
            encode = partial(
                live.encoder.encode,
                request.inputs[start:end],
                request.params[start:end],
                truncate=request.truncate,
            )
            rows += await asyncio.get_running_loop().run_in_executor(self._pool, encode)
        return rows

    async def _status(self, revision: str) -> RevisionStatus:
        try:
            live = self.directory.get(revision)
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await asyncio.gather(*(handle.probe(PROBE_TIMEOUT_S) for handle in live.handles))
        except CALL_FAILED as error:
            is_known_down = isinstance(error, RevisionUnavailable)
            otherwise = NOT_ANSWERED if is_known_down else f"probe failed: {type(error).__name__}"
            reason = self.directory.reason(revision, otherwise)
            return RevisionStatus(revision=revision, is_ready=False, reason=reason)
        return RevisionStatus(revision=revision, is_ready=True)


def _pieces(inputs: Sequence[str | TokenIds]) -> Iterator[tuple[int, int]]:
    """Cut the inputs into ranges of about MAX_PIECE_CHARS characters (or ids)."""
    start = size = 0
    for index, value in enumerate(inputs):
        size += len(value)
        if size >= MAX_PIECE_CHARS:
            yield start, index + 1
            start, size = index + 1, 0
    if start < len(inputs):
        yield start, len(inputs)


def _check(rows: Sequence[EncodedInput | TokenServeError], request: InferRequest, *, max_tokens: int) -> int:
    """The tokens of all good rows. Raises the first error unless `partial`, and RequestTooLarge."""
    errors = [row for row in rows if isinstance(row, TokenServeError)]
    if errors and not request.partial:
        raise _naming_others(errors)
    total = sum(len(row.token_ids) for row in rows if isinstance(row, EncodedInput))
    if total > max_tokens:
        raise RequestTooLarge(request.inputs_param, "tokens", total, max_tokens, "max_tokens_per_request")
    return total


def _naming_others(errors: Sequence[TokenServeError]) -> TokenServeError:
    first = errors[0]
    if isinstance(first, InvalidRequest):
        first.others = tuple(error.param for error in errors[1 : MAX_INDICES_IN_ERROR + 1] if error.param is not None)
    return first


def _errors(
    rows: Sequence[EncodedInput | TokenServeError], replies: Mapping[BucketPart, InferReply], *, timeout_s: float
) -> dict[int, TokenServeError]:
    """What failed, by position in the request."""
    errors = {index: row for index, row in enumerate(rows) if isinstance(row, TokenServeError)}
    for part, reply in replies.items():
        for index, error in reply.errors.items():
            errors[part.indices[index]] = with_given_time(error, timeout_s)
    return dict(sorted(errors.items()))


def _failed_tokens(rows: Sequence[EncodedInput | TokenServeError], errors: Mapping[int, TokenServeError]) -> int:
    """Tokens that were charged for rows that then failed."""
    return sum(len(row.token_ids) for index in errors if isinstance(row := rows[index], EncodedInput))


def _assemble(
    rows: Sequence[EncodedInput | TokenServeError],
    replies: Mapping[BucketPart, InferReply],
    errors: Mapping[int, TokenServeError],
    live: LiveRevision,
) -> InferAnswer:
    values = np.zeros((len(rows), live.info.dimension), dtype=np.float32)
    for part, reply in replies.items():
        values[list(part.indices)] = reply.values
    return InferAnswer(
        live=live,
        values=values,
        num_tokens=[
            len(row.token_ids) if isinstance(row, EncodedInput) and index not in errors else 0
            for index, row in enumerate(rows)
        ],
        truncated=frozenset(
            index for index, row in enumerate(rows) if isinstance(row, EncodedInput) and row.is_truncated
        ),
        errors=errors,
        computed_tokens=sum(reply.computed_tokens for reply in replies.values()),
    )

"""What the ingress knows about revisions: which application serves each, and what that application says of itself.

Nothing about a model is configured twice: limits, task and tokenizer are asked from the revision's own application,
again and again, so that an application that comes, goes or changes is noticed without a restart here.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.schema import ApplicationStatusOverview

from batching.buckets import Buckets
from batching.errors import RevisionUnavailable, TokenServeError
from deployments.tokenization import InputEncoder
from deployments.wire import BucketInfo, InferCall, InferReply, ReplicaStats, RevisionInfo

logger = logging.getLogger(__name__)

REFRESH_DOWN_S = 0.5
"""How often a revision that is not up is asked."""
NOT_ANSWERED = "its application has not answered yet"
REFRESH_UP_S = 5.0
"""How often a revision that is up is asked whether it changed."""
DESCRIBE_TIMEOUT_S = 3.0
"""After this, Serve is asked for the state of the application instead."""
CALL_TIMEOUT_S = 5.0
"""Longest wait for an answer about a revision; requests have their own deadlines."""

CALL_FAILED = (RayError, RayServeException, TokenServeError, TimeoutError)
"""What a handle call can end in when the other side is not there."""


class BucketHandle(Protocol):
    """Calls to one bucket deployment; the methods of `ModelReplica`."""

    async def infer(self, call: InferCall) -> InferReply:
        """One replica runs the rows."""

    async def probe(self, timeout_s: float) -> None:
        """One replica shows that it can run a forward."""

    async def stats(self) -> list[ReplicaStats]:
        """Every replica's counters; replicas that do not answer in time are missing."""


class Connect(Protocol):
    """How to reach applications; the tests have their own."""

    async def describe(self, application: str, known_fingerprint: str | None) -> tuple[str, RevisionInfo] | None:
        """Ask an application about itself; None when nothing changed. Raises one of CALL_FAILED."""

    def bucket(self, application: str, deployment: str) -> BucketHandle:
        """A handle that lives as long as the ingress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRevision:
    """A revision whose application has described itself: one consistent snapshot, used for a whole request."""

    application: str
    fingerprint: str
    info: RevisionInfo
    encoder: InputEncoder
    buckets: Buckets
    handles: tuple[BucketHandle, ...]
    """In the order of `info.buckets`."""


@dataclass(slots=True)
class RevisionDirectory:
    """The configured revisions and the latest snapshot of each; one refresh task per revision."""

    connect: Connect
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _applications: dict[str, str] = field(default_factory=dict)
    _live: dict[str, LiveRevision] = field(default_factory=dict)
    _reasons: dict[str, str] = field(default_factory=dict)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _asked: dict[str, asyncio.Event] = field(default_factory=dict)

    def configure(self, applications: Mapping[str, str]) -> None:
        """Serve exactly these revisions (revision to application) from now on."""
        for revision, application in list(self._applications.items()):
            if applications.get(revision) != application:
                self._tasks.pop(revision).cancel()
                self._asked.pop(revision, None)
                self._live.pop(revision, None)
                self._reasons.pop(revision, None)
        self._applications = dict(applications)
        for revision, application in applications.items():
            if revision not in self._tasks:
                self._start(revision, application)

    async def first_answers(self, timeout_s: float) -> None:
        """Return when every revision has been asked once, whatever came of it, or after `timeout_s`."""
        asked = [event.wait() for event in self._asked.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*asked)

    def names(self) -> tuple[str, ...]:
        """The configured revisions."""
        return tuple(self._applications)

    def get(self, revision: str) -> LiveRevision:
        """The latest snapshot. Raises RevisionUnavailable while the application has never answered or is gone."""
        live = self._live.get(revision)
        if live is None:
            raise RevisionUnavailable(revision, retry_after_s=1.0)
        return live

    def reason(self, revision: str, otherwise: str = NOT_ANSWERED) -> str:
        """Why the revision is not up or did not answer last time, for operators; `otherwise` when it did answer."""
        return self._reasons.get(revision, otherwise)

    async def stop(self) -> None:
        """End the refresh tasks."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, revision: str, application: str) -> None:
        self._asked.setdefault(revision, asyncio.Event())
        task = asyncio.get_running_loop().create_task(self._refresh(revision, application))
        task.add_done_callback(lambda ended: self._restart(revision, application, ended))
        self._tasks[revision] = task

    def _restart(self, revision: str, application: str, ended: asyncio.Task[None]) -> None:
        # Only an error that nobody foresaw ends a refresh, such as a tokenizer file that cannot be read. The revision
        # would stay as it is for ever, in silence.
        if ended.cancelled() or self._tasks.get(revision) is not ended:
            return
        error = ended.exception()
        self._reasons[revision] = f"application {application} cannot be used ({type(error).__name__})"
        logger.error("revision %s: %s", revision, self._reasons[revision])
        self._start(revision, application)

    async def _refresh(self, revision: str, application: str) -> None:
        if revision in self._reasons:
            await self.sleep(REFRESH_DOWN_S)
        while True:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await self._refresh_once(revision, application)
            except CALL_FAILED as error:
                self._lost(revision, application, error)
            self._asked[revision].set()
            await self.sleep(REFRESH_UP_S if revision in self._live else REFRESH_DOWN_S)

    async def _refresh_once(self, revision: str, application: str) -> None:
        known = self._live.get(revision)
        answer = await self.connect.describe(application, known.fingerprint if known else None)
        self._reasons.pop(revision, None)
        if answer is None:
            return
        fingerprint, info = answer
        if info.revision != revision:
            self._live.pop(revision, None)
            self._reasons[revision] = f"application {application} serves another revision, {info.revision}"
            return
        # Parsing a large tokenizer takes a while; the loop has requests to serve meanwhile.
        encoder = await asyncio.to_thread(
            InputEncoder, info.tokenizer_json, max_tokens=info.max_tokens, vocab_size=info.vocab_size
        )
        self._live[revision] = LiveRevision(
            application=application,
            fingerprint=fingerprint,
            info=info,
            encoder=encoder,
            buckets=Buckets(tuple(bucket.max_tokens for bucket in info.buckets)),
            handles=tuple(self._handle(application, bucket) for bucket in info.buckets),
        )
        logger.info("revision %s is up: application=%s buckets=%d", revision, application, len(info.buckets))

    def _handle(self, application: str, bucket: BucketInfo) -> BucketHandle:
        return self.connect.bucket(application, bucket.deployment)

    def _lost(self, revision: str, application: str, error: BaseException) -> None:
        # A known revision stays: its replicas may be restarting, and requests have deadlines of their own. Only an
        # application that no longer exists is forgotten.
        reason = f"application {application} does not answer ({type(error).__name__})"
        if isinstance(error, ApplicationMissing):
            self._live.pop(revision, None)
            reason = f"application {application} is not deployed"
        elif isinstance(error, ApplicationNotRunning):
            reason = f"application {application} is {error.status}"
        if self._reasons.get(revision) != reason:
            logger.warning("revision %s: %s", revision, reason)
        self._reasons[revision] = reason


class ApplicationMissing(RayServeException):  # type: ignore[misc]  # Ray is not typed
    """Serve has no application of that name."""


class ApplicationNotRunning(RayServeException):  # type: ignore[misc]
    """Serve knows the application and says that it is DEPLOYING, DEPLOY_FAILED, ..."""

    def __init__(self, application: str, status: str) -> None:
        super().__init__(application, status)
        self.application = application
        self.status = status


def _reason(overview: ApplicationStatusOverview) -> str:
    """The error itself: of the remote tracebacks that Serve keeps as messages, the last line that names an error."""
    messages: list[str] = [overview.message, *(deployment.message for deployment in overview.deployments.values())]
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Failed)\b.*: ", line)]
    return (errors or lines or ["no message"])[-1]


class ServeConnect:
    """`Connect` through Ray Serve handles."""

    def __init__(self) -> None:
        self._failures: dict[str, str] = {}  # logged already, by application

    async def describe(self, application: str, known_fingerprint: str | None) -> tuple[str, RevisionInfo] | None:
        """Ask one replica of the application's root deployment."""
        try:
            # Asks the controller, synchronously, so not on the loop; also how a deleted application is noticed.
            handle = await asyncio.to_thread(serve.get_app_handle, application)
        except RayServeException as error:
            raise ApplicationMissing(application) from error
        response = handle.describe.remote(known_fingerprint)
        try:
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                answer: tuple[str, RevisionInfo] | None = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except TimeoutError:
            response.cancel()
            await self._explain(application)
            raise
        except DeploymentUnavailableError:
            await self._explain(application)
            raise
        return answer

    async def _explain(self, application: str) -> None:
        """Raise ApplicationNotRunning with Serve's word for the state, if that is why nobody answered."""
        overview = (await asyncio.to_thread(serve.status)).applications.get(application)
        if overview is None or overview.status == "RUNNING":
            return
        if overview.status == "DEPLOY_FAILED":
            reason = _reason(overview)
            if self._failures.get(application) != reason:
                self._failures[application] = reason
                logger.error("application %s failed to deploy: %s", application, reason)
        raise ApplicationNotRunning(application, str(overview.status.value))

    def bucket(self, application: str, deployment: str) -> BucketHandle:
        """A cached handle."""
        return ServeBucketHandle(application, deployment)


class ServeBucketHandle:
    """`BucketHandle` through a Ray Serve handle; method handles are made once, because each is a new object."""

    def __init__(self, application: str, deployment: str) -> None:
        self._handle = serve.get_deployment_handle(deployment, application)
        self._infer = self._handle.infer
        self._probe = self._handle.probe

    async def infer(self, call: InferCall) -> InferReply:
        """Route to one replica; leaving early cancels the call there."""
        response = self._infer.remote(call)
        try:
            reply: InferReply = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        return reply

    async def probe(self, timeout_s: float) -> None:
        """Probe whichever replica the router picks."""
        response = self._probe.remote(timeout_s)
        try:
            await response
        except asyncio.CancelledError:
            response.cancel()
            raise

    async def stats(self) -> list[ReplicaStats]:
        """Ask all replicas."""
        answers = await self._handle.broadcast("stats").results_async(timeout_s=CALL_TIMEOUT_S, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, ReplicaStats)]

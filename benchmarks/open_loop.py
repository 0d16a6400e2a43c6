"""The client of an open loop: requests are due at moments fixed beforehand, however slowly the server answers.

A process of its own, `python -m benchmarks.open_loop` with an `OpenLoopSpec` as JSON on its input and an
`OpenLoopResult` on its output. Each stream has a bounded number of connections: a request that is due while none is
free is sent late, oldest first, and one that is not sent by the end of its stream is counted and forgotten. Answers are
read and dropped, but for a sample that is checked afterwards, so memory holds one small record per request sent.
"""

import asyncio
import json
import math
import os
import resource
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import orjson

from benchmarks.streams import (
    DEFAULT_TIMEOUT_S,
    HANG,
    HANG_EXTRA_S,
    OK,
    OpenLoopResult,
    OpenLoopSpec,
    Reply,
    Stream,
    StreamResult,
)
from benchmarks.workload import MIN_COSINE, Workload

MAX_CHECKED = 100
"""Answers per stream that are kept and compared."""
HEAD_START_S = 0.2
"""For all streams to be ready before the first request is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One body, and what is known about it."""

    body: bytes
    texts: list[int]
    num_tokens: int
    timeout_s: float | None

    @property
    def patience_s(self) -> float:
        """After this it counts as hanging."""
        return (DEFAULT_TIMEOUT_S if self.timeout_s is None else self.timeout_s) + HANG_EXTRA_S


def due_times(stream: Stream) -> list[float]:
    """When the requests of a stream are due: seconds since the loop began, rising, all before its end."""
    if stream.is_regular:
        num = math.ceil(stream.lasts_s * stream.requests_per_s)
        return [stream.starts_s + number / stream.requests_per_s for number in range(num)]
    draw = np.random.default_rng(stream.seed)
    times: list[float] = []
    now = stream.starts_s + draw.exponential(1 / stream.requests_per_s)
    while now < stream.ends_s:
        times.append(float(now))
        now += draw.exponential(1 / stream.requests_per_s)
    return times


def classify(status: int, answer: bytes) -> str:
    """An outcome in words: the status, and the code that the server's error shape has."""
    if status == 200:
        return OK
    try:
        return f"{status} {orjson.loads(answer)['error']['code']}"
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return f"{status} without a code"


class Bodies:
    """Requests of a stream by their number; made when sent, because all of them together would be large."""

    def __init__(self, stream: Stream, workload: Workload) -> None:
        self._stream = stream
        self._lengths = workload.lengths
        self._texts = [orjson.dumps(text) for text in workload.texts]
        self._span = range(*stream.texts) if stream.texts else range(len(self._texts))
        self._timeouts_ms: list[int | None] = [*stream.timeouts_ms] or [None]
        self._heads = [self._head(timeout_ms) for timeout_ms in self._timeouts_ms]
        self._step = max(stream.shapes)

    def request(self, number: int) -> Request:
        """The one with that number; texts are taken round and round, none twice in one request."""
        stream = self._stream
        turn, place = divmod(number, len(stream.shapes))
        first = number * self._step
        texts = [self._span[(first + offset) % len(self._span)] for offset in range(stream.shapes[place])]
        which = turn % len(self._heads)
        timeout_ms = self._timeouts_ms[which]
        return Request(
            body=self._heads[which] + b",".join(self._texts[index] for index in texts) + b"]}",
            texts=texts,
            num_tokens=sum(self._lengths[index] for index in texts),
            timeout_s=None if timeout_ms is None else timeout_ms / 1000,
        )

    def _head(self, timeout_ms: int | None) -> bytes:
        fields: dict[str, object] = dict(self._stream.fields)
        if timeout_ms is not None:
            fields["timeout_ms"] = timeout_ms
        return orjson.dumps({**fields, "inputs": []}).removesuffix(b"]}")


@dataclass(slots=True)
class _Progress:
    """A stream under way."""

    stream: Stream
    due: list[float]
    bodies: Bodies
    next_number: int = 0
    replies: list[Reply] = field(default_factory=list)
    num_answered: int = 0
    answers: list[tuple[list[int], bytes]] = field(default_factory=list)
    """Text numbers and the answer, of the sample to check."""

    def note(self, request: Request, answer: bytes) -> None:
        """Keep one in so many answers; not by the requests' numbers, which decide their shape and timeout too."""
        if self.num_answered % -(-len(self.due) // MAX_CHECKED) == 0:
            self.answers.append((request.texts, answer))
        self.num_answered += 1


class OpenLoop:
    """Sends what is due and notes what comes back."""

    def __init__(self, spec: OpenLoopSpec, workload: Workload) -> None:
        self.progress = [_Progress(stream, due_times(stream), Bodies(stream, workload)) for stream in spec.streams]
        self.client_cpu_share = 0.0
        self._url = spec.url
        self._start = 0.0

    async def run(self) -> None:
        """Return when every request that was sent has ended one way or another; then `progress` is complete."""
        self._start = asyncio.get_running_loop().time() + HEAD_START_S
        cpu_s = _cpu_s()
        async with asyncio.TaskGroup() as group:
            for progress in self.progress:
                group.create_task(self._play(progress))
        self.client_cpu_share = (_cpu_s() - cpu_s) / self._now() / len(os.sched_getaffinity(0))

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._start

    async def _play(self, progress: _Progress) -> None:
        stream = progress.stream
        connector = aiohttp.TCPConnector(limit=stream.connections)
        async with (
            aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None), headers=stream.headers
            ) as session,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(stream.connections):
                group.create_task(self._use_connection(session, progress))

    async def _use_connection(self, session: aiohttp.ClientSession, progress: _Progress) -> None:
        # Numbers are handed out in order, so one that is overdue when it is taken had to wait for this connection.
        while progress.next_number < len(progress.due) and self._now() < progress.stream.ends_s:
            number = progress.next_number
            progress.next_number += 1
            left_s = progress.due[number] - self._now()
            await asyncio.sleep(max(left_s, 0.0))
            progress.replies.append(await self._send(session, progress, number, had_to_wait=left_s < 0))

    async def _send(
        self, session: aiohttp.ClientSession, progress: _Progress, number: int, *, had_to_wait: bool
    ) -> Reply:
        request = progress.bodies.request(number)
        retry_after_s: float | None = None
        sent_s = self._now()
        try:
            async with (
                asyncio.timeout(request.patience_s),
                session.post(self._url, data=request.body) as response,
            ):
                answer = await response.read()
            outcome = classify(response.status, answer)
            retry_after_s = seconds_of(response.headers.get("Retry-After"))
            if outcome == OK:
                progress.note(request, answer)
        except TimeoutError:
            outcome = HANG
        except (aiohttp.ClientError, OSError) as failure:
            outcome = f"error {type(failure).__name__}"
        return Reply(
            due_s=progress.due[number],
            sent_s=sent_s,
            ended_s=self._now(),
            outcome=outcome,
            num_texts=len(request.texts),
            num_tokens=request.num_tokens,
            timeout_s=request.timeout_s,
            had_to_wait=had_to_wait,
            retry_after_s=retry_after_s,
        )


def seconds_of(header: str | None) -> float | None:
    """`Retry-After` in seconds; None where there is none, or a date, which this server never sends."""
    return float(header) if header is not None and header.isdecimal() else None


def run(spec: OpenLoopSpec) -> OpenLoopResult:
    """Play all streams, then check the sampled answers."""
    workload = Workload.load(Path(spec.workload))
    loop = OpenLoop(spec, workload)
    is_favoured = _favour_this_process()
    asyncio.run(loop.run())
    results = {progress.stream.name: _checked(progress, workload) for progress in loop.progress}
    return OpenLoopResult(streams=results, client_cpu_share=loop.client_cpu_share, is_favoured=is_favoured)


def _favour_this_process() -> bool:
    """Let the client run before the server's threads on the same CPUs; False where that is not allowed.

    Measured on two CPUs with a saturated server: without it, requests were sent up to 2 s late at p99, for want of a
    CPU and not of work. It sleeps most of the time, so that it takes no more CPU this way.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        return False
    return True


def _checked(progress: _Progress, workload: Workload) -> StreamResult:
    cosines = np.concatenate([np.ones(0), *(_cosines(workload, texts, body) for texts, body in progress.answers)])
    return StreamResult(
        num_due=len(progress.due),
        replies=progress.replies,
        num_checked=len(cosines),
        num_wrong=int((~(cosines >= MIN_COSINE)).sum()),
    )


def _cosines(workload: Workload, texts: list[int], answer: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    outputs = orjson.loads(answer)["outputs"]
    values = np.array([output["embedding"] for output in outputs], dtype=np.float32)  # [texts, D]
    if values.shape != (len(texts), workload.reference.shape[1]):
        return np.full(len(texts), np.nan)
    return workload.cosines(texts, values)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    print(json.dumps(asdict(run(OpenLoopSpec.of_json(json.load(sys.stdin))))))

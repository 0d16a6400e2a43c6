"""The client: a fixed number of connections, each sends its next request when the last is answered.

A process of its own, `python -m benchmarks.load` with a `LoadSpec` as JSON on its input and a `Window` on its output.
Bodies are made before and answers are checked after the measured window, so that within it the client only sends and
receives.
"""

import asyncio
import json
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import orjson

from benchmarks.table import Window
from benchmarks.workload import MIN_COSINE, Workload

REQUEST_TIMEOUT_S = 120.0
AFTER_ERROR_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """What to send, how, and for how long."""

    url: str
    workload: str
    """Folder of the texts."""
    rows_per_request: int
    connections: int
    warmup_s: float
    """At least this long, and until there are as many answers as connections."""
    window_s: float
    first_text: int
    """Where in the texts the window begins; the warm-up begins with text 0."""
    headers: dict[str, str] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)
    """What the body has besides `inputs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request: which body, when (loop seconds), and what came back; `error` is empty for an answer."""

    request: int
    started: float
    ended: float
    answer: bytes = b""
    error: str = ""


def tokens_within(spans: Sequence[tuple[float, float, int]], start: float, end: float) -> float:
    """Tokens of the window [start, end): a request (started, ended, tokens) over an edge counts by its share inside.

    Without that, a window of ten slow requests would be off by up to one request per connection.
    """
    total = 0.0
    for started, ended, tokens in spans:
        inside = min(ended, end) - max(started, start)
        if inside > 0:
            total += tokens * inside / (ended - started)
    return total


class LoadGenerator:
    """Sends until every request that began before the end of the window is answered, under full load all along."""

    def __init__(self, spec: LoadSpec, bodies: Sequence[bytes]) -> None:
        self.samples: list[Sample] = []
        self.start = self.end = float("inf")
        self.cpu_s = 0.0
        self._spec = spec
        self._bodies = bodies
        self._next = 0
        self._num_sent = 0
        self._under_way: dict[int, float] = {}  # when each began, by its number
        self._is_warm = asyncio.Event()

    async def run(self) -> None:
        """Warm up and measure; afterwards `samples`, `start`, `end` and `cpu_s` (of the window) hold."""
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=self._spec.connections)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._spec.headers) as session,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(self._spec.connections):
                group.create_task(self._keep_sending(session))
            group.create_task(self._watch())

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._spec.warmup_s)
        await self._is_warm.wait()
        self._next = self._spec.first_text // self._spec.rows_per_request
        self.start, cpu_s = loop.time(), _cpu_s()
        await asyncio.sleep(self._spec.window_s)
        self.end, self.cpu_s = loop.time(), _cpu_s() - cpu_s

    async def _keep_sending(self, session: aiohttp.ClientSession) -> None:
        while self.end == float("inf") or any(started < self.end for started in self._under_way.values()):
            request = self._next % len(self._bodies)
            self._next += 1
            sample = await self._send(session, request)
            self.samples.append(sample)
            if len(self.samples) >= self._spec.connections:
                self._is_warm.set()
            if sample.error:
                await asyncio.sleep(AFTER_ERROR_S)

    async def _send(self, session: aiohttp.ClientSession, request: int) -> Sample:
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._num_sent += 1
        number = self._num_sent
        self._under_way[number] = started
        answer, error = b"", ""
        try:
            async with session.post(self._spec.url, data=self._bodies[request]) as response:
                answer = await response.read()
            if response.status != 200:
                error = f"status {response.status}: {answer[:200]!r}"
        except (aiohttp.ClientError, TimeoutError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        finally:
            del self._under_way[number]
        return Sample(request=request, started=started, ended=loop.time(), answer=answer, error=error)


def run(spec: LoadSpec) -> Window:
    """Load the server, then check every answer."""
    workload = Workload.load(Path(spec.workload))
    parts = [
        range(start, min(start + spec.rows_per_request, len(workload.texts)))
        for start in range(0, len(workload.texts), spec.rows_per_request)
    ]
    bodies = [orjson.dumps({**spec.fields, "inputs": [workload.texts[index] for index in part]}) for part in parts]
    generator = LoadGenerator(spec, bodies)
    asyncio.run(generator.run())
    start, end = generator.start, generator.end
    answered = [sample for sample in generator.samples if not sample.error]
    tokens = [sum(workload.lengths[index] for index in part) for part in parts]
    spans = [(sample.started, sample.ended, tokens[sample.request]) for sample in answered]
    cosines = np.concatenate([np.ones(0), *(_cosines(workload, parts[each.request], each.answer) for each in answered)])
    return Window(
        tokens_per_s=tokens_within(spans, start, end) / (end - start),
        num_answers=len(cosines),
        lowest_cosine=float(cosines.min(initial=1.0)),
        num_wrong=int((~(cosines >= MIN_COSINE)).sum()),
        errors=[sample.error for sample in generator.samples if sample.error],
        latencies_s=[each.ended - each.started for each in answered if start <= each.ended < end],
        client_cpu_share=generator.cpu_s / (end - start) / len(os.sched_getaffinity(0)),
    )


def _cosines(workload: Workload, part: range, answer: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    outputs = orjson.loads(answer)["outputs"]
    values = np.array([output["embedding"] for output in outputs], dtype=np.float32)  # [rows, D]
    if values.shape != workload.reference[part.start : part.stop].shape:
        return np.full(len(part), np.nan)
    return workload.cosines(part, values)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    print(json.dumps(asdict(run(LoadSpec(**json.load(sys.stdin))))))

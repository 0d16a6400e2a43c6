"""Failures that others reported of their servers, where Ray's proxy and real connections have a part in them."""

import asyncio
import http.client
import json
import random
import time

import httpx
import pytest

from tests.cluster.server import ACME, Server, eventually

IDLE_S = 6.0
"""Longer than uvicorn's own default of 5 s."""
NUM_HALF_BODIES = 30
NUM_ABORTS = 100
JSON = ACME | {"Content-Type": "application/json"}


def request_bytes(body: bytes) -> bytes:
    """A request as it is on the wire."""
    head = (
        "POST /v1/infer HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
        f"Authorization: {ACME['Authorization']}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def infer_body(num_texts: int, words: int = 20) -> bytes:
    """Texts for the demo revision."""
    return json.dumps({"revision": "minilm", "inputs": ["word " * words] * num_texts}).encode()


def queued_rows(server: Server) -> int:
    """Rows that wait in any bucket of the demo revision."""
    return sum(int(server.stats("minilm@v1", bucket)["queued_rows"]) for bucket in ("tokens-64", "tokens-256"))


def test_bl116_an_idle_connection_is_not_reset(server: Server) -> None:
    """BL-116: a proxy closed idle connections after 5 s, which a load balancer takes for failures; ours keeps them."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.connect()
    connection.auto_open = False  # a closed connection is an error, never opened again in silence
    for wait_s in (0.0, IDLE_S):
        time.sleep(wait_s)
        connection.request("GET", "/health")
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())) == (200, {"status": "up"})
    connection.close()


def test_bl117_bl118_aborts_and_half_bodies_do_not_stop_the_queue(server: Server) -> None:
    """BL-117, BL-118: clients that stopped half way or left in a running batch hung a server for good; here probes go
    on being answered within a second beside them, and nothing of them stays."""
    draw = random.Random(11)

    async def half() -> asyncio.StreamWriter:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        whole = request_bytes(infer_body(4))
        writer.write(whole[: len(whole) - 100])
        await writer.drain()
        return writer

    async def abort() -> None:
        await asyncio.sleep(draw.uniform(0, 2))
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request_bytes(infer_body(4)))
        await writer.drain()
        await asyncio.sleep(draw.uniform(0, 0.3))
        writer.transport.abort()

    async def probe(client: httpx.AsyncClient) -> tuple[int, float]:
        started = time.monotonic()
        answer = await client.post("/v1/infer", content=infer_body(1, words=1), headers=JSON)
        return answer.status_code, time.monotonic() - started

    async def storm() -> list[tuple[int, float]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            await probe(client)
            halves = [await half() for _ in range(NUM_HALF_BODIES)]
            aborts = asyncio.gather(*(abort() for _ in range(NUM_ABORTS)))
            beside = [await probe(client) for _ in range(5)]
            await aborts
            after = [await probe(client) for _ in range(5)]
            for writer in halves:
                writer.transport.abort()
            return [*beside, *after, await probe(client)]

    probes = asyncio.run(storm())
    assert {status for status, _ in probes} == {200}
    assert max(seconds for _, seconds in probes[5:]) < 1, probes
    eventually(lambda: queued_rows(server) == 0, timeout_s=10)


def test_bl120_abort_of_the_largest_request(server: Server) -> None:
    """BL-120: a client that gave up on thousands of inputs crashed a server; here its rows go with it."""
    before = server.pids("gateway"), server.pids("minilm-v1")

    # Short texts: the server must think that it can do them in time, also while the machine is busy with other things.
    with httpx.Client(timeout=httpx.Timeout(0.1, connect=5)) as client, pytest.raises(httpx.TimeoutException):
        client.post(f"{server.url}/v1/infer", content=infer_body(2048, words=3), headers=JSON)
    eventually(lambda: queued_rows(server) == 0, timeout_s=10)
    assert server.infer("minilm", ["still here"], ACME).status_code == 200
    assert (server.pids("gateway"), server.pids("minilm-v1")) == before

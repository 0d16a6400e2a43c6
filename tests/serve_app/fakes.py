"""A gateway without sockets, in a loop that stands still between requests.

with Server(tmp_path) as server:
    server.post("/v1/infer", {"revision": "minilm", "inputs": ["the"]}).json()
    server.get("/v1/models", key=None).status_code          # 401
"""

import asyncio
import json
from collections.abc import AsyncIterable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml
from starlette.applications import Starlette

from deployments.shedding import Shedder
from serve_app.auth import digest_of
from serve_app.config import GatewayArgs
from serve_app.http import HttpIngress
from tests.deployments.fakes import FakeBucket, FakeConnect, Rounds, SkewedLoop, revision_info

ACME, ACME_NEXT, GLOBEX, ADMIN = "key-of-acme", "next-key-of-acme", "key-of-globex", "key-of-operator"
KEYS = (ACME, ACME_NEXT, GLOBEX, ADMIN)

TENANTS: dict[str, Any] = {
    "acme": {"keys_sha256": [digest_of(ACME), digest_of(ACME_NEXT)], "revisions": ["minilm@*", "down@*"]},
    "globex": {"keys_sha256": [digest_of(GLOBEX)], "revisions": ["other@*"]},
    "operator": {"keys_sha256": [digest_of(ADMIN)], "revisions": ["*"], "admin": True},
}
SETTINGS: dict[str, Any] = {
    "revisions": {"minilm@v1": "minilm-v1", "other@v1": "other-v1", "down@v1": "down-v1"},
    "aliases": {"minilm": "minilm@v1"},
}

Result = TypeVar("Result")
Headers = Sequence[tuple[str, str]]


def applications() -> dict[str, Any]:
    """minilm and other are up; other has shorter vectors on request. down is not deployed."""
    return {"minilm-v1": revision_info(), "other-v1": revision_info("other@v1", supports_dimensions=True)}


def write_tenants(path: Path, tenants: Mapping[str, Any]) -> None:
    """Make `path` a tenants file, as an editor would: a new file in its place."""
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump({"tenants": dict(tenants)}), encoding="utf-8")
    new.rename(path)


class Server:
    """The gateway, an HTTP client for it, and the loop in which both run."""

    def __init__(
        self,
        folder: Path,
        *,
        settings: Mapping[str, Any] | None = None,
        connect: FakeConnect | None = None,
        **args: Any,
    ) -> None:
        self._runner = asyncio.Runner(loop_factory=SkewedLoop)
        self.connect = connect or FakeConnect(applications())
        self.settings = dict(SETTINGS if settings is None else settings)
        self.tenants_file = folder / "tenants.yaml"
        if not self.tenants_file.exists():
            write_tenants(self.tenants_file, TENANTS)
        self._args = GatewayArgs(tenants_file=str(self.tenants_file), **args)
        self.rounds = Rounds()

    def __enter__(self) -> "Server":
        self.loop = self._runner.get_loop()
        assert isinstance(self.loop, SkewedLoop)
        self.run(self._start())
        return self

    def __exit__(self, *exception: object) -> None:
        self.run(self._stop())
        self._runner.close()

    async def _start(self) -> None:
        self.ingress = HttpIngress(self._args, connect=self.connect, host="127.0.0.1")
        self.ingress.directory.sleep = self.rounds
        self.app: Starlette = self.ingress.asgi_app()
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://gateway")
        await self.ingress.reconfigure(self.settings)
        await self.rounds.ended(len(self.settings["revisions"]))

    async def _stop(self) -> None:
        await self.client.aclose()
        await self.ingress.stop()

    # ---- requests ------------------------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` in the server's loop."""
        return self._runner.run(work)

    def get(self, path: str, *, key: str | None = ACME, headers: Headers = ()) -> httpx.Response:
        """GET with a key."""
        return self.run(self.send("GET", path, key=key, headers=headers))

    def post(self, path: str, body: object, *, key: str | None = ACME, headers: Headers = ()) -> httpx.Response:
        """POST `body` as JSON with a key."""
        return self.run(self.send("POST", path, body, key=key, headers=headers))

    def post_bytes(
        self, path: str, content: bytes | str, *, key: str | None = ACME, headers: Headers = ()
    ) -> httpx.Response:
        """POST exactly these bytes as application/json, unless `headers` say otherwise."""
        media = () if any(name.lower() == "content-type" for name, _ in headers) else (_JSON,)
        sent = [*_key(key), *media, *headers]
        return self.run(self.client.post(path, content=content, headers=sent))

    async def send(
        self, method: str, path: str, body: object = None, *, key: str | None = ACME, headers: Headers = ()
    ) -> httpx.Response:
        """One request, to be awaited beside others."""
        content = None if body is None else json.dumps(body).encode()
        sent = [*_key(key), *([] if body is None else [_JSON]), *headers]
        return await self.client.request(method, path, content=content, headers=sent)

    async def stream(self, path: str, chunks: AsyncIterable[bytes], *, key: str | None = ACME) -> httpx.Response:
        """POST a body in pieces, without saying how long it is."""
        return await self.client.post(path, content=chunks, headers=[*_key(key), _JSON])

    async def asgi(self, scope: Mapping[str, Any], messages: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
        """What the application sends for a scope that no client would make."""
        incoming, sent = list(messages), []

        async def receive() -> Any:
            return incoming.pop(0) if incoming else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app(_SCOPE | dict(scope), receive, send)
        return sent

    # ---- fakes behind it -----------------------------------------------------------------------------------------

    def bucket(self, deployment: str = "tokens-16", application: str = "minilm-v1") -> FakeBucket:
        """A bucket to look at."""
        return self.connect.fake_bucket(application, deployment)

    def reset(self) -> None:
        """Make all buckets as new."""
        for bucket in self.connect.buckets.values():
            bucket.reset()
        self.ingress._shedder = Shedder()  # refusals of one test are not those of the next

    def num_calls(self) -> int:
        """Calls that reached any bucket."""
        return sum(len(bucket.calls) for bucket in self.connect.buckets.values())

    def routes(self) -> set[tuple[str, str]]:
        """Method and path of everything the application answers, as it is running."""
        return {(method, route.path) for route in self.app.routes for method in route.methods}  # type: ignore[attr-defined]


def native(*inputs: object, **more: Any) -> dict[str, Any]:
    """A body of /v1/infer."""
    return {"revision": "minilm", "inputs": list(inputs), **more}


def openai(given: object, **more: Any) -> dict[str, Any]:
    """A body of /v1/embeddings."""
    return {"model": "minilm", "input": given, **more}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response that must have `status` and the one JSON shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 4096
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert list(error) == ["code", "message", "type", "param"]
    return error


_JSON = ("Content-Type", "application/json")
_SCOPE: dict[str, Any] = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "GET",
    "scheme": "http",
    "path": "/",
    "raw_path": b"/",
    "query_string": b"",
    "root_path": "",
    "headers": [],
    "client": ("127.0.0.1", 1),
    "server": ("gateway", 80),
}


def _key(key: str | None) -> Headers:
    return [] if key is None else [("Authorization", f"Bearer {key}")]

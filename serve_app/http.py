"""The ingress over HTTP: which paths exist, who may use them, and how an answer leaves.

Deny by default: an endpoint gets a tenant or is listed as public here; whatever is not a route asks for a key before it
says so. The decision hangs on the matched route, never on the text of the path.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from batching.errors import RevisionUnavailable, TokenServeError
from deployments.ingress import Ingress, RevisionStatus
from deployments.listen import listen_host
from deployments.logs import join_serve_logs
from deployments.quotas import QuotaKeeper
from deployments.requests import Tenant
from deployments.revisions import Connect
from deployments.token_bucket import open_store
from serve_app import native, openai
from serve_app.auth import CHECK_INTERVAL_S, TenantStore, Unauthorized, key_of
from serve_app.body import read_json
from serve_app.config import GatewayArgs, find_file, quota_storage_uri
from serve_app.headers import header_timeout_s, refuse_proxy_headers, within
from serve_app.http_errors import (
    MethodNotAllowed,
    RouteNotFound,
    error_response,
    internal_error_response,
    json_response,
)
from serve_app.stats import admin_stats, tenant_stats

READY_FRESH_S = 1.0
"""How long an answer of /ready is reused: a public path must not be a way to make work."""

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class _Readiness:
    at: float
    statuses: list[RevisionStatus]


class HttpIngress(Ingress):
    """The gateway's deployment: one `Ingress` with keys and routes. `serve_app.app` makes it a deployment."""

    def __init__(self, args: GatewayArgs, connect: Connect | None = None, host: str | None = None) -> None:
        join_serve_logs()
        store = open_store(quota_storage_uri(args, os.environ))
        super().__init__(connect, QuotaKeeper(store, on_store_failure=args.quota_on_store_failure))
        self._args = args
        self._tenants = TenantStore(path=find_file(args.tenants_file), host=listen_host() if host is None else host)
        self._readiness: _Readiness | None = None
        self._readiness_lock = asyncio.Lock()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray asks for the ASGI application after construction."""
        return self.asgi_app()

    def asgi_app(self) -> Starlette:
        """All routes of the gateway."""
        routes = [
            Route("/v1/infer", self._for_tenant(self._infer), methods=["POST"]),
            Route("/v1/embeddings", self._for_tenant(self._embeddings), methods=["POST"]),
            Route("/v1/models", self._for_tenant(self._models), methods=["GET"]),
            Route("/v1/stats", self._for_tenant(self._stats), methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/ready", self._ready, methods=["GET"]),
        ]
        app = Starlette(
            routes=routes,
            exception_handlers={
                TokenServeError: _on_error,
                HTTPException: self._on_no_route,
                Exception: _on_unforeseen,
            },
        )
        # A path with a slash too many is another path, not a hint.
        app.router.redirect_slashes = False
        return app

    async def check_health(self) -> None:
        """Raise when the ingress could not serve: it has no settings."""
        _ = self.settings

    # ---- who -----------------------------------------------------------------------------------------------------

    def _for_tenant(self, endpoint: Callable[[Request, Tenant], Awaitable[Response]]) -> Endpoint:
        async def authenticated(request: Request) -> Response:
            # Before anything of the body is read.
            tenant = self._authenticate(request)
            refuse_proxy_headers(request)
            return await self._while_authentic(request, endpoint(request, tenant))

        return authenticated

    async def _while_authentic(self, request: Request, work: Awaitable[Response]) -> Response:
        """The outcome of `work`, which ends in Unauthorized when the key is revoked meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=CHECK_INTERVAL_S)
                if not task.done():
                    self._authenticate(request)
        finally:
            # Also when the client left: whatever waits on its behalf is called off.
            task.cancel()
        return task.result()

    def _authenticate(self, request: Request) -> Tenant:
        key = key_of(request.scope["headers"])
        if key is None:
            raise Unauthorized()
        return self._tenants.ring(time.monotonic()).authenticate(key)

    async def _on_no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for HTTPException"
        try:
            self._authenticate(request)
        except Unauthorized as unauthorized:
            return error_response(unauthorized)
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            return error_response(MethodNotAllowed(", ".join(sorted(allowed.split(", ")))))
        return error_response(RouteNotFound())

    # ---- endpoints -----------------------------------------------------------------------------------------------

    async def _infer(self, request: Request, tenant: Tenant) -> Response:
        timeout_s = header_timeout_s(request)
        infer_request, ids = native.parse(await self._json(request), tenant, self.settings)
        return json_response(native.render(await self.infer(within(infer_request, timeout_s)), ids))

    async def _embeddings(self, request: Request, tenant: Tenant) -> Response:
        timeout_s = header_timeout_s(request)
        infer_request, fields = openai.parse(await self._json(request), tenant, self.settings)
        live = self.resolve(tenant, infer_request.revision, param="model")
        openai.check_dimensions(fields.dimensions, live.info)
        return json_response(openai.render(await self.infer(within(infer_request, timeout_s)), fields))

    async def _models(self, request: Request, tenant: Tenant) -> Response:
        entries = []
        for revision in self.usable(tenant):
            try:
                info = self.directory.get(revision).info
            except RevisionUnavailable:
                continue
            entries.append(openai.model_entry(info, self.aliases_of(revision)))
        return json_response({"object": "list", "data": entries})

    async def _stats(self, request: Request, tenant: Tenant) -> Response:
        if tenant.is_admin:
            return json_response(await admin_stats(self))
        return json_response(await tenant_stats(self, tenant))

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "up"})

    async def _ready(self, request: Request) -> Response:
        statuses = await self._statuses()
        is_ready = bool(statuses) and all(status.is_ready for status in statuses)
        body: dict[str, object] = {"ready": is_ready}
        if self._args.public_readiness_details or self._is_known(request):
            body["revisions"] = {
                status.revision: {"ready": status.is_ready, "reason": status.reason} for status in statuses
            }
        headers = {} if is_ready else {"Retry-After": "1"}
        return json_response(body, status=200 if is_ready else 503, headers=headers)

    # ---- parts ---------------------------------------------------------------------------------------------------

    async def _json(self, request: Request) -> object:
        return await read_json(request, max_bytes=self._args.max_body_bytes, timeout_s=self._args.body_timeout_s)

    async def _statuses(self) -> list[RevisionStatus]:
        async with self._readiness_lock:
            now = time.monotonic()
            if self._readiness is None or now - self._readiness.at >= READY_FRESH_S:
                statuses = await self.status(self.directory.names())
                self._readiness = _Readiness(time.monotonic(), statuses)
            return self._readiness.statuses

    def _is_known(self, request: Request) -> bool:
        try:
            self._authenticate(request)
        except Unauthorized:
            return False
        return True


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TokenServeError), "registered for TokenServeError"
    return error_response(error)


async def _on_unforeseen(request: Request, error: Exception) -> Response:
    return internal_error_response()

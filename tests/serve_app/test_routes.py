"""Who gets what from which path: a table over the routes of the running application."""

from typing import Any

import pytest

from tests.serve_app.fakes import ACME, ADMIN, GLOBEX, Server, error_of, native, openai

CALLERS: dict[str, str | None] = {
    "no key": None,
    "bad key": "not-a-key",
    "own key": ACME,
    "other tenant's key": GLOBEX,
    "admin key": ADMIN,
}
# Status for each caller, in the order above. HEAD comes with GET.
ACCESS: dict[tuple[str, str], tuple[int, int, int, int, int]] = {
    ("POST", "/v1/infer"): (401, 401, 200, 404, 200),
    ("POST", "/v1/embeddings"): (401, 401, 200, 404, 200),
    ("GET", "/v1/models"): (401, 401, 200, 200, 200),
    ("HEAD", "/v1/models"): (401, 401, 200, 200, 200),
    ("GET", "/v1/stats"): (401, 401, 200, 200, 200),
    ("HEAD", "/v1/stats"): (401, 401, 200, 200, 200),
    ("GET", "/health"): (200, 200, 200, 200, 200),
    ("HEAD", "/health"): (200, 200, 200, 200, 200),
    ("GET", "/ready"): (503, 503, 503, 503, 503),
    ("HEAD", "/ready"): (503, 503, 503, 503, 503),
}
PUBLIC = {"/health", "/ready"}
BODIES: dict[str, Any] = {"/v1/infer": native("the"), "/v1/embeddings": openai("the")}

ROWS = [
    pytest.param(method, path, key, status, id=f"{method} {path} with {name}")
    for (method, path), statuses in ACCESS.items()
    for (name, key), status in zip(CALLERS.items(), statuses, strict=True)
]


def test_every_route_has_a_row(server: Server) -> None:
    """A new route fails here until somebody has written down who may use it."""
    assert server.routes() == set(ACCESS)


@pytest.mark.parametrize(("method", "path", "key", "status"), ROWS)
def test_bl_201_access(method: str, path: str, key: str | None, status: int, server: Server) -> None:
    """ACC-06, S0-85: every path answers every caller as the table says, and only an answer has reached a model."""
    response = server.run(server.send(method, path, BODIES.get(path), key=key))
    assert response.status_code == status
    assert server.num_calls() == (status == 200 and path in BODIES)


@pytest.mark.parametrize("prefix", ["/llm", "/v1", "/health"])
@pytest.mark.parametrize("path", sorted({path for _, path in ACCESS}))
def test_bl_202_prefix_of_a_proxy_changes_nothing(prefix: str, path: str, server: Server) -> None:
    """Behind a proxy that announces or keeps a prefix, the matched route decides whether a key is needed."""
    announced = [(b"x-forwarded-prefix", prefix.encode())]
    kept = {"root_path": prefix, "path": prefix + path, "headers": announced}
    stripped = {"root_path": prefix, "path": path, "headers": announced}
    method = "POST" if path in BODIES else "GET"
    statuses = {server.run(server.asgi({"method": method, **scope}))[0]["status"] for scope in (kept, stripped)}
    assert statuses <= ({200, 503, 401} if path in PUBLIC else {401})
    assert server.num_calls() == 0


PATHS = [
    "/",
    "//",
    "//v1/infer",
    "/v1//infer",
    "/v1/infer/",
    "/v1/infer//",
    "/v1/infer/x",
    "/v1/infer.json",
    "/v1/infer;x=y",
    "/v1/./infer",
    "/v1/x/../infer",
    "/health/../v1/infer",
    "/health/v1/infer",
    "/health/",
    "//health",
    "/ready/",
    "/V1/INFER",
    "/v1/Infer",
    "/v1",
    "/v1/",
    "/v1/infer\x00",
    "/v1/infer%00",
    "/v1/infer\n",
    "/v1/infer ",
    "/v1/%69nfer",
    "/v1%2Finfer",
    "/%76%31/infer",
    "/v1/%2e%2e/v1/infer",
    "/v1/%2e/infer",
    "/v1\\infer",
    "/minilm-v1",
    "/minilm-v1/v1/infer",
    "/v2/models",
    "/docs",
    "/openapi.json",
    "/metrics",
    "/-/routes",
    "/-/healthz",
    "/static/../tenants.yaml",
    "/.env",
]


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS"])
@pytest.mark.parametrize("path", PATHS, ids=ascii)
def test_path_variants_need_a_key(path: str, method: str, server: Server) -> None:
    """However a path is written, without a key it is 401, and no model is reached."""
    (start, *_) = server.run(server.asgi({"method": method, "path": path, "raw_path": path.encode()}))
    assert start["status"] == 401
    assert (b"www-authenticate", b'Bearer realm="raggedserve"') in start["headers"]
    assert server.num_calls() == 0


@pytest.mark.parametrize(
    "encoded", ["/v1/%69nfer", "/v1%2Finfer", "/%76%31/infer", "/v1/%2e%2e/v1/infer", "//v1/infer"]
)
def test_encoded_paths_need_a_key(encoded: str, server: Server) -> None:
    """Also when the server in front has decoded the path, as HTTP servers do."""
    error_of(server.post(encoded, native("the"), key=None), 401)
    assert server.num_calls() == 0


@pytest.mark.parametrize("path", PATHS[:12], ids=ascii)
def test_path_variants_with_a_key_do_not_exist(path: str, server: Server) -> None:
    """With a key a path with a slash too many is an unknown path, and is not redirected."""
    headers = [(b"authorization", f"Bearer {ACME}".encode())]
    start, body = server.run(server.asgi({"method": "POST", "path": path, "headers": headers}))
    assert start["status"] == 404
    assert b'"code":"path_not_found"' in body["body"]
    assert server.num_calls() == 0


OTHER_METHODS = ["PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "CONNECT", "BREW"]
WRONG_METHODS = [
    pytest.param(method, path, allowed, id=f"{method} {path}")
    for path, allowed in {
        "/v1/infer": {"POST"},
        "/v1/embeddings": {"POST"},
        "/v1/models": {"GET", "HEAD"},
        "/v1/stats": {"GET", "HEAD"},
        "/health": {"GET", "HEAD"},
        "/ready": {"GET", "HEAD"},
    }.items()
    for method in [*OTHER_METHODS, *({"GET", "HEAD", "POST"} - allowed)]
]


@pytest.mark.parametrize(("method", "path", "allowed"), WRONG_METHODS)
def test_other_methods(method: str, path: str, allowed: set[str], server: Server) -> None:
    """Another method is 401 without a key, and with one 405 that names what would work."""
    without = server.run(server.send(method, path, key=None))
    response = server.run(server.send(method, path))
    assert without.status_code == 401
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == allowed
    assert server.num_calls() == 0


def test_wrong_method_has_the_one_error_shape(server: Server) -> None:
    """405 has a body like every other error."""
    error = error_of(server.run(server.send("PUT", "/v1/infer")), 405)
    assert (error["code"], error["message"], error["param"]) == ("method_not_allowed", "this path takes POST", None)


def test_websockets_are_closed(server: Server) -> None:
    """There is nothing to talk to over a web socket."""
    scope = {"type": "websocket", "path": "/v1/infer", "subprotocols": []}
    (message,) = server.run(server.asgi(scope, [{"type": "websocket.connect"}]))
    assert message["type"] == "websocket.close"


def test_unforeseen_error_says_nothing(server: Server) -> None:
    """An error that is not ours is 500 in the one shape, without its text."""
    server.bucket().failures.append(RuntimeError("/srv/secret/file.py [101, 7592]"))
    error = error_of(server.post("/v1/infer", native("the")), 500)
    assert error == {
        "code": "internal_error",
        "message": "the server failed on this request",
        "type": "server_error",
        "param": None,
    }


def test_health_is_the_process(server: Server) -> None:
    """Up means that the process answers; models are /ready's business."""
    assert server.get("/health", key=None).json() == {"status": "up"}


def test_ingress_is_healthy_with_settings(server: Server) -> None:
    """Ray's health check passes once there is a user_config."""
    server.run(server.ingress.check_health())

"""Every error of ours has a row in the one table, and looks the same on the wire."""

import importlib
import json
import pkgutil
from collections.abc import Iterator

import pytest

import batching
import deployments
import serve_app
from batching.errors import (
    DeadlineExceeded,
    Draining,
    GroupLimit,
    InputTooLong,
    InvalidRequest,
    Overloaded,
    QueueFull,
    QuotaExceeded,
    QuotaStoreDown,
    ReplicaLost,
    RevisionUnavailable,
    TokenServeError,
)
from serve_app.auth import Unauthorized
from serve_app.http_errors import ERROR_TABLE, MethodNotAllowed, error_response

OURS = (batching, deployments, serve_app)
TYPES = {
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "rate_limit_error",
    "overloaded_error",
    "server_error",
}


def _subclasses(base: type[TokenServeError]) -> Iterator[type[TokenServeError]]:
    for subclass in base.__subclasses__():
        # Ray makes mixtures of our classes and its own as errors arrive; they are unwrapped before they get here.
        if subclass.__module__.partition(".")[0] in {package.__name__ for package in OURS}:
            yield subclass
            yield from _subclasses(subclass)


def test_every_error_has_a_row() -> None:
    """A new error fails here until its status and code are written down, and no row is left without its error."""
    for package in OURS:
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    assert set(_subclasses(TokenServeError)) == set(ERROR_TABLE)


def test_codes_are_stable_and_different() -> None:
    """A code belongs to one error and is written in one style."""
    codes = [row.code for row in ERROR_TABLE.values()]
    assert len(set(codes)) == len(codes)
    assert all(code == code.lower() and code.replace("_", "").isalpha() for code in codes)
    assert {row.type for row in ERROR_TABLE.values()} <= TYPES


@pytest.mark.parametrize("error", ERROR_TABLE, ids=lambda error: error.__name__)
def test_status_and_type_agree(error: type[TokenServeError]) -> None:
    """Errors of the client are 4xx and errors of the server 5xx; overload is never a plain 500 (BL-093)."""
    row = ERROR_TABLE[error]
    assert (row.status >= 500) is (row.type in {"server_error", "overloaded_error"})
    assert (row.status in {429, 503}) >= issubclass(error, Overloaded)


@pytest.mark.parametrize(
    ("error", "retry_after"),
    [
        (Overloaded(0.0), "1"),
        (Overloaded(1.0), "1"),
        (QueueFull(8, 1.01), "2"),
        (GroupLimit(8, 60.0), "60"),
        (RevisionUnavailable("minilm@v1", 1.0), "1"),
        (ReplicaLost(1.0), "1"),
        (Draining(), "1"),
        (QuotaExceeded("tokens_per_s", 2000.0, 3.2), "4"),
        (QuotaStoreDown("quota_on_store_failure", 1.0), "1"),
        (DeadlineExceeded(2.0), None),
        (InvalidRequest("inputs", "is wrong"), None),
    ],
    ids=lambda value: repr(value),
)
def test_retry_after_is_whole_seconds_rounded_up(error: TokenServeError, retry_after: str | None) -> None:
    """Whoever may come again is told when, never too early and never 0."""
    assert error_response(error).headers.get("retry-after") == retry_after


def test_shape() -> None:
    """One JSON object with code, message, type and param."""
    response = error_response(InputTooLong("inputs[3]", 300, 256))
    assert (response.status_code, response.media_type) == (400, "application/json")
    assert json.loads(response.body) == {
        "error": {
            "code": "input_too_long",
            "message": "`inputs[3]` has 300 tokens; the limit is 256",
            "type": "invalid_request_error",
            "param": "inputs[3]",
        }
    }


def test_headers_that_a_status_asks_for() -> None:
    """401 says how to authenticate, and 405 what is allowed."""
    assert error_response(Unauthorized()).headers["www-authenticate"] == 'Bearer realm="raggedserve"'
    assert error_response(MethodNotAllowed("POST")).headers["allow"] == "POST"

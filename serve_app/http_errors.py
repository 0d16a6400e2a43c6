"""How every error looks over HTTP: one table from class to status, and the one JSON shape.

{"error": {"code": "input_too_long", "message": "...", "type": "invalid_request_error", "param": "inputs[3]"}}
"""

import math
from dataclasses import dataclass

import orjson
from starlette.responses import Response

from batching import errors
from batching.errors import TokenServeError
from batching.padding import MalformedOutput
from serve_app.auth import Unauthorized


class MalformedBody(TokenServeError):
    """The body is not a JSON object that this server can read; `reason` never repeats it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    @property
    def detail(self) -> str:
        """Say what is wrong."""
        return f"the request body {self.reason}"


class BodyTooLarge(TokenServeError):
    """More than `limit_bytes` of body."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.limit_bytes = limit_bytes

    @property
    def detail(self) -> str:
        """Name the limit and its setting."""
        return f"the request body is larger than {self.limit_bytes} bytes (setting max_body_bytes)"


class BodyTimeout(TokenServeError):
    """The body did not arrive in time."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(limit_s)
        self.limit_s = limit_s

    @property
    def detail(self) -> str:
        """Name the limit."""
        return f"the request body did not arrive within {self.limit_s:g} s"


class UnsupportedMedia(TokenServeError):
    """A content type or encoding that is not accepted; `reason` says what to send."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    @property
    def detail(self) -> str:
        """Say what to send."""
        return self.reason


class RouteNotFound(TokenServeError):
    """No such path."""

    @property
    def detail(self) -> str:
        """Name nothing: the path may hold anything."""
        return "there is no such path"


class MethodNotAllowed(TokenServeError):
    """The path exists, the method does not; `allowed` is for the Allow header."""

    def __init__(self, allowed: str) -> None:
        super().__init__(allowed)
        self.allowed = allowed

    @property
    def detail(self) -> str:
        """Name what would work."""
        return f"this path takes {self.allowed}"


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """Status, stable code, and type in OpenAI's sense."""

    status: int
    code: str
    type: str


INVALID = "invalid_request_error"
SERVER = "server_error"
RATE_LIMIT = "rate_limit_error"

ERROR_TABLE: dict[type[TokenServeError], ErrorRow] = {
    MalformedBody: ErrorRow(400, "malformed_body", INVALID),
    errors.InvalidRequest: ErrorRow(400, "invalid_request", INVALID),
    errors.EmptyInput: ErrorRow(400, "empty_input", INVALID),
    errors.InputTooLong: ErrorRow(400, "input_too_long", INVALID),
    errors.TokenIdOutOfRange: ErrorRow(400, "token_id_out_of_range", INVALID),
    errors.RequestTooLarge: ErrorRow(400, "request_too_large", INVALID),
    Unauthorized: ErrorRow(401, "invalid_api_key", "authentication_error"),
    errors.UnknownRevision: ErrorRow(404, "revision_not_found", INVALID),
    RouteNotFound: ErrorRow(404, "path_not_found", INVALID),
    MethodNotAllowed: ErrorRow(405, "method_not_allowed", INVALID),
    BodyTimeout: ErrorRow(408, "body_timeout", INVALID),
    BodyTooLarge: ErrorRow(413, "body_too_large", INVALID),
    UnsupportedMedia: ErrorRow(415, "unsupported_media_type", INVALID),
    errors.OutOfMemory: ErrorRow(413, "out_of_memory", INVALID),
    errors.TenantOverShare: ErrorRow(429, "tenant_over_share", RATE_LIMIT),
    errors.QuotaExceeded: ErrorRow(429, "quota_exceeded", RATE_LIMIT),
    errors.ForwardFailed: ErrorRow(500, "forward_failed", SERVER),
    MalformedOutput: ErrorRow(500, "malformed_output", SERVER),
    errors.Overloaded: ErrorRow(503, "overloaded", "overloaded_error"),
    errors.QueueFull: ErrorRow(503, "queue_full", "overloaded_error"),
    errors.GroupLimit: ErrorRow(503, "group_limit", "overloaded_error"),
    errors.WaitTooLong: ErrorRow(503, "wait_too_long", "overloaded_error"),
    errors.RevisionUnavailable: ErrorRow(503, "revision_unavailable", SERVER),
    errors.ReplicaLost: ErrorRow(503, "replica_lost", SERVER),
    errors.DeviceLost: ErrorRow(503, "device_lost", SERVER),
    errors.Draining: ErrorRow(503, "draining", SERVER),
    errors.QuotaStoreDown: ErrorRow(503, "quota_store_down", SERVER),
    errors.DeadlineExceeded: ErrorRow(504, "deadline_exceeded", SERVER),
    errors.DeadlineUnreachable: ErrorRow(504, "deadline_unreachable", SERVER),
}
"""The README repeats this table; a test compares them."""

INTERNAL_ERROR = ErrorRow(500, "internal_error", SERVER)
"""For errors that are not ours: never their text."""


def error_body(error: TokenServeError) -> dict[str, str | None]:
    """The inner object of the one JSON shape; also used for rows of a partial answer."""
    row = ERROR_TABLE[type(error)]
    return {"code": row.code, "message": error.detail, "type": row.type, "param": error.param}


def error_response(error: TokenServeError) -> Response:
    """The reply for `error`, with the headers that its status asks for."""
    headers: dict[str, str] = {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = 'Bearer realm="raggedserve"'
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = error.allowed
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    status = ERROR_TABLE[type(error)].status
    return json_response({"error": error_body(error)}, status=status, headers=headers)


def internal_error_response() -> Response:
    """The reply for anything unforeseen."""
    row = INTERNAL_ERROR
    body = {"code": row.code, "message": "the server failed on this request", "type": row.type, "param": None}
    return json_response({"error": body}, status=row.status)


def json_response(content: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Encode with orjson, which writes float32 arrays directly and in their shortest form."""
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status_code=status, headers=headers, media_type="application/json")

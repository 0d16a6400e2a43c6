"""Request headers that every route understands, and those that no client may send."""

import math
import re
from dataclasses import replace

from starlette.requests import Request

from batching.errors import InvalidRequest
from deployments.requests import InferRequest

TIMEOUT_HEADER = "X-Request-Timeout-Ms"
NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?")
"""As in JSON: what Python's float reads beside it, such as 1_000 and inf, is not meant."""

PROXY_HEADERS = ("x-request-timeout-seconds", "x-request-disconnect-disabled")
"""Ray's proxies obey these from anybody: one switches their timeout off, the other their watch for lost clients."""


def header_timeout_s(request: Request) -> float | None:
    """The time that the header gives the request. Raises InvalidRequest for anything but one positive number."""
    values = request.headers.getlist(TIMEOUT_HEADER)
    if not values:
        return None
    timeout_ms = math.nan
    if len(values) == 1 and NUMBER.fullmatch(values[0].strip()):
        timeout_ms = float(values[0])
    if not 0 < timeout_ms < math.inf:
        raise InvalidRequest(TIMEOUT_HEADER, "must be one number of milliseconds above 0")
    return timeout_ms / 1000


def within(request: InferRequest, timeout_s: float | None) -> InferRequest:
    """`request` with the time of the header; where the body names one too, the shorter counts."""
    if timeout_s is None:
        return request
    if request.timeout_s is not None and request.timeout_s <= timeout_s:
        return request
    return replace(request, timeout_s=timeout_s, timeout_param=TIMEOUT_HEADER)


def refuse_proxy_headers(request: Request) -> None:
    """Raise InvalidRequest for a header that would let a client hold a request open beyond its time."""
    for name in PROXY_HEADERS:
        if name in request.headers:
            raise InvalidRequest(
                name, f"is not accepted from clients; the time of a request goes into {TIMEOUT_HEADER}"
            )

"""Bytes to a checked object: the body of a request, read with a limit and parsed strictly."""

import asyncio
from typing import TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from batching.errors import InvalidRequest
from serve_app.http_errors import BodyTimeout, BodyTooLarge, MalformedBody, UnsupportedMedia

MAX_FIELDS = 64

Fields = TypeVar("Fields", bound=BaseModel)


async def read_json(request: Request, *, max_bytes: int, timeout_s: float) -> object:
    """The JSON value of the body.

    Raises UnsupportedMedia, BodyTooLarge, BodyTimeout, MalformedBody. JSON is RFC 8259 as orjson reads it: no NaN or
    Infinity, no lone surrogates, valid UTF-8, at most 1024 levels deep.
    """
    _check_media(request)
    body = await _read(request, max_bytes=max_bytes, timeout_s=timeout_s)
    if not body:
        raise MalformedBody("is empty; send a JSON object")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # Not the error's text: it may quote what it could not read.
        raise MalformedBody(f"is not valid JSON (line {error.lineno}, column {error.colno})") from None


def validated(model: type[Fields], body: object) -> Fields:
    """`body` as `model`. Raises InvalidRequest for the first field that is wrong, and never repeats its value."""
    if not isinstance(body, dict):
        raise MalformedBody("must be a JSON object")
    if len(body) > MAX_FIELDS:
        # Before every one of a million unknown fields becomes an error object.
        raise InvalidRequest("body", f"has {len(body)} fields; there are not that many")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise InvalidRequest(_path(first["loc"]), _reason(first["type"], first["msg"])) from None


def _check_media(request: Request) -> None:
    content_types = request.headers.getlist("content-type")
    media_type = content_types[0].partition(";")[0].strip().lower() if len(content_types) == 1 else ""
    if media_type != "application/json":
        raise UnsupportedMedia("send the body as JSON, with the header `Content-Type: application/json`")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMedia("compressed bodies are not accepted; send the body without `Content-Encoding`")


async def _read(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise BodyTooLarge(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise BodyTooLarge(max_bytes)
    except TimeoutError:
        raise BodyTimeout(timeout_s) from None
    except ClientDisconnect:
        raise MalformedBody("ended early") from None
    return bytes(body)


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)[:64]
    return path or "body"


def _reason(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "is not a known field"
    if kind == "missing":
        return "is missing"
    return "is wrong: " + message[0].lower() + message[1:]

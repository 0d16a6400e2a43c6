"""The native dialect, `POST /v1/infer`: parse the body into an `InferRequest`, render an `InferAnswer`."""

from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from batching.errors import EmptyInput, InvalidRequest, RequestTooLarge
from batching.request import MAX_TOKEN_ID
from batching.row import Priority
from deployments.requests import InferAnswer, InferRequest, Tenant, check_num_rows
from deployments.settings import GatewaySettings
from deployments.wire import TokenIds
from serve_app.body import validated
from serve_app.http_errors import error_body

MAX_ID_LENGTH = 256


class NativeBody(BaseModel):
    """The request body; see the README for an example."""

    model_config = ConfigDict(extra="forbid", strict=True)

    revision: Annotated[str, Field(min_length=1, max_length=256)]
    inputs: list[Any]
    truncate: bool = False
    timeout_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    priority: Priority | None = None
    partial: bool = False


def parse(body: object, tenant: Tenant, settings: GatewaySettings) -> tuple[InferRequest, list[str | None]]:
    """The request, and the client's id of each input. Raises InvalidRequest, EmptyInput."""
    fields = validated(NativeBody, body)
    if not fields.inputs:
        raise EmptyInput("inputs")
    check_size(fields.inputs, "inputs", settings)
    params = [f"inputs[{index}]" for index in range(len(fields.inputs))]
    items = [_item(value, param) for value, param in zip(fields.inputs, params, strict=True)]
    request = InferRequest(
        tenant=tenant,
        revision=fields.revision,
        inputs=[value for _, value in items],
        params=params,
        truncate=fields.truncate,
        partial=fields.partial,
        timeout_s=None if fields.timeout_ms is None else fields.timeout_ms / 1000,
        priority=fields.priority,
    )
    return request, [row_id for row_id, _ in items]


def render(answer: InferAnswer, ids: list[str | None]) -> dict[str, object]:
    """The answer body; arrays stay arrays until the JSON is written."""
    return {
        "revision": answer.live.info.revision,
        "outputs": [_output(answer, index, row_id) for index, row_id in enumerate(ids)],
        "usage": {"num_tokens": sum(answer.num_tokens), "computed_tokens": answer.computed_tokens},
    }


def check_size(inputs: list[Any], param: str, settings: GatewaySettings) -> None:
    """Raise RequestTooLarge for more inputs, or more ids in one, than any request may hold: before work per item."""
    check_num_rows(len(inputs), settings, param=param)
    num_ids = sum(len(value) for value in inputs if isinstance(value, list))
    if num_ids > settings.max_tokens_per_request:
        raise RequestTooLarge(param, "tokens", num_ids, settings.max_tokens_per_request, "max_tokens_per_request")


def parse_token_ids(value: list[Any], param: str) -> TokenIds:
    """Exact ints as an array [n] int32; whether the model knows them is checked with its vocabulary, row by row.

    Integers beyond int32 become ids that no vocabulary has, so that they are refused there and never wrap around.
    Raises InvalidRequest for anything that is not an int.
    """
    for index, token_id in enumerate(value):
        if type(token_id) is not int:
            raise InvalidRequest(f"{param}[{index}]", "must be an integer token id")
    try:
        wide = np.array(value, dtype=np.int64)
    except OverflowError:
        wide = np.array([max(-1, min(token_id, MAX_TOKEN_ID)) for token_id in value], dtype=np.int64)
    return wide.clip(-1, MAX_TOKEN_ID).astype(np.int32)


def _item(value: object, param: str) -> tuple[str | None, str | TokenIds]:
    if isinstance(value, str):
        return None, value
    if isinstance(value, list):
        return None, parse_token_ids(value, param)
    if not isinstance(value, dict):
        raise InvalidRequest(param, "must be a string, a list of token ids, or an object with `text` or `token_ids`")
    unknown = set(value) - {"id", "text", "token_ids"}
    if unknown or ("text" in value) == ("token_ids" in value):
        raise InvalidRequest(param, "must have exactly one of `text` and `token_ids`, and beside it only `id`")
    row_id = value.get("id")
    if row_id is not None and not (isinstance(row_id, str) and 1 <= len(row_id) <= MAX_ID_LENGTH):
        raise InvalidRequest(f"{param}.id", f"must be a string of 1 to {MAX_ID_LENGTH} characters")
    if "token_ids" in value:
        if not isinstance(value["token_ids"], list):
            raise InvalidRequest(f"{param}.token_ids", "must be a list of integers")
        return row_id, parse_token_ids(value["token_ids"], f"{param}.token_ids")
    if not isinstance(value["text"], str):
        raise InvalidRequest(f"{param}.text", "must be a string")
    return row_id, value["text"]


def _output(answer: InferAnswer, index: int, row_id: str | None) -> dict[str, object]:
    error = answer.errors.get(index)
    if error is not None:
        body = error_body(error)
        return {"id": row_id, "error": {"code": body["code"], "message": body["message"]}}
    output: dict[str, object] = {
        "id": row_id,
        "num_tokens": answer.num_tokens[index],
        "embedding": answer.values[index],
    }
    if index in answer.truncated:
        output["truncated"] = True
    return output

"""OpenAI's dialect, `POST /v1/embeddings` and `GET /v1/models`."""

import base64
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from batching.errors import EmptyInput, InvalidRequest
from deployments.requests import InferAnswer, InferRequest, Tenant
from deployments.settings import GatewaySettings
from deployments.wire import RevisionInfo, TokenIds
from serve_app.body import validated
from serve_app.native import check_size, parse_token_ids


class EmbeddingsBody(BaseModel):
    """The request body of OpenAI's API; `user` is accepted and not used."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input: Any
    model: Annotated[str, Field(min_length=1, max_length=256)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None


def parse(body: object, tenant: Tenant, settings: GatewaySettings) -> tuple[InferRequest, EmbeddingsBody]:
    """The request and its other fields. Raises InvalidRequest, EmptyInput."""
    fields = validated(EmbeddingsBody, body)
    inputs, params = _inputs(fields.input, settings)
    request = InferRequest(
        tenant=tenant,
        revision=fields.model,
        inputs=inputs,
        params=params,
        revision_param="model",
        inputs_param="input",
    )
    return request, fields


def check_dimensions(dimensions: int | None, info: RevisionInfo) -> None:
    """Raise InvalidRequest unless the model can shorten its vectors to `dimensions`."""
    if dimensions is None or dimensions == info.dimension:
        return
    if dimensions > info.dimension:
        raise InvalidRequest("dimensions", f"must be from 1 to {info.dimension}")
    if not info.supports_dimensions:
        raise InvalidRequest("dimensions", f"must be {info.dimension}: this model was not trained for shorter vectors")


def render(answer: InferAnswer, fields: EmbeddingsBody) -> dict[str, object]:
    """The answer body, `data` in the order of the inputs."""
    values = _shortened(answer.values, fields.dimensions)
    num_tokens = sum(answer.num_tokens)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(row, fields.encoding_format)}
            for index, row in enumerate(values)
        ],
        "model": answer.live.info.revision,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def model_entry(info: RevisionInfo, aliases: list[str]) -> dict[str, object]:
    """One entry of the model list: OpenAI's four fields, and what a caller must know to send good requests."""
    return {
        "id": info.revision,
        "object": "model",
        "created": info.created,
        "owned_by": "raggedserve",
        "revision": info.revision,
        "aliases": aliases,
        "task": info.task,
        "dimension": info.dimension,
        "max_tokens": info.max_tokens,
        "buckets": [bucket.max_tokens for bucket in info.buckets],
        "vocab_size": info.vocab_size,
        "layout": info.layout,
        "dtype": info.dtype,
        "attention_backend": info.attention_backend,
    }


def _inputs(value: object, settings: GatewaySettings) -> tuple[list[str | TokenIds], list[str]]:
    if isinstance(value, str):
        return [value], ["input"]
    if not isinstance(value, list):
        raise InvalidRequest("input", "must be a string, a list of strings, token ids, or a list of token id lists")
    if not value:
        raise EmptyInput("input")
    if type(value[0]) is int:  # [1, 2, 3] is one input, not three
        check_size([value], "input", settings)
        return [parse_token_ids(value, "input")], ["input"]
    check_size(value, "input", settings)
    params = [f"input[{index}]" for index in range(len(value))]
    return [_one(item, param) for item, param in zip(value, params, strict=True)], params


def _one(item: object, param: str) -> str | TokenIds:
    if isinstance(item, str):
        return item
    if isinstance(item, list):
        return parse_token_ids(item, param)
    raise InvalidRequest(param, "must be a string or a list of token ids")


def _shortened(values: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    if dimensions is None or dimensions == values.shape[1]:
        return values
    prefix = values[:, :dimensions]
    # A prefix of a unit vector is shorter than one: cut first, normalise after.
    norms = np.linalg.norm(prefix, axis=1, keepdims=True)
    shortened: NDArray[np.float32] = np.divide(prefix, norms, out=np.zeros_like(prefix), where=norms > 0)
    return shortened


def _encoded(row: NDArray[np.float32], encoding_format: str) -> object:
    if encoding_format == "base64":
        return base64.b64encode(row.astype("<f4", copy=False).tobytes()).decode("ascii")
    return row

"""The ceiling: packed forwards in one process, filled to the server's own limits, without Ray and without HTTP.

A process of its own, `python -m benchmarks.in_process` with an `InProcessSpec` as JSON on its input; on its output one
`Window` for token ids and one with tokenisation in the loop, which the server pays for as well.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batching.errors import TokenServeError
from benchmarks.table import Window
from benchmarks.workload import MIN_COSINE, Workload
from deployments.model import LoadedModel, ModelSpec, load_model
from deployments.settings import DEFAULT_CPU_TOKEN_BUDGET, DEFAULT_GPU_TOKEN_BUDGET, BucketSettings
from deployments.tokenization import InputEncoder
from deployments.wire import TokenIds

TEXTS_PER_CALL = 32
"""How many texts are tokenised at once, as in the larger requests to the server."""

IndexedRow = tuple[int, TokenIds]


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcessSpec:
    """Which model, on which texts, for how long each way."""

    model: str
    max_tokens: int
    workload: str
    warmup_s: float
    window_s: float
    first_text: int


def batches(rows: Iterable[IndexedRow], *, token_budget: int, max_rows: int) -> Iterator[list[IndexedRow]]:
    """Rows in their order, as many at a time as the limits allow."""
    batch: list[IndexedRow] = []
    num_tokens = 0
    for index, row in rows:
        if batch and (num_tokens + len(row) > token_budget or len(batch) == max_rows):
            yield batch
            batch, num_tokens = [], 0
        batch.append((index, row))
        num_tokens += len(row)
    if batch:
        yield batch


def run(spec: InProcessSpec) -> dict[str, Window]:
    """Measure both ways, one after the other."""
    workload = Workload.load(Path(spec.workload))
    loaded = load_model(ModelSpec(model=spec.model, max_tokens=spec.max_tokens))
    encoder = InputEncoder(loaded.tokenizer_json, max_tokens=spec.max_tokens, vocab_size=loaded.info.vocab_size)
    order = range(len(workload.texts))
    encoded = dict(_tokenised(encoder, workload, order))
    start = spec.first_text
    ids = ((index, encoded[index]) for index in islice(cycle(order), start, None))
    return {
        "ids": _measure(spec, workload, loaded, ids),
        "texts": _measure(spec, workload, loaded, _tokenised(encoder, workload, islice(cycle(order), start, None))),
    }


def _tokenised(encoder: InputEncoder, workload: Workload, order: Iterable[int]) -> Iterator[IndexedRow]:
    rest = iter(order)
    while part := list(islice(rest, TEXTS_PER_CALL)):
        names = [f"texts[{index}]" for index in part]
        outcomes = encoder.encode([workload.texts[index] for index in part], names, truncate=False)
        for index, outcome in zip(part, outcomes, strict=True):
            if isinstance(outcome, TokenServeError):
                raise outcome
            yield index, outcome.token_ids


def _measure(spec: InProcessSpec, workload: Workload, loaded: LoadedModel, rows: Iterable[IndexedRow]) -> Window:
    on_gpu = loaded.info.device.startswith("cuda")
    limits = BucketSettings().batch_limits(
        max_tokens=spec.max_tokens,
        default_token_budget=DEFAULT_GPU_TOKEN_BUDGET if on_gpu else DEFAULT_CPU_TOKEN_BUDGET,
    )
    stream = batches(rows, token_budget=limits.token_budget, max_rows=limits.max_rows)
    _forward_for(spec.warmup_s, stream, loaded)
    started = time.perf_counter()
    done = _forward_for(spec.window_s, stream, loaded)
    elapsed_s = time.perf_counter() - started
    cosines = np.concatenate([workload.cosines([index for index, _ in batch], values) for batch, values in done])
    return Window(
        tokens_per_s=sum(len(row) for batch, _ in done for _, row in batch) / elapsed_s,
        num_answers=len(cosines),
        lowest_cosine=float(cosines.min()),
        num_wrong=int((~(cosines >= MIN_COSINE)).sum()),
        rows_per_forward=len(cosines) / len(done),
    )


def _forward_for(
    seconds: float, stream: Iterator[list[IndexedRow]], loaded: LoadedModel
) -> Sequence[tuple[list[IndexedRow], NDArray[np.float32]]]:
    done = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        batch = next(stream)
        done.append((batch, loaded.forward([row for _, row in batch]).values))
    return done


if __name__ == "__main__":
    windows = run(InProcessSpec(**json.load(sys.stdin)))
    print(json.dumps({name: asdict(window) for name, window in windows.items()}))

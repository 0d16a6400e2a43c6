"""`python -m batching.demo --requests 32`: the groups at work on an untrained model.

The model doubles token ids. It shows shapes and order, and nothing about speed or meaning.
"""

import argparse
import asyncio
import random
import time
from concurrent.futures import ThreadPoolExecutor

from batching.groups import InferenceGroups, inference_groups
from batching.padding import ModelBatch
from batching.request import TokenPrediction, TokenRequest

MAX_IN_FLIGHT = 32
"""A producer is bounded below the 64 rows that a group lets wait."""


class DoublingModel:
    """Untrained: returns every token id times two."""

    def __call__(self, batch: ModelBatch) -> list[list[int]]:
        """One number per position, [B][W]."""
        return [[2 * token_id for token_id in row] for row in batch.input_ids]


def cohort(num_requests: int, *, seed: int = 0) -> list[TokenRequest]:
    """A finite set of requests of two tenants, 1 to 256 tokens each."""
    draw = random.Random(seed)
    return [
        TokenRequest(
            f"r{index}",
            draw.choice(["tenant-a", "tenant-b"]),
            "demo-v1",
            [draw.randrange(1000) for _ in range(draw.choice([draw.randint(1, 16), draw.randint(1, 64), 256]))],
        )
        for index in range(num_requests)
    ]


async def run(num_requests: int) -> int:
    """Run the cohort, print what the model saw, return how many requests were answered with their own values."""
    requests = cohort(num_requests)
    in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def process(groups: InferenceGroups, request: TokenRequest) -> TokenPrediction:
        async with in_flight:
            return await groups.process(request)

    started = time.perf_counter()
    with ThreadPoolExecutor(max_workers=1) as pool:
        async with inference_groups(DoublingModel(), executor=pool) as groups:
            predictions = await asyncio.gather(*(process(groups, request) for request in requests))
        elapsed_s = time.perf_counter() - started  # the drain included
    completed = sum(
        prediction.values == tuple(2 * token_id for token_id in request.token_ids)
        for request, prediction in zip(requests, predictions, strict=True)
    )
    print("model: untrained, doubles token ids")
    print("calls  rows  width")
    for (rows, width), calls in sorted(groups.call_shapes.items()):
        print(f"{calls:5d} {rows:5d} {width:6d}")
    print(f"completed {completed} of {num_requests} in {elapsed_s:.3f} s, drain included")
    return completed


def main() -> None:
    """Parse the command line; exit 1 unless every request came back right."""
    parser = argparse.ArgumentParser(prog="python -m batching.demo", description=__doc__)
    parser.add_argument("--requests", type=int, default=32, help="size of the cohort, 1 to 2048 (default: %(default)s)")
    num_requests = parser.parse_args().requests
    if not 1 <= num_requests <= 2048:
        parser.error("--requests must be from 1 to 2048")
    raise SystemExit(asyncio.run(run(num_requests)) != num_requests)


if __name__ == "__main__":
    main()

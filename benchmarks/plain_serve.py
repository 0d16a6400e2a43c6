"""The named baseline: what one writes first with Ray Serve, `@serve.batch` around `SentenceTransformer.encode`.

One deployment, HTTP and JSON, as in Ray's own guide to batching: texts are batched as they come, each batch is padded
to its longest text. It gets what the server gets: the same CPUs, threads and concurrency enough to fill its batches.
"""

import asyncio
import os
from typing import Any

from ray import serve
from ray.serve import Application
from starlette.requests import Request

MAX_BATCH_SIZE = 32
BATCH_WAIT_TIMEOUT_S = 0.01
MAX_ONGOING_REQUESTS = 100
NUM_CPUS = 0.1
"""What the server's deployments ask for, too; it limits nothing, threads are set below."""


class PlainEmbedder:
    """Answers `{"inputs": [texts]}` with the shape of `POST /v1/infer`, and any GET with readiness."""

    def __init__(self, model: str) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        # Ray sets OMP_NUM_THREADS from num_cpus; the server's replicas take every CPU as well.
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._model = SentenceTransformer(model, device="cpu", local_files_only=True)

    @serve.batch(  # type: ignore[untyped-decorator]  # mypy does not follow ray
        max_batch_size=MAX_BATCH_SIZE, batch_wait_timeout_s=BATCH_WAIT_TIMEOUT_S
    )
    async def embed(self, texts: list[str]) -> list[list[float]]:
        """One embedding per text; called with one text, runs with up to 32."""
        vectors: list[list[float]] = self._model.encode(texts, show_progress_bar=False).tolist()
        return vectors

    async def __call__(self, request: Request) -> dict[str, Any]:
        """One HTTP request."""
        if request.method == "GET":
            return {"ready": True}
        texts = (await request.json())["inputs"]
        embeddings = await asyncio.gather(*(self.embed(text) for text in texts))
        return {"outputs": [{"embedding": embedding} for embedding in embeddings]}


def app(args: dict[str, str]) -> Application:
    """What the file that `serve run` gets names; `args` has the model's folder as `model`."""
    deployment = serve.deployment(PlainEmbedder).options(
        max_ongoing_requests=MAX_ONGOING_REQUESTS, ray_actor_options={"num_cpus": NUM_CPUS}
    )
    return deployment.bind(args["model"])


def config(model: str) -> dict[str, Any]:
    """That file."""
    application = {
        "name": "plain",
        "route_prefix": "/",
        "import_path": "benchmarks.plain_serve:app",
        "args": {"model": model},
    }
    return {"proxy_location": "EveryNode", "applications": [application]}

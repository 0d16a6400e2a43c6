"""One server per module: its tokenizer takes longer to read than a test takes."""

from collections.abc import Iterator

import pytest

from tests.serve_app.fakes import Server


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Do not use this one: its fakes remember the test before."""
    with Server(tmp_path_factory.mktemp("gateway")) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    """A gateway with revisions minilm and other up and down not; its fakes are as new."""
    shared_server.reset()
    return shared_server

"""Which address counts when demo keys are judged."""

import pytest

from deployments import listen


def test_haproxy_listens_everywhere_whatever_the_file_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind HAProxy the configured host is not asked for: Ray binds to all interfaces."""
    monkeypatch.setattr(listen, "RAY_SERVE_ENABLE_HA_PROXY", True)
    assert listen.listen_host() == listen.ALL_INTERFACES

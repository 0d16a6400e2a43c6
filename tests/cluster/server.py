"""A real server for the tests: started the way users start it, changed through Serve's REST API, stopped by its id."""

import copy
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

REPOSITORY = Path(__file__).resolve().parent.parent.parent
START_TIMEOUT_S = 180.0
CHANGE_TIMEOUT_S = 120.0
POLL_S = 0.2

ACME = {"Authorization": "Bearer demo-acme-key"}
GLOBEX = {"X-API-Key": "demo-globex-key"}
ADMIN = {"X-API-Key": "demo-admin-key"}


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(condition: Callable[[], Any], *, timeout_s: float = CHANGE_TIMEOUT_S) -> Any:
    """The first true value of `condition`; fails after `timeout_s`. A wait for a state, never for a time."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {condition}"
        time.sleep(POLL_S)


def revision_app(name: str, revision: str, **args: object) -> dict[str, Any]:
    """One revision application of the bundled model, with Ray's slow defaults for stopping made quick."""
    buckets = args.get("buckets", [{"max_tokens": 256}])
    assert isinstance(buckets, list)
    return {
        "name": name,
        "route_prefix": None,
        "import_path": "serve_app.app:revision",
        "args": {
            "revision": revision,
            "model": "bundled/all-MiniLM-L6-v2",
            "task": "embed",
            "buckets": buckets,
            **args,
        },
        "deployments": [
            {"name": f"tokens-{bucket['max_tokens']}", "graceful_shutdown_wait_loop_s": 0.1} for bucket in buckets
        ],
    }


@dataclass
class Server:
    """One running server. `config` is what is deployed; change a copy and `deploy` it."""

    process: subprocess.Popen[bytes]
    port: int
    config: dict[str, Any]
    log: Path
    tenants_file: Path
    dashboard: str = ""
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    @property
    def url(self) -> str:
        """Base address."""
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when every configured revision answers."""

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                return self.client.get("/ready").json().get("ready") is True
            except (httpx.HTTPError, ValueError):
                return False

        eventually(is_ready, timeout_s=timeout_s)
        match = re.search(r"http://127\.0\.0\.1:\d+", self.log.read_text().split("dashboard at", 1)[1])
        assert match is not None
        self.dashboard = match.group()

    def applications(self) -> dict[str, Any]:
        """Serve's own report: status, message and replicas of each application."""
        answer = httpx.get(f"{self.dashboard}/api/serve/applications/", timeout=30)
        answer.raise_for_status()
        return dict(answer.json()["applications"])

    def pids(self, application: str) -> dict[str, set[int]]:
        """Process ids of the running replicas, by deployment."""
        deployments = self.applications()[application]["deployments"]
        return {
            name: {replica["pid"] for replica in deployment["replicas"] if replica["state"] == "RUNNING"}
            for name, deployment in deployments.items()
        }

    def deploy(self, config: dict[str, Any]) -> None:
        """Hand a config to Serve, as `serve deploy` does; returns at once."""
        answer = httpx.put(f"{self.dashboard}/api/serve/applications/", json=config, timeout=60)
        assert answer.status_code == 200, answer.text
        self.config = copy.deepcopy(config)

    def add_revision(self, application: str, revision: str) -> None:
        """Deploy one more revision of the demo model, and return when it answers."""
        config = copy.deepcopy(self.config)
        config["applications"].append(revision_app(application, revision))
        self.gateway_user_config(config)["revisions"][revision] = application
        self.deploy(config)
        eventually(lambda: self.infer(revision, ["a"], ACME).status_code == 200)

    def configure_bucket(self, application: str, user_config: dict[str, Any]) -> None:
        """Deploy other limits for the only bucket of a revision, and return when Serve has applied them."""
        config = copy.deepcopy(self.config)
        app = next(app for app in config["applications"] if app["name"] == application)
        app["deployments"][0]["user_config"] = user_config
        self.deploy(config)
        eventually(lambda: self.applications()[application]["status"] == "RUNNING")

    def gateway_user_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """The part of `config` that holds revisions and aliases, to be changed in place."""
        user_config = config["applications"][0]["deployments"][0]["user_config"]
        assert isinstance(user_config, dict)
        return user_config

    def infer(self, revision: str, inputs: list[Any], headers: dict[str, str], **fields: Any) -> httpx.Response:
        """One native request."""
        return self.client.post("/v1/infer", json={"revision": revision, "inputs": inputs, **fields}, headers=headers)

    def stats(self, revision: str, deployment: str) -> dict[str, Any]:
        """Counters of one bucket deployment."""
        answer = self.client.get("/v1/stats", headers=ADMIN)
        return dict(answer.json()["revisions"][revision][deployment])

    def stop(self) -> None:
        """End the server and everything it started."""
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=10)


def start(folder: Path) -> Server:
    """Start serve_config.yaml on a free port, with a tenants file that the tests may change."""
    port = free_port()
    tenants_file = folder / "tenants.yaml"
    tenants_file.write_text((REPOSITORY / "tenants.demo.yaml").read_text())
    config = yaml.safe_load((REPOSITORY / "serve_config.yaml").read_text())
    config["http_options"]["port"] = port
    config["applications"][0]["args"]["tenants_file"] = str(tenants_file)
    path = folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump(config))
    log = folder / "server.log"
    # Token authentication would protect a cluster that only this test run can reach, and leave a file in the home
    # folder; the address keeps the run off any other cluster of this machine.
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment |= {"RAY_AUTH_MODE": "disabled", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "serve_app", "run", str(path)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return Server(process=process, port=port, config=config, log=log, tenants_file=tenants_file)

"""A real Redis for tests and benchmarks: on a free port of this machine, in memory, in a folder of its own."""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

START_S = 20.0
"""Far more than it takes, on a busy machine."""


class RedisServer:
    """Started by `start`, ended by `stop`; a port of its own, so that it can come back at the same address.

    Raises FileNotFoundError where there is no redis-server.
    """

    def __init__(self, folder: Path) -> None:
        self._binary = shutil.which("redis-server")
        if self._binary is None:
            raise FileNotFoundError("redis-server is not on the PATH: apt-get install redis-server")
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]

    @property
    def uri(self) -> str:
        """Where it is."""
        return f"redis://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        assert self._binary is not None
        options = {
            "port": str(self._port),
            "bind": "127.0.0.1",
            "save": "",
            "appendonly": "no",
            "dir": str(self._folder),
        }
        command = [self._binary, *(word for key, value in options.items() for word in (f"--{key}", value))]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert time.monotonic() < deadline, "redis-server does not answer"
            assert self._process.poll() is None, "redis-server ended at its start"

    def stop(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def hold(self) -> None:
        """Let it take connections and answer nothing."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(7) == b"+PONG\r\n"
        except OSError:
            time.sleep(0.01)
            return False

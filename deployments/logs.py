"""Our log records beside Serve's own: in the replica's log files and, through Ray, in the terminal of `serve run`."""

import logging

OUR_PACKAGES = ("batching", "deployments", "serve_app")


def join_serve_logs() -> None:
    """Let our loggers write what the logger `ray.serve` of this process writes, from INFO on. May be called again."""
    serve_logger = logging.getLogger("ray.serve")
    for package in OUR_PACKAGES:
        logger = logging.getLogger(package)
        logger.parent = serve_logger
        logger.setLevel(logging.INFO)

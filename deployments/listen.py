"""Where this Serve instance listens; asked from Ray, because a replica does not see the YAML."""

from ray.serve.context import _get_global_client


def listen_host() -> str:
    """The address of the HTTP proxies. Ray's own default is 0.0.0.0, all interfaces."""
    return str(_get_global_client().http_config.host)

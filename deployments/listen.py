"""Where this Serve instance listens; asked from Ray, because a replica does not see the YAML."""

from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY
from ray.serve.context import _get_global_client

ALL_INTERFACES = "0.0.0.0"


def listen_host() -> str:
    """The address of the HTTP proxies. Ray's own default is 0.0.0.0, all interfaces.

    With HAProxy in front, Ray binds to all interfaces whatever the YAML says.
    """
    return ALL_INTERFACES if RAY_SERVE_ENABLE_HA_PROXY else str(_get_global_client().http_config.host)

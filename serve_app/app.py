"""What `serve_config.yaml` names: `serve_app.app:gateway` and `serve_app.app:revision`.

Each builder takes its checked `args` and returns the application. Plain classes become deployments here and nowhere
else; Ray's own options (replicas, CPUs, GPUs, autoscaling) belong into the YAML and override the defaults below.
"""

from ray import serve
from ray.serve import Application

from deployments.model_replica import ModelReplica
from deployments.settings import MAX_ROWS_PER_FORWARD
from serve_app.config import GatewayArgs, RevisionArgs
from serve_app.http import HttpIngress

MAX_ONGOING_REQUESTS = 1000
"""Of an ingress replica: each may hold a body."""

MAX_ONGOING_CALLS = 10_000
"""Of a model replica. Admission counts work and refuses long before, so that Ray's limit, which counts calls and makes
them wait unseen, is never the one that is met. Above 1000, Ray fixes an actor's concurrency at its creation."""
assert MAX_ONGOING_CALLS >= MAX_ROWS_PER_FORWARD, "Ray warns when a batch could not fill"

MAX_QUEUED_REQUESTS = 1000
"""Requests that wait for a free replica in one caller; more are refused with 503."""


def gateway(args: GatewayArgs) -> Application:
    """The application on `/`: the deployment Ingress."""
    return (
        serve.deployment(name="Ingress")(serve.ingress()(HttpIngress))
        .options(
            ray_actor_options={"num_cpus": 0.1},
            max_ongoing_requests=MAX_ONGOING_REQUESTS,
            max_queued_requests=MAX_QUEUED_REQUESTS,
        )
        .bind(args)
    )


def revision(args: RevisionArgs) -> Application:
    """One revision: a deployment per length bucket, reached through the gateway only (`route_prefix: null`)."""
    replica = serve.deployment(ModelReplica).options(
        ray_actor_options={"num_cpus": 0.1},
        max_ongoing_requests=MAX_ONGOING_CALLS,
        max_queued_requests=MAX_QUEUED_REQUESTS,
        graceful_shutdown_timeout_s=60,
    )
    first, *others = args.buckets
    siblings = [replica.options(name=bucket.deployment).bind(args.replica_settings(bucket)) for bucket in others]
    # Ray deploys what hangs on the root, so the first bucket is bound to the others.
    return replica.options(name=first.deployment).bind(args.replica_settings(first), siblings)

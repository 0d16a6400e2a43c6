"""`python -m serve_app check FILE`: everything wrong with a Serve config that can be known without starting it.

Ray ignores keys that it does not know (`max_ongoing_request`, `num_gpu`), so this walks Ray's own schema as well as our
`args` and `user_config`, and looks at what the parts say about each other.
"""

import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from deployments.settings import BucketSettings, GatewaySettings
from serve_app.auth import TenantsFileError, is_loopback, load_tenants
from serve_app.config import GatewayArgs, RevisionArgs, find_file
from serve_app.yaml_file import YamlError, read_yaml

GATEWAY = "serve_app.app:gateway"
REVISION = "serve_app.app:revision"
RAY_DEFAULT_HOST = "0.0.0.0"


def problems(path: Path) -> list[str]:
    """One line per problem, each starting with the path of the key; empty when the file is good."""
    try:
        config = read_yaml(path)
    except OSError as error:
        return [f"{path}: {error.strerror}"]
    except YamlError as error:
        return [f"{path}: {error}"]
    if not isinstance(config, dict):
        return [f"{path}: must be a mapping with the key `applications`"]
    found = [*_unknown_keys(ServeDeploySchema, config, "")]
    if not found:
        found += _invalid(ServeDeploySchema, config, "")
    applications = config.get("applications")
    if isinstance(applications, list):
        for index, application in enumerate(applications):
            if isinstance(application, dict):
                found += _application_problems(application, f"applications[{index}]")
        found += _cross_problems(config, [app for app in applications if isinstance(app, dict)])
    return found


def _application_problems(application: Mapping[str, object], path: str) -> Iterator[str]:
    args = application.get("args") or {}
    if application.get("import_path") == GATEWAY:
        yield from _invalid(GatewayArgs, args, f"{path}.args")
        yield from _deployment_problems(application, path, {"Ingress": GatewaySettings})
        if "user_config" not in _deployment(application, "Ingress"):
            yield f"{path}.deployments: the deployment Ingress needs a user_config with `revisions`"
    elif application.get("import_path") == REVISION:
        invalid = list(_invalid(RevisionArgs, args, f"{path}.args"))
        yield from invalid
        if application.get("route_prefix", "/") is not None:
            yield f"{path}.route_prefix: must be null, so that the model is reached through the gateway only"
        if not invalid:
            buckets = {bucket.deployment: bucket for bucket in RevisionArgs.model_validate(args).buckets}
            yield from _deployment_problems(application, path, dict.fromkeys(buckets, BucketSettings))
            for name, bucket in buckets.items():
                yield from _budget_problems(application, path, name, max_tokens=bucket.max_tokens)


def _deployment_problems(
    application: Mapping[str, object], path: str, models: Mapping[str, type[BaseModel]]
) -> Iterator[str]:
    for index, deployment in enumerate(_deployments(application)):
        name = str(deployment.get("name"))
        if name not in models:
            yield f"{path}.deployments[{index}].name: {name} does not exist here; there is {', '.join(models)}"
        elif "user_config" in deployment:
            yield from _invalid(models[name], deployment["user_config"], f"{path}.deployments[{index}].user_config")


def _budget_problems(application: Mapping[str, object], path: str, name: str, *, max_tokens: int) -> Iterator[str]:
    user_config = _deployment(application, name).get("user_config")
    try:
        BucketSettings.model_validate(user_config or {}).batch_limits(
            max_tokens=max_tokens, default_token_budget=max_tokens
        )
    except ValidationError:
        return  # reported with its path already
    except ValueError as error:
        yield f"{path}.deployments[{name}].user_config.{error}"


def _cross_problems(config: Mapping[str, object], applications: list[dict[str, object]]) -> Iterator[str]:
    serves = {
        str(application.get("name")): _mapping(application.get("args")).get("revision")
        for application in applications
        if application.get("import_path") == REVISION
    }
    for application in applications:
        if application.get("import_path") == GATEWAY:
            user_config = _mapping(_deployment(application, "Ingress").get("user_config"))
            for revision, target in _mapping(user_config.get("revisions")).items():
                if target not in serves:
                    yield f"user_config.revisions.{revision}: there is no application {target} in this file"
                elif serves[str(target)] != revision:
                    yield f"user_config.revisions.{revision}: application {target} serves {serves[str(target)]}"
            yield from _tenants_problems(config, _mapping(application.get("args")))


def _tenants_problems(config: Mapping[str, object], args: Mapping[str, object]) -> Iterator[str]:
    host = str(_mapping(config.get("http_options")).get("host", RAY_DEFAULT_HOST))
    try:
        ring = load_tenants(find_file(str(args.get("tenants_file"))))
    except (OSError, TenantsFileError) as error:
        yield f"args.tenants_file: {error}"
        return
    if ring.has_demo_keys() and not is_loopback(host):
        yield f"http_options.host: {host} is not loopback, and the tenants file contains the published demo keys"


def _unknown_keys(model: type[BaseModel], value: object, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        where = f"{path}.{key}" if path else str(key)
        field = model.model_fields.get(key)
        if field is None:
            yield f"{where}: unknown key, which Ray would ignore"
            continue
        nested = _nested_model(field.annotation)
        if nested is not None and isinstance(item, list):
            for index, element in enumerate(item):
                yield from _unknown_keys(nested, element, f"{where}[{index}]")
        elif nested is not None:
            yield from _unknown_keys(nested, item, where)


def _nested_model(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_nested_model, typing.get_args(annotation))), None)


def _invalid(model: type[BaseModel], value: object, path: str) -> Iterator[str]:
    try:
        model.model_validate(value)
    except ValidationError as error:
        for item in error.errors(include_url=False, include_input=False):
            location = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"])
            yield f"{path}{location}".lstrip(".") + f": {item['msg']}"


def _deployments(application: Mapping[str, object]) -> list[dict[str, object]]:
    deployments = application.get("deployments")
    return [item for item in deployments if isinstance(item, dict)] if isinstance(deployments, list) else []


def _deployment(application: Mapping[str, object], name: str) -> dict[str, object]:
    return next((item for item in _deployments(application) if item.get("name") == name), {})


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}

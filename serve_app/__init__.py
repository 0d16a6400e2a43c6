"""HTTP and composition: what the YAML names, who may call, and how errors look on the wire.

Reading order: app, config, auth, http, native, openai, http_errors, __main__.
May import everything below it: deployments, batching, starlette, pydantic.
"""

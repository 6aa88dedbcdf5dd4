"""The OpenAPI document of the server, made from the structs of `messages`; served at /openapi.json."""

from __future__ import annotations

from typing import Any

import msgspec

from ddrl.serve.messages import Billing, ContractState, Control, Decision, DisplayRequest, Error, PolicyInfo

_PATHS: tuple[tuple[str, str, str, Any, Any], ...] = (
    ("/v1/decide", "post", "Choose the ad to show, and count it as shown.", DisplayRequest, Decision),
    ("/v1/billing", "post", "News of billing.", Billing, dict[str, Any]),
    ("/v1/control", "post", "Set rate and theta of contracts.", Control, dict[str, Any]),
    ("/v1/contracts", "get", "What is held of each contract.", None, list[ContractState]),
    ("/v1/policy", "get", "The policy that chooses now.", None, PolicyInfo),
    ("/v1/policy", "post", "Take the newest policy of RUN, or the parameters in the body.", bytes, PolicyInfo),
    ("/health", "get", "200 while it serves, 503 when it ends.", None, dict[str, str]),
    ("/metrics", "get", "Prometheus text.", None, str),
)
_ERRORS = {
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "422": "The body is malformed, or names what does not exist.",
    "429": "Too many bodies are under way.",
    "500": "The policy gives no numbers.",
    "503": "Too many requests wait, or the server ends.",
}


def document(**limits: int) -> dict[str, Any]:
    """OpenAPI 3.1; `limits` are told in its description."""
    kinds = [kind for *_, taken, given in _PATHS for kind in (taken, given) if kind not in (None, bytes, str)]
    schemas, components = msgspec.json.schema_components([*kinds, Error], ref_template="#/components/schemas/{name}")
    schema = iter(schemas)
    paths: dict[str, Any] = {}
    for path, method, words, taken, given in _PATHS:
        operation: dict[str, Any] = {"summary": words, "responses": {}}
        if taken is bytes:
            body: dict[str, Any] = {
                "schema": {"type": "string", "format": "binary", "description": "A safetensors file, or nothing."}
            }
            operation["requestBody"] = {"required": False, "content": {"application/octet-stream": body}}
        elif taken is not None:
            operation["requestBody"] = {"required": True, "content": _json(next(schema))}
        answer = {"text/plain": {"schema": {"type": "string"}}} if given is str else _json(next(schema))
        operation["responses"]["200"] = {"description": words, "content": answer}
        if method == "post":
            for status, meaning in _ERRORS.items():
                error: dict[str, Any] = {
                    "description": meaning,
                    "content": _json({"$ref": "#/components/schemas/Error"}),
                }
                operation["responses"][status] = error
        paths.setdefault(path, {})[method] = operation
    told = ", ".join(f"{name} = {value}" for name, value in limits.items())
    return {
        "openapi": "3.1.0",
        "info": {"title": "ddrl.serve", "version": "1", "description": f"Ad mixing by a trained policy. {told}"},
        "paths": paths,
        "components": {"schemas": components},
    }


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}

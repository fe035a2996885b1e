"""The fields of the custom resources that the chart renders, as KEDA's, the Prometheus operator's and the Gateway API's
own pages document them: https://keda.sh/docs/latest/reference/scaledobject-spec/,
https://keda.sh/docs/latest/concepts/authentication/, https://prometheus-operator.dev/docs/api-reference/api/,
https://gateway-api.sigs.k8s.io/reference/spec/. A field that is not here is refused: extend these after reading there.
"""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string", "minLength": 1}
_COUNT = {"type": "integer", "minimum": 0}


def _fields(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


_LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
_METADATA = _fields(("name", "labels"), name=_TEXT, labels=_LABELS)
_TRIGGER = _fields(
    ("type", "metadata", "authenticationRef"),
    type={"const": "metrics-api"},
    metricType={"enum": ["AverageValue", "Value"]},  # metrics-api offers no utilisation
    # The values of a trigger's metadata are texts, numbers too.
    metadata=_fields(
        ("url", "valueLocation", "targetValue", "authMode"),
        url={"type": "string", "pattern": "^https?://[a-z0-9.-]+/v1/scaling/[a-z0-9-]+$"},
        valueLocation=_TEXT,
        targetValue={"type": "string", "pattern": "^[0-9.]+$"},
        authMode={"enum": ["apiKey", "basic", "tls", "bearer"]},
    ),
    authenticationRef=_fields(("name",), name=_TEXT),
)
_RULE = _fields(
    ("expr",),
    record=_TEXT,
    alert=_TEXT,
    expr=_TEXT,
    labels=_LABELS,
    annotations={"type": "object", "additionalProperties": {"type": "string"}},
    **{"for": {"type": "string", "pattern": r"^[0-9]+(s|m|h|d)$"}},
)


def _resource(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return _fields(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=_METADATA,
        spec=spec,
    )


_HEADER = _fields(("type", "name", "value"), type={"enum": ["Exact", "RegularExpression"]}, name=_TEXT, value=_TEXT)
_MATCH = _fields(
    (),
    headers=_list(_HEADER),
    path=_fields(("type", "value"), type={"enum": ["Exact", "PathPrefix", "RegularExpression"]}, value=_TEXT),
)
_BACKEND = _fields(("name", "port"), name=_TEXT, port={"type": "integer", "minimum": 1})
SCHEMAS = {
    "HTTPRoute": _resource(
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        _fields(
            ("parentRefs", "rules"),
            parentRefs=_list(_fields(("name",), name=_TEXT, namespace=_TEXT)),
            hostnames=_list(_TEXT),
            rules=_list(_fields(("matches", "backendRefs"), matches=_list(_MATCH), backendRefs=_list(_BACKEND))),
        ),
    ),
    "ScaledObject": _resource(
        "keda.sh/v1alpha1",
        "ScaledObject",
        _fields(
            ("scaleTargetRef", "triggers"),
            scaleTargetRef=_fields(("name",), name=_TEXT),
            pollingInterval={"type": "integer", "minimum": 1},
            cooldownPeriod=_COUNT,
            minReplicaCount=_COUNT,
            maxReplicaCount={"type": "integer", "minimum": 1},
            advanced=_fields(
                (),
                horizontalPodAutoscalerConfig=_fields(
                    (), behavior=_fields((), scaleDown=_fields((), stabilizationWindowSeconds=_COUNT))
                ),
            ),
            triggers=_list(_TRIGGER),
        ),
    ),
    "TriggerAuthentication": _resource(
        "keda.sh/v1alpha1",
        "TriggerAuthentication",
        _fields(
            ("secretTargetRef",),
            secretTargetRef=_list(_fields(("parameter", "name", "key"), parameter=_TEXT, name=_TEXT, key=_TEXT)),
        ),
    ),
    "ServiceMonitor": _resource(
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        _fields(
            ("selector", "endpoints"),
            jobLabel=_TEXT,
            selector=_fields(("matchLabels",), matchLabels=_LABELS),
            endpoints=_list(_fields(("port",), port=_TEXT, interval={"type": "string", "pattern": "^[0-9]+(s|m)$"})),
            podTargetLabels=_list(_TEXT),
        ),
    ),
    "PrometheusRule": _resource(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        _fields(("groups",), groups=_list(_fields(("name", "rules"), name=_TEXT, rules=_list(_RULE)))),
    ),
}

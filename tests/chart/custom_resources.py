"""The fields of the custom resources that the chart renders, with the bounds of their definitions (CRDs), which the
projects publish under the Apache License 2.0: `config/crd/bases` of kedacore/keda (commit 8b4f083c), `example/
prometheus-operator-crd` of prometheus-operator/prometheus-operator (6adcebc5), and `config/crd/standard` of
kubernetes-sigs/gateway-api (4564255a), all of August 2026. What a definition leaves open and the chart always renders
is narrower here. A field that is not here is refused: extend these after reading there.
"""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string", "minLength": 1}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_POSITIVE = {**_COUNT, "minimum": 1}
#: A duration of Prometheus.
_DURATION = {"type": "string", "pattern": r"^(0|(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?)$", "minLength": 1}
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"


def _fields(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def _list(items: dict[str, Any], most: int | None = None) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items} | ({} if most is None else {"maxItems": most})


def _text(most: int, pattern: str = "") -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": most, "pattern": f"^{pattern}$" if pattern else ""}


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
    **{"for": _DURATION},
)


def _resource(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return _fields(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=_METADATA,
        spec=spec,
    )


_HEADER = _fields(
    ("type", "name", "value"),
    type={"enum": ["Exact", "RegularExpression"]},
    name=_text(256, r"[A-Za-z0-9!#$%&'*+\-.^_`|~]+"),
    value=_text(4096),
)
_MATCH = _fields(
    (),
    headers=_list(_HEADER, 16),
    path=_fields(("type", "value"), type={"enum": ["Exact", "PathPrefix", "RegularExpression"]}, value=_text(1024)),
)
_BACKEND = _fields(("name", "port"), name=_text(253), port={"type": "integer", "minimum": 1, "maximum": 65535})
SCHEMAS = {
    "HTTPRoute": _resource(
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        _fields(
            ("parentRefs", "rules"),
            parentRefs=_list(_fields(("name",), name=_text(253), namespace=_text(63, _LABEL)), 32),
            hostnames=_list(_text(253, rf"(\*\.)?{_LABEL}(\.{_LABEL})*"), 16),
            rules=_list(
                _fields(("matches", "backendRefs"), matches=_list(_MATCH, 64), backendRefs=_list(_BACKEND, 16)), 16
            ),
        ),
    ),
    "ScaledObject": _resource(
        "keda.sh/v1alpha1",
        "ScaledObject",
        _fields(
            ("scaleTargetRef", "triggers"),
            scaleTargetRef=_fields(("name",), name=_TEXT),
            pollingInterval=_POSITIVE,
            cooldownPeriod=_COUNT,
            minReplicaCount=_COUNT,
            maxReplicaCount=_POSITIVE,  # and at least minReplicaCount
            advanced=_fields(
                (),
                horizontalPodAutoscalerConfig=_fields(
                    (),
                    behavior=_fields((), scaleDown=_fields((), stabilizationWindowSeconds={**_COUNT, "maximum": 3600})),
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
            endpoints=_list(_fields(("port",), port=_TEXT, interval=_DURATION)),
            podTargetLabels=_list(_TEXT),
        ),
    ),
    "PrometheusRule": _resource(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        _fields(("groups",), groups=_list(_fields(("name", "rules"), name=_TEXT, rules=_list(_RULE)))),
    ),
}

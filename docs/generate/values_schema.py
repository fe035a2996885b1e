"""The schema of the Helm chart's values. It has the names of all settings and secrets: helm refuses others."""

from __future__ import annotations

import json
from pathlib import Path

from leasehold.file_secrets import holds_secrets
from leasehold.settings import Settings

PATH = Path(__file__).parents[2] / "deploy/helm/leasehold/values.schema.json"
#: The chart sets these settings from values of its own, because probes, services and pools depend on them.
OF_THE_CHART = {
    "api_host", "api_port", "cell", "cells_file", "console_only", "database_app_role", "drain_seconds", "metrics",
    "metrics_host", "metrics_port", "pools", "worker_children", "worker_labels", "worker_pool", "worker_queues",
    "work_dir",
}  # fmt: skip


def text() -> str:
    """The text of the schema, with the present names of the settings."""
    schema = json.loads(PATH.read_text())
    secrets = [name for name, field in Settings.model_fields.items() if holds_secrets(field.annotation)]
    plain = Settings.model_fields.keys() - set(secrets) - OF_THE_CHART - {"failpoints"}
    schema["$defs"]["settings"]["propertyNames"]["enum"] = sorted(plain)
    schema["properties"]["secrets"]["propertyNames"]["enum"] = sorted(secrets)
    return json.dumps(schema, indent=2) + "\n"

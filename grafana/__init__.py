"""Describes the dashboards and alerts in Python. `scripts/dashboards` writes the files for Grafana and Prometheus."""

"""Dashboards and alerts, described once in Python; `scripts/dashboards` writes the files that are shipped."""

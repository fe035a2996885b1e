"""Pipelines for demonstrations and measurements."""

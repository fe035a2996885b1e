"""Finds out who calls the API, from which address, and what the caller may do."""

"""Runs by the clock."""

"""Schedules: runs that are submitted by the clock."""

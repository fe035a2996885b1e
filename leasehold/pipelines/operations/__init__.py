"""Bulk operations: cancel, retry or delete every job that a filter finds. Each operation is a job itself."""

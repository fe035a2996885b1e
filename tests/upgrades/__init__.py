"""Migrations beside a running installation: their plan, their locks, and index builds that die."""

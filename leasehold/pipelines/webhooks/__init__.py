"""Deliveries of webhooks: one job a message."""

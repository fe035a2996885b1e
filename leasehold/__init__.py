"""Leasehold: a durable job platform on PostgreSQL leases and RabbitMQ."""

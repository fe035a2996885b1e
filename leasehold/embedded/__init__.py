"""Runs private servers on this machine (PostgreSQL, RabbitMQ and S3), for `leasehold dev` and the tests."""

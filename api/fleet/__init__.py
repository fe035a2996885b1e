"""The endpoints of an installation and of its tenants' access: health, queues, workers, limits, audit, keys, people."""

"""Metrics that are read from the database: jobs, queues, workers, the broker. Above all other rooms of the core."""

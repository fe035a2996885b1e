"""For operators: health, metrics, queues, workers, limits."""

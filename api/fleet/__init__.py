"""The endpoints for operators: health, queues, workers and limits."""

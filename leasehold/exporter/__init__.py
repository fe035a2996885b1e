"""The exporter: metrics that are read from the database (jobs, queues, workers) and from the broker's connections. It
may import all other packages of the core.
"""

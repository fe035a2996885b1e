"""What a process counts, traces and logs. Instruments only: who reads the database for metrics is `exporter`."""

"""/v1/jobs and /v1/dead-letters, for jobs of every kind."""

"""/v1/jobs and /v1/dead-letters: jobs of every kind by one shape. `api.runs` and kinds of work build on its helpers."""

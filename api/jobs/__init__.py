"""/v1/jobs, /v1/operations and /v1/dead-letters: jobs of every kind in one form. `api.runs` also uses this package."""

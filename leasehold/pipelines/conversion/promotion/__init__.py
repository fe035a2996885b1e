"""Copies finished models to the promotion target (where an installation serves its models from), all files or none."""

"""Copies finished models to the promotion target (a bucket or an HTTP file service), all files or none."""

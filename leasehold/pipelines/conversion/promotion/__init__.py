"""Copying finished models to where they are served from, all files or none."""

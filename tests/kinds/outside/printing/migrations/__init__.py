"""Revisions of the kind: `leasehold migrate` runs them after the platform's."""

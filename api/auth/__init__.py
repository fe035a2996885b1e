"""Who calls, from where, and what the caller may do."""

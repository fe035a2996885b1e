"""The duties of a worker beside its attempts: takeover, relay, admissions, schedules, retention."""

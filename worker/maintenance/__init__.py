"""What a worker does beside its attempts: takeover, relay, admissions, schedules, retention."""

"""The duties of a worker besides its attempts: takeover, relay, admissions, schedules, retention."""

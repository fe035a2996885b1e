"""What a worker does beside its attempts: sweep, relay, admit, forget."""

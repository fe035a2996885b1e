"""One attempt: fetch inputs, run the handler, publish outputs, settle. Knows leases, and nothing of slots or hints."""

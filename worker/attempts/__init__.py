"""One attempt: fetch inputs, run the handler, publish outputs, settle; and keep its lease meanwhile."""

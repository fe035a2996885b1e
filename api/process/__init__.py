"""The parts of an API process that all endpoints use: connections, the API key, request bodies, waits for changes."""

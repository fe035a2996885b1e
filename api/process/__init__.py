"""What every endpoint of an API process shares: connections, the caller's key, request bodies, waiting for changes."""

"""What every endpoint of an API process uses: connections, the caller's key, request bodies, waits for changes."""

"""What the endpoints stand on: opened once a process, closed in the opposite order."""

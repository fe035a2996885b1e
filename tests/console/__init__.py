"""The console: its sessions and forms over HTTP, and journeys through it in a browser."""

"""The conversion API: `/api/v1/jobs`."""

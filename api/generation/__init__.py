"""The generation API: `/api/v1/generations`."""

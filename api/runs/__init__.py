"""The runs API: `/v1/runs`, templates, schedules, webhooks, external workers, dead letters."""

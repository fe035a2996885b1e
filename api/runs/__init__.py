"""The runs API: `/v1/runs` with signals and logs, templates, schedules, webhooks, callbacks and external workers."""

"""The HTTP API, by endpoint."""

from __future__ import annotations

from grafana.describe import FULL, Board, Panel, Row, Variable, percentiles, rate

_R = 'route=~"$route"'
_SECONDS = "leasehold_http_request_duration_seconds"

BOARD = Board(
    "leasehold-api",
    "API",
    "Rate, errors and duration of every endpoint.",
    [
        Row("Requests", [
            Panel("Rate", "By endpoint.", {"{{method}} {{route}}": rate(f"{_SECONDS}_count", "method, route", _R)}, "reqps"),
            Panel("Answers", "By status.", {"{{code}}": rate(f"{_SECONDS}_count", "code", _R)}, "reqps"),
            Panel("Duration", "Without requests that asked to wait for a change.", percentiles(_SECONDS, "method, route", f'waited="no", {_R}'), "s", width=FULL, warn=0.1, bad=1),
        ]),
        Row("Errors", [
            Panel(
                "Share of 5xx",
                "Of each endpoint's requests.",
                {"{{route}}": f'(sum by (route) (rate({_SECONDS}_count{{code=~"5..", {_R}}}[$__rate_interval])) or 0 * sum by (route) (rate({_SECONDS}_count{{{_R}}}[$__rate_interval])))'
                              f" / sum by (route) (rate({_SECONDS}_count{{{_R}}}[$__rate_interval]))"},
                "percentunit", warn=0.001, bad=0.01,
            ),
            Panel("Problems", "Refusals and failures by code: auth, limits (429), quotas, validation.", {"{{code}}": rate("leasehold_http_problems_total", "code")}, "reqps"),
            Panel("Refused uploads", "Objects refused before any job, by code.", {"{{code}}": rate("leasehold_uploads_refused_total", "code")}, "ops"),
            Panel("In flight", "Requests being answered, long polls and streams included.", {"{{instance}}": "leasehold_http_requests_in_flight"}),
        ]),
    ],
    [Variable("route", f"{_SECONDS}_count", "route")],
)  # fmt: skip

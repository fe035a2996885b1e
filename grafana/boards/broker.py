"""Hints on their way: the outbox, the relay, the broker's connections."""

from __future__ import annotations

from grafana.describe import Board, Panel, Row, exported, rate

BOARD = Board(
    "leasehold-broker",
    "Broker and outbox",
    "Hints on their way. A lost hint loses no work, because workers also poll the database.",
    [
        Row("Outbox", [
            Panel("Depth", "Written and not yet confirmed by the broker, counted up to 10,000.", {"rows": exported("leasehold_outbox_rows")}),
            Panel("Oldest", "Over a minute, the relay does not get rid of them.", {"age": exported("leasehold_outbox_oldest_seconds")}, "s", warn=10, bad=60),
            Panel("Relayed", "Hints that the relay sent because their committer did not.", {"relayed": rate("leasehold_outbox_relayed_total")}, "ops"),
            Panel("Unroutable", "Hints for which the broker had no queue. The process then declares the queue again.", {"unroutable": rate("leasehold_broker_unroutable_total")}, "ops"),
        ]),
        Row("Hints", [
            Panel("Received", "Stale and duplicate ones are normal: every worker also hears from itself.", {"{{result}}": rate("leasehold_hints_total", "result")}, "ops"),
            Panel("Garbage", "Messages that were no hint of ours: somebody else writes to our queues.", {"{{kind}}": rate("leasehold_broker_garbage_total", "kind")}, "ops", bad=0.01),
        ]),
        Row("Connections", [
            Panel("Up", "1 while the process can send hints and, if it is a worker, receive them.", {"{{instance}} {{broker}}": "leasehold_broker_up"}, bad=1, low_is_bad=True),
            Panel("Connects", "Each is a connection that was lost before, but for the first.", {"{{instance}} {{end}}": "increase(leasehold_broker_connects_total[$__rate_interval])"}),
        ]),
    ],
)  # fmt: skip

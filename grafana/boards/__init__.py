"""The dashboards, in the order of the links between them."""

from __future__ import annotations

from grafana.boards import api, broker, database, fleet, generation, overview, pipelines

BOARDS = (
    overview.BOARD,
    pipelines.BOARD,
    fleet.BOARD,
    broker.BOARD,
    database.BOARD,
    api.BOARD,
    generation.BOARD,
)

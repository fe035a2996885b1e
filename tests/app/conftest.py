"""An app of each test's own: `serve(app)` runs a worker for it, and the app submits to the test's database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from leasehold import App
from leasehold.settings import Settings
from leasehold.worker.worker import Worker

Serve = Callable[..., AbstractAsyncContextManager[Worker]]


@pytest.fixture
def using(settings: Settings) -> Iterator[Callable[..., App]]:
    """`using(app)`: the app submits to the test's installation."""
    apps: list[App] = []

    def use(app: App, **changes: Any) -> App:
        app.use(settings.model_copy(update={"tenant": "me", **changes}))
        apps.append(app)
        return app

    yield use
    for app in apps:
        app.close()


@pytest.fixture
def serve(settings: Settings, tmp_path: Path) -> Serve:
    @asynccontextmanager
    async def serving(app: App, **changes: Any) -> AsyncIterator[Worker]:
        quick = {"work_dir": str(tmp_path), "poll_seconds": 0.05, **changes}
        async with Worker(settings.model_copy(update=quick), app.pipelines()) as worker:
            yield worker

    return serving

"""The pytest plugin: fixtures that run an app on a database of the test's own. `leasehold_app` runs the app that the
ini option `leasehold_app` names, and `leasehold_apps` runs any app. `leasehold_server` is their PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # a pytest session without these fixtures must not load these modules
    from leasehold.app.app import App
    from leasehold.testing.harness import TestApp
    from leasehold.testing.server import TestServer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("leasehold_app", "MODULE:NAME of the App that the fixture leasehold_app tests")


@pytest.fixture(scope="session")
def leasehold_server() -> Iterator[TestServer]:
    """The session's PostgreSQL. If LEASEHOLD_TEST_DATABASE_URL names a server, the tests use that server. Otherwise a
    server is started when the first test needs it.
    """
    from leasehold.testing.server import TestServer  # noqa: PLC0415 - see above

    with TestServer() as server:
        yield server


@pytest.fixture
def leasehold_apps(leasehold_server: TestServer) -> Iterator[Callable[[App], TestApp]]:
    """Gives the test a function. `leasehold_apps(app)` returns a TestApp, which runs the app on a database of the
    test's own.
    """
    from leasehold.testing.harness import TestApp  # noqa: PLC0415 - see above

    with ExitStack() as opened:

        def open_app(app: App) -> TestApp:
            test_app = TestApp(app, leasehold_server)
            opened.callback(test_app.close)
            return test_app

        yield open_app


@pytest.fixture
def leasehold_app(request: pytest.FixtureRequest, leasehold_apps: Callable[[App], TestApp]) -> TestApp:
    """A TestApp of the app that the ini option `leasehold_app` names, on a database of the test's own."""
    source: str = request.config.getini("leasehold_app")
    if not source:
        raise pytest.UsageError("leasehold_app: set the ini option leasehold_app to MODULE:NAME of the App")
    from leasehold.app.app import App  # noqa: PLC0415 - see above
    from leasehold.domain.errors import CodeBroken, DeclarationError  # noqa: PLC0415
    from leasehold.domain.registry import object_at  # noqa: PLC0415
    from leasehold.domain.sentences import with_article  # noqa: PLC0415

    try:
        app = object_at(source)
    except CodeBroken as error:
        raise pytest.UsageError(f"leasehold_app = {error}\n{error.trace}") from None
    except DeclarationError as error:
        raise pytest.UsageError(f"leasehold_app = {source}: {error}") from None
    if not isinstance(app, App):
        raise pytest.UsageError(f"leasehold_app = {source}: it is {with_article(type(app).__name__)}, not an App")
    return leasehold_apps(app)

"""Has the route class of the console's pages, the function that makes the sign-in page, and helpers that read the
fields of forms. The route class checks the session, reads the form, checks the form's token, and shows errors as pages.

A client that does not accept HTML gets an error as JSON, as from the API.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from time import monotonic
from typing import Annotated, Any
from urllib.parse import parse_qsl

import orjson
import structlog
from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from leasehold.api.auth.security import bearer, requirements
from leasehold.api.console import session
from leasehold.api.console.rendering import go_to, is_path, page, path_of
from leasehold.api.http.may_read_standby import stay_fresh, with_standby
from leasehold.api.http.problems import NOT_STORABLE, is_database_away, problem_of
from leasehold.api.http.strict_json import refusal
from leasehold.api.process.services import services_of
from leasehold.domain.cron import FIRST, LAST
from leasehold.domain.errors import Conflict, Invalid, RequestError, StoreError, Unauthenticated
from leasehold.domain.sentences import full_stop

log = structlog.get_logger(__name__)
#: The largest number of fields of a form. The largest form has the picked jobs of a page, and a few further fields.
_MAX_FIELDS = 200
#: A number of at most this many digits fits into an integer of PostgreSQL.
_MAX_DIGITS = 9
#: The second press of a button waits for at most _PATIENCE_SECONDS for the answer to the first press. It looks for this
#: answer every _POLL_SECONDS.
_PATIENCE_SECONDS, _POLL_SECONDS = 15.0, 0.2
#: The value of the request header Sec-Fetch-Site when the request comes from a page of another site.
_CROSS_SITE = "cross-site"
#: A form's path begins with the path of the page that has the form. This page shows a list, or an object with an id.
#: The console finds the page by this rule, because a browser may leave out the header that names the page.
_PAGE_OF_FORM = re.compile(
    r"/(?:(?:jobs|operations|schedules|webhooks)/[0-9a-f]{8}-[0-9a-f-]{27}(?=/)|dead-letters/[0-9a-f]+(?=/)|"
    r"(?:jobs|dead-letters|to-settle|queues|workers|schedules|templates|webhooks|limits|keys|people|operations)(?=/))"
)
#: The console explains these errors on a page, and also an outage of the database (`is_database_away`). Any other error
#: is a bug, and `Edge` (the middleware around all routes, api/http/edge.py) logs it.
_EXPLAINED = (RequestError, StoreError, RequestValidationError, HTTPException, *NOT_STORABLE)


class Form(Mapping[str, str]):
    """The fields of a form by name. If a field is repeated, its last value counts. `picked` returns all values of a
    field.
    """

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self._pairs = pairs
        self._last_values = dict(pairs)

    def __getitem__(self, name: str) -> str:
        return self._last_values[name]

    def __iter__(self) -> Any:
        return iter(self._last_values)

    def __len__(self) -> int:
        return len(self._last_values)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """All fields, in the order of the form."""
        return self._pairs

    def picked(self, name: str) -> list[str]:
        return [value for key, value in self._pairs if key == name]


def form_of(request: Request) -> Form:
    form: Form = request.state.form
    return form


#: The type of an endpoint's parameter that gets the form. ConsoleRoute has read it.
Fields = Annotated[Form, Depends(form_of)]


class ConsoleRoute(APIRoute):
    """The route of a page (GET) or of a form (POST)."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        # A page that is marked with `may_read_standby` reads from the standby while the standby serves. After a form,
        # the browser's next pages read from the primary (`stay_fresh`), so that they show what the form has changed.
        handler = with_standby(self.endpoint, super().get_route_handler())
        requires = requirements(self.dependant)
        is_form = "POST" in (self.methods or ())

        async def handle(request: Request) -> Response:
            try:
                # Check the session before reading the form. When FastAPI later calls `require` for the endpoint,
                # `require` returns the same caller without a second check.
                for require in requires:
                    await require(request, await bearer(request))
                if not is_form:
                    return await handler(request)
                request.state.form = await _read_form(request)
                if requires:
                    session.check_form(request, request.state.form.get("token", ""))
                else:  # without a session the form has no token
                    session.check_origin(request)
                return stay_fresh(request, await _after_first_press(request, handler))
            except ClientDisconnect:
                return Response(status_code=HTTPStatus.BAD_REQUEST)  # the client has disconnected, so nobody reads this
            except Exception as error:
                error_page = _error_page(request, error)
                if error_page is None:
                    if _accepts_html(request):
                        # `Edge` logs the bug, and sends this page.
                        request.state.error_response = _bug_page(request, error)
                    raise
                return error_page

        return handle


async def _after_first_press(request: Request, handler: Callable[[Request], Coroutine[Any, Any, Response]]) -> Response:
    """The answer of the handler. Both presses of one button send the same idempotency key. If the first press is still
    being handled, the handler raises Conflict. This function then waits and calls the handler again, which in the end
    returns the answer to the first press. Raises Conflict after _PATIENCE_SECONDS.
    """
    waits_until = monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return await handler(request)
        except Conflict as error:
            if error.code != "idempotency_key_in_flight":
                raise
            if monotonic() > waits_until:
                sentence = "The first press of this button is still at work. Open the page again to see what it did."
                raise Conflict(error.code, sentence) from None
        await asyncio.sleep(_POLL_SECONDS)


async def _read_form(request: Request) -> Form:
    viewer = session.viewer_or_none(request)
    tenant_id = "" if viewer is None else viewer.caller.tenant_id
    async with services_of(request).bodies.received(request, tenant_id) as received_request:
        body = await received_request.body()
    try:
        text = body.decode()
        return Form(parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), max_num_fields=_MAX_FIELDS))
    except ValueError:
        raise Invalid("invalid_form", "The form could not be read.") from None


def _error_page(request: Request, error: Exception) -> Response | None:
    """The error as a page. Returns None if the client does not accept HTML, or if the error is a bug."""
    if not _accepts_html(request):
        return None
    if not isinstance(error, _EXPLAINED) and not is_database_away(error):
        return None
    if isinstance(error, Unauthenticated):
        return sign_in_page(request, error)
    problem = problem_of(error)
    problem.count()  # `Problem.response` would count the problem in the metric, but it is not called here
    back_path = request.state.form.get("back", "") if hasattr(request.state, "form") else ""
    if problem.status < HTTPStatus.INTERNAL_SERVER_ERROR and is_path(back_path):
        # The browser loads the page of the form again, so the person sees the current state together with the error.
        return go_to(request, back_path, problem.detail, good=False)
    return page(request, "error.html", problem.status, problem=problem, request_id=None)


def _accepts_html(request: Request) -> bool:
    return "text/html" in request.headers.get("accept", "")


def _bug_page(request: Request, error: Exception) -> Response:
    """The page for a bug. It shows the id of the request, by which a person finds the error in the log."""
    problem, identity = problem_of(error), request.state.identity
    problem.count()
    return page(request, "error.html", problem.status, problem=problem, request_id=identity.request_id)


def sign_in_page(request: Request, error: Unauthenticated | None = None) -> Response:
    """The page that asks for a key, in place of the requested page. After the sign-in, the browser opens the requested
    page. If the request sent a form, the browser opens the page with this form.
    """
    prefix = path_of(request)
    requested_path = request.url.path.removeprefix(prefix) + (f"?{request.url.query}" if request.url.query else "")
    is_page = request.method == "GET" and not requested_path.startswith(("/sign-in", "/enter", "/oidc"))
    if is_page and request.headers.get("sec-fetch-site") == _CROSS_SITE:
        # The cookie is SameSite=Strict, so a browser that follows a link of another site sends the request without the
        # cookie. This page makes the browser repeat the request, and the repetition has the cookie.
        return page(request, "again.html")
    following = requested_path if is_page else "/"
    sentence = "" if error is None or error.code == "missing_api_key" else error.message
    page_of_form = _PAGE_OF_FORM.match(requested_path) if request.method == "POST" else None
    if page_of_form is not None:
        following = page_of_form[0]
        sentence = "Your session has ended, and nothing was done. Sign in, and send the form again."
    status = HTTPStatus.OK if error is None else HTTPStatus.UNAUTHORIZED
    services = services_of(request)
    provider = services.settings.console_oidc_name if services.openid is not None else ""
    return page(request, "sign_in.html", status, following=following[:500], sentence=sentence, provider=provider)


def form_error(error: ValidationError, whole: str) -> Invalid:
    """The error for a form that its model refuses. It names the first wrong field and the reason. `whole`: what the
    form makes or changes. An error that concerns no single field names `whole` instead of a field.
    """
    first_error = error.errors()[0]
    field = ".".join(str(part) for part in first_error["loc"])
    return Invalid("invalid_request", full_stop(f"{field or whole}: {first_error['msg']}"))


def whole_number(form: Form, name: str) -> int | None:
    """The number in a field of the form. Returns None if the field is empty. Raises Invalid for any text that is not
    a whole number of at most _MAX_DIGITS digits.
    """
    text = form.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise Invalid("invalid_request", f"{name}: write a whole number of at most {_MAX_DIGITS} digits.")
    return int(text)


def required_number(form: Form, name: str) -> int:
    """The number in a field of the form. Raises Invalid, also if the field is empty."""
    number = whole_number(form, name)
    if number is None:
        raise Invalid("invalid_request", f"{name}: write a whole number.")
    return number


def typed_instant(text: str) -> datetime | None:
    """The day or the instant that the person typed. Without a time zone it counts as UTC. Returns None if the text is
    empty. Raises Invalid for any other text, and for a time before FIRST or after LAST.
    """
    if not text.strip():
        return None
    try:
        instant = datetime.fromisoformat(text.strip())
    except ValueError:
        raise Invalid("invalid_request", "A time is written as 2026-11-22, or 2026-11-22T14:30.") from None
    instant = instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)
    if not FIRST <= instant <= LAST:
        raise Invalid("invalid_request", f"A time lies between the years {FIRST.year} and {LAST.year}.")
    return instant


def typed_json(request: Request, text: str) -> Any:
    """The JSON that the person typed. Raises Invalid."""
    problem = refusal(text.encode(), services_of(request).settings.json_max_depth)
    if problem is not None:
        raise Invalid(problem.code, problem.detail)
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Invalid("invalid_payload", full_stop(f"The payload is not JSON: {error}")) from None

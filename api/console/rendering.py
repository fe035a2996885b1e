"""Renders the pages of the console with Jinja2, which escapes every value. `page` renders a page, and `go_to` answers a
form. The functions at the end of the module are filters and globals of the templates. They write instants, sizes and
JSON for people.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import orjson
from fastapi import Request, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from leasehold.api.auth import security
from leasehold.api.console import assets, session
from leasehold.api.console.state import LastPage, PageKey, state_of
from leasehold.api.process.replica_reads import current_lag
from leasehold.api.process.services import services_of
from leasehold.domain.job_filter import quoted
from leasehold.transitions.jobs import EXTERNAL

#: The headers of every page. They allow pictures and scripts only from this origin, and no inline scripts. The
#: Referrer-Policy is not `no-referrer`, because a browser would then send `Origin: null` with the forms of the page. If
#: the browser sends no `Sec-Fetch-Site`, the console would refuse such a form (`check_origin` in session.py).
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "Referrer-Policy": "same-origin",
    "Vary": "Cookie",
}
#: The header with the mark of a page: a hash of its content. A refresh sends the mark back. If the content is the same,
#: the answer is 204.
MARK = "X-Console-Mark"
#: The cookie with the sentence that the next page shows after a person has sent a form.
FLASH = "leasehold_flash"
#: A page shows at most this many characters of a JSON value.
_MAX_JSON = 12_000
#: For each session and URL, the process remembers the last page that it has sent, but at most this many pages in all.
_MAX_LAST_PAGES = 2000
#: A job that waits for more seconds than this is marked as late.
_LATE_SECONDS = 60
#: The characters of a path and its query that a header contains unescaped. `%` is one of them, because the path may
#: already contain escapes.
_SAFE = "/?&=:%+.,~-_@*'()!$;"
#: An element with a relative time, such as `5 min ago`. The group is its opening tag.
_RELATIVE_TIME = re.compile(r"(<time[^>]*>)[^<]*")
#: The element with the age of the page's rows. The mark ignores this element, because the age changes with each
#: refresh, and the browser reads the age from the header Leasehold-Read-Lag.
_AS_OF = re.compile(r'<p id="as-of".*?</p>')
#: The number of seconds in each unit.
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(
        ago=ago,
        span=span,
        lasting=lasting,
        size=size,
        json=pretty,
        number=number,
        instant=instant,
        iso=iso,
        quoted=quoted,
    )
    environment.globals.update(
        scopes=security, between=between, quote=quote, due_at=due_at, is_late=is_late, is_behind=is_behind
    )
    return environment


def path_of(request: Request) -> str:
    # The path below which the console is served. Empty: the console is served at the root.
    return services_of(request).settings.console_path or ""


def page(
    request: Request,
    template: str,
    /,
    status: int = HTTPStatus.OK,
    made_of: tuple[object, ...] = (),
    **values: Any,
) -> Response:
    """Render the page. The answer to a refresh is 204 if the browser already shows the same page.

    `made_of`: all that the page is rendered from, apart from the session. If a refresh has the same `made_of` as the
    last page of its session, the page is not rendered (`unchanged`). If `made_of` is empty, the page is always
    rendered.

    The layout itself uses two of `values`. Every `refresh_seconds` seconds, an open page fetches its new content from
    `refresh_url`. If `refresh_seconds` is missing, 0 or None, the page is not refreshed.
    """
    if (no_content := unchanged(request, made_of)) is not None:
        return no_content
    services, viewer = services_of(request), session.viewer_or_none(request)
    prefix = path_of(request)
    flash = _flash_of(request)
    html = (
        _environment()
        .get_template(template)
        .render(
            prefix=prefix,
            viewer=viewer,
            path=request.url.path,
            query=request.url.query,
            flash=flash,
            now=datetime.now(UTC),
            lag=current_lag(),
            has_cells=services.other_cells is not None,
            asset=lambda name: f"{prefix}/assets/{assets.version(name)}/{name}",
            url=lambda path, **query: _url(prefix + path, query),
            **values,
        )
    )
    body = html.encode()
    # Relative times do not count for the mark, because the browser's script updates them itself.
    mark = hashlib.blake2b(_AS_OF.sub("", _RELATIVE_TIME.sub(r"\1", html)).encode(), digest_size=12).hexdigest()
    if made_of and viewer is not None:
        _remember(request, (viewer.session.nonce, str(request.url)), (mark, made_of))
    if request.headers.get(MARK) == mark:
        return Response(status_code=HTTPStatus.NO_CONTENT, headers=HEADERS)
    response = Response(body, status, HEADERS | {MARK: mark}, media_type="text/html; charset=utf-8")
    if flash is not None:
        response.delete_cookie(FLASH, path=prefix or "/", httponly=True, samesite="strict")
    if viewer is not None and not _is_refresh(request):
        session.renew(services, request, response, viewer.session)
    return response


def unchanged(request: Request, made_of: tuple[object, ...]) -> Response | None:
    """The answer 204 if the browser's page is up to date. Otherwise returns None, and the page must be rendered. The
    browser's page is up to date if it is the last page that the session got from this URL, and if that page was
    rendered from an equal `made_of`. An endpoint whose page needs many reads calls this function before these reads.
    """
    viewer = session.viewer_or_none(request)
    if not made_of or viewer is None or _flash_of(request) is not None:
        return None
    key = viewer.session.nonce, str(request.url)
    last_pages = state_of(request).last_pages
    last_page = last_pages.get(key)
    # This comparison is fast. Requests share most objects (shared.py), and Python does not compare the contents of
    # tuple members that are the same object.
    if last_page is None or last_page != (request.headers.get(MARK), made_of):
        return None
    last_pages.move_to_end(key)
    return Response(status_code=HTTPStatus.NO_CONTENT, headers=HEADERS)


def _remember(request: Request, key: PageKey, last_page: LastPage) -> None:
    """Remember the last page. If there are more than _MAX_LAST_PAGES, forget the pages that browsers have not refreshed
    for the longest time.
    """
    last_pages = state_of(request).last_pages
    last_pages[key] = last_page
    last_pages.move_to_end(key)
    while len(last_pages) > _MAX_LAST_PAGES:
        last_pages.popitem(last=False)


def _url(path: str, query: Mapping[str, Any]) -> str:
    given_values = {name: value for name, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(given_values)}" if given_values else path


def content_of(response: Response) -> Any:
    """The JSON in the answer of an endpoint of the API. The console shows it, so a person sees what a client gets."""
    return orjson.loads(bytes(response.body))


def go_to(request: Request, path: str, sentence: str, *, good: bool = True) -> Response:
    """Answer a form. The browser opens `path` (below the console), and this page shows the sentence once. `good`:
    whether the action succeeded.
    """
    response = redirect_to(request, path)
    text = base64.urlsafe_b64encode(orjson.dumps([good, sentence[:600]])).decode()
    response.set_cookie(FLASH, text, path=path_of(request) or "/", max_age=30, httponly=True, samesite="strict")
    return response


def redirect_to(request: Request, path: str) -> Response:
    """Send the browser to `path`, which is below the console. The path may come from a client. If it is no path of the
    console, the browser goes to the first page.
    """
    location = path_of(request) + quote(path if is_path(path) else "/", safe=_SAFE)
    return Response(status_code=HTTPStatus.SEE_OTHER, headers={"Location": location} | HEADERS)


def is_path(text: str) -> bool:
    """Whether the text is a path below the console, and not the address of another site."""
    return text.startswith("/") and not text.startswith("//") and "\\" not in text and text.isprintable()


def form_idempotency_key(request: Request, *names: str) -> str:
    """An idempotency key for a form. `names`: the words and ids that distinguish this form from others. With the same
    key, a second press of the form's button does nothing. A page that is rendered in a later minute has another key,
    because the person may want to repeat the act.
    """
    parts = [session.viewer_of(request).session.nonce, *names, datetime.now(UTC).strftime("%Y%m%d%H%M")]
    return f"console-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:32]}"


def _is_refresh(request: Request) -> bool:
    return "hx-request" in request.headers


def _flash_of(request: Request) -> tuple[bool, str] | None:
    """The sentence about the last form, and whether its action succeeded. None: there is no such sentence, or the
    request is a refresh. A refresh gets no sentence, because the first page that shows the sentence also deletes its
    cookie. If a refresh of another open page came first, the page after the form would not show the sentence.
    """
    return None if _is_refresh(request) else _read_flash(request.cookies.get(FLASH, ""))


def _read_flash(cookie: str) -> tuple[bool, str] | None:
    """Whether the action succeeded, and the sentence. None: the browser has no such cookie, or the cookie is
    malformed.
    """
    try:
        content = orjson.loads(base64.urlsafe_b64decode(cookie))
    except ValueError:
        return None
    match content:
        case [bool(good), str(sentence)]:
            return good, sentence
    return None


def _as_datetime(value: datetime | str) -> datetime:
    return datetime.fromisoformat(value) if isinstance(value, str) else value


def instant(value: datetime | str | None) -> str:
    """The exact instant, in UTC."""
    return "" if value is None else _as_datetime(value).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def iso(value: datetime | str) -> str:
    """The instant for the browser's script. It has no fraction of a second, to keep pages small, because a page of jobs
    has a hundred instants.
    """
    return _as_datetime(value).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def ago(value: datetime | str | None) -> Markup:
    """An HTML element that says how long ago the instant was, or in how long it comes. On hover the browser shows the
    exact instant. Empty for None.
    """
    if value is None:
        return Markup("")
    moment = _as_datetime(value)
    seconds = (datetime.now(UTC) - moment).total_seconds()
    words = f"{span(seconds)} ago" if seconds >= 0 else f"in {span(-seconds)}"
    return Markup('<time datetime="{}" title="{}">{}</time>').format(iso(moment), instant(moment), words)


def between(start: datetime | str | None, end: datetime | str | None) -> float | None:
    """Seconds from `start` to `end`. None if one of the two is unknown."""
    return None if start is None or end is None else max(0.0, (_as_datetime(end) - _as_datetime(start)).total_seconds())


def due_at(job: Mapping[str, Any]) -> datetime:
    """The instant from which the job waits: its submission, or the later time for which its run is scheduled."""
    scheduled_at = (job.get("run") or {}).get("scheduled_at")
    created_at = _as_datetime(job["created_at"])
    return created_at if scheduled_at is None else max(created_at, _as_datetime(scheduled_at))


def is_late(job: Mapping[str, Any], now: datetime) -> bool:
    """Whether the job has been due for more than _LATE_SECONDS, and has not begun."""
    has_begun = "started_at" in job or "finished_at" in job
    return not has_begun and (now - due_at(job)).total_seconds() > _LATE_SECONDS


def is_behind(queue: Mapping[str, Any], now: datetime) -> bool:
    """Whether a task of the queue has been due for more than _LATE_SECONDS, and has not begun. A queue of external
    workers is never behind, because its tasks may wait for long on purpose.
    """
    oldest = queue["oldest"]
    is_late = oldest is not None and (now - _as_datetime(oldest)).total_seconds() > _LATE_SECONDS
    return is_late and not queue["queue"].startswith(EXTERNAL)


def span(seconds: float | None) -> str:
    """A length of time in its two largest units, such as `2 d 3 h`. A time below one hour has one unit, such as `5 min`
    or `42 s`. Empty for None.
    """
    if seconds is None:
        return ""
    if seconds < _MINUTE:
        return f"{int(seconds)} s"
    if seconds < _HOUR:
        return f"{int(seconds // _MINUTE)} min"
    if seconds < _DAY:
        return _two_units(seconds, _HOUR, "h", _MINUTE, "min")
    return _two_units(seconds, _DAY, "d", _HOUR, "h")


def _two_units(seconds: float, unit: int, name: str, smaller_unit: int, smaller_name: str) -> str:
    """`2 d 3 h`; `2 d` if the rest is shorter than the smaller unit. The units are given in seconds."""
    rest = int(seconds % unit // smaller_unit)
    return f"{int(seconds // unit)} {name}" + (f" {rest} {smaller_name}" if rest else "")


def lasting(seconds: float | None) -> str:
    """A length of time. A time below a minute has milliseconds or tenths of seconds. Empty for None."""
    if seconds is None:
        return ""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < _MINUTE else span(seconds)


def size(n_bytes: float) -> str:
    amount = n_bytes
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:  # noqa: PLR2004 - decimal units
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"  # noqa: PLR2004 - three digits
        amount /= 1000
    return f"{amount:.1f} TB"


def number(count: float) -> str:
    return f"{count:,.0f}"


def pretty(value: Any, path: str = "") -> str:
    """JSON for people. A large value is cut, and the text names the number of missing characters. `path`: the path at
    which the API returns the whole value. The text of a cut value names this path.
    """
    text = orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode()
    left_out = len(text) - _MAX_JSON
    if left_out <= 0:
        return text
    return f"{text[:_MAX_JSON]}\n... {left_out:,} more characters" + (f": GET {path} has all" if path else "")

"""Renders the pages: Jinja2, which escapes every value, and the words in which pages show instants, sizes and JSON."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from operator import is_
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import orjson
from fastapi import Request, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from leasehold.api.auth import security
from leasehold.api.console import assets, session
from leasehold.api.process.services import services_of

#: Of pages. Pictures and scripts come from this origin alone; nothing is inline.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "Vary": "Cookie",
}
#: A refresh names the state that its page shows; if that is the state, the answer is 204.
MARK = "X-Console-Mark"
#: A message for the next page, after an act.
FLASH = "leasehold_flash"
_MAX_JSON = 12_000
#: Sessions whose last page is remembered.
_MAX_SHOWN = 2000
_COUNTED = re.compile(r"(<time[^>]*>)[^<]*")
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"))


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
        ago=ago, span=span, lasting=lasting, size=size, json=pretty, number=number, instant=instant
    )
    environment.globals.update(scopes=security, between=between, quote=quote)
    return environment


def path_of(request: Request) -> str:
    return services_of(request).settings.console_path or ""


def page(
    request: Request,
    template: str,
    /,
    status: int = HTTPStatus.OK,
    made_of: tuple[object, ...] = (),
    **values: Any,
) -> Response:
    """The page. To a refresh that shows the same state already: 204.

    `made_of`: all that the page of one session is made of, as objects that many requests share (shared.py). While these
    are the same, a refresh costs no rendering.
    """
    services, viewer = services_of(request), session.viewer_or_none(request)
    prefix = path_of(request)
    flash = _read_flash(request.cookies.get(FLASH, ""))
    shown = _shown(request) if made_of and viewer is not None else None
    asker = None if viewer is None else (viewer.session.nonce, str(request.url))
    if shown is not None and flash is None and asker in shown:
        last_mark, last_parts = shown[asker]
        if request.headers.get(MARK) == last_mark and all(map(is_, made_of, last_parts)):
            return Response(status_code=HTTPStatus.NO_CONTENT, headers=HEADERS)
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
            asset=lambda name: f"{prefix}/assets/{assets.version(name)}/{name}",
            url=lambda to, **query: _url(prefix + to, query),
            **values,
        )
    )
    body = html.encode()
    # Browsers count times themselves: a page on which only these have changed is not new.
    mark = hashlib.blake2b(_COUNTED.sub(r"\1", html).encode(), digest_size=12).hexdigest()
    if shown is not None:
        shown[asker] = (mark, made_of)
    if request.headers.get(MARK) == mark:
        return Response(status_code=HTTPStatus.NO_CONTENT, headers=HEADERS)
    response = Response(body, status, HEADERS | {MARK: mark}, media_type="text/html; charset=utf-8")
    if flash is not None:
        response.delete_cookie(FLASH, path=prefix or "/", httponly=True, samesite="strict")
    if viewer is not None and "hx-request" not in request.headers:
        session.renew(services, request, response, viewer.session)
    return response


def _shown(request: Request) -> MutableMapping[object, tuple[str, tuple[object, ...]]]:
    """By session and URL: the mark of the page that it last got, and what that page was made of."""
    state = request.app.state
    if not hasattr(state, "console_shown"):
        state.console_shown = OrderedDict()
    shown: OrderedDict[object, tuple[str, tuple[object, ...]]] = state.console_shown
    while len(shown) > _MAX_SHOWN:
        shown.popitem(last=False)
    return shown


def _url(path: str, query: Mapping[str, Any]) -> str:
    given = {name: value for name, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path


def content_of(response: Response) -> Any:
    """The JSON that an endpoint of the API has answered with: pages show what clients get."""
    return orjson.loads(bytes(response.body))


def go_to(request: Request, path: str, sentence: str, *, good: bool = True) -> Response:
    """Answer a form: the browser opens `path`, which shows the sentence once."""
    response = Response(status_code=HTTPStatus.SEE_OTHER, headers={"Location": path_of(request) + path} | HEADERS)
    text = base64.urlsafe_b64encode(orjson.dumps([good, sentence[:600]])).decode()
    response.set_cookie(FLASH, text, path=path_of(request) or "/", max_age=30, httponly=True, samesite="strict")
    return response


def once_of(request: Request, *names: str) -> str:
    """An idempotency key for a form, so that a second press of its button does nothing. It changes every minute."""
    parts = [session.viewer_of(request).session.nonce, *names, datetime.now(UTC).strftime("%Y%m%d%H%M")]
    return f"console-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:32]}"


def _read_flash(cookie: str) -> tuple[bool, str] | None:
    try:
        good, sentence = orjson.loads(base64.urlsafe_b64decode(cookie))
    except ValueError:
        return None
    return bool(good), str(sentence)


def _aware(value: datetime | str) -> datetime:
    return datetime.fromisoformat(value) if isinstance(value, str) else value


def instant(value: datetime | str | None) -> str:
    """The exact instant, in UTC."""
    return "" if value is None else _aware(value).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def ago(value: datetime | str | None) -> Markup:
    """An instant as the time from now, with the exact one on hover."""
    if value is None:
        return Markup("")
    at = _aware(value)
    seconds = (datetime.now(UTC) - at).total_seconds()
    words = f"{span(seconds)} ago" if seconds >= 0 else f"in {span(-seconds)}"
    return Markup('<time datetime="{}" title="{}">{}</time>').format(at.isoformat(), instant(at), words)


def between(start: datetime | str | None, end: datetime | str | None) -> float | None:
    """Seconds from `start` to `end`."""
    return None if start is None or end is None else max(0.0, (_aware(end) - _aware(start)).total_seconds())


def span(seconds: float | None) -> str:
    """A length of time in its two largest units."""
    if seconds is None:
        return ""
    for length, name in _UNITS:
        if seconds >= length:
            rest, smaller = _rest(seconds % length, length)
            return f"{int(seconds // length)} {name}" + (f" {rest} {smaller}" if rest and length > 60 else "")  # noqa: PLR2004 - minutes stand alone
    return f"{int(seconds)} s"


def _rest(seconds: float, length: int) -> tuple[int, str]:
    smaller, name = _UNITS[1] if length == _UNITS[0][0] else _UNITS[2]
    return int(seconds // smaller), name


def lasting(seconds: float | None) -> str:
    """A length of time, exact where it is short."""
    if seconds is None:
        return ""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else span(seconds)  # noqa: PLR2004 - a minute


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:  # noqa: PLR2004 - decimal units
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"  # noqa: PLR2004 - three digits
        count /= 1000
    return f"{count:.1f} TB"


def number(count: float) -> str:
    return f"{count:,.0f}"


def pretty(value: Any) -> str:
    """JSON for reading. Of a large value the beginning, and how much is left out."""
    text = orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode()
    left_out = len(text) - _MAX_JSON
    return text if left_out <= 0 else f"{text[:_MAX_JSON]}\n... {left_out:,} more characters: GET /v1/jobs/ID has all"

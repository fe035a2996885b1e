"""Sessions of the console. A signed cookie names an API key or a person, and every form contains a token of the
session.

The cookie has the key's public prefix or the person's id, the time of the sign-in, the time at which the last page was
opened, and a random number. It contains no secret. If a person changes to another tenant, the new session keeps the
time of the sign-in.

A session ends in each of these cases:
- Its key has expired, or was revoked.
- An admin disables the person, or ends the person's sessions.
- The person has no role in the tenant any more.
- The person has opened no page for `console_session_minutes`.
- MAX_HOURS have passed since the sign-in.
"""

from __future__ import annotations

import hmac
import re
import secrets
from dataclasses import dataclass, replace
from time import time
from typing import Annotated
from uuid import UUID

from fastapi import Depends, Request, Response
from fastapi.security import HTTPAuthorizationCredentials

from leasehold.api.auth.security import Require, with_source
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.domain.errors import Forbidden, Unauthenticated
from leasehold.security.sealing import Sealing
from leasehold.settings import Settings

COOKIE = "leasehold_session"  # the name of the cookie
#: The longest time from a sign-in to the end of its sessions.
MAX_HOURS = 12
#: A page renews the cookie only if this many seconds have passed since the last renewal.
_RENEW_SECONDS = 60
#: The owner of a person's session, which is the person's id and a generation. The generation is a counter in the
#: person's row. It grows when an admin ends the person's sessions or disables the person, and when the person loses
#: access to the tenant. All sessions with a lower generation have then ended.
_PERSON = re.compile(r"person-([0-9a-f]{32})-(\d{1,9})")
#: The cookie: `owner`, `began`, `seen` and `nonce` of the Session, and a signature, joined by dots.
_COOKIE = re.compile(
    r"([a-z0-9]{12}|person-[0-9a-f]{32}-\d{1,9})\.(\d{1,12})\.(\d{1,12})\.([A-Za-z0-9_-]{22})\.([A-Za-z0-9_-]{43})"
)
#: The purposes of two signatures: of the session's cookie, and of the token in its forms.
_SESSION, _FORM = "console session", "console form"


@dataclass(frozen=True, slots=True)
class Session:
    """`owner`: the prefix of a key, or the result of `owner_of` for a person. `began`, `seen`: the times of the sign-in
    and of the last page, in seconds since 1970. `nonce`: the random number.
    """

    owner: str
    began: int
    seen: int
    nonce: str

    @property
    def text(self) -> str:
        return f"{self.owner}.{self.began}.{self.seen}.{self.nonce}"


@dataclass(frozen=True, slots=True)
class Viewer:
    """The person who looks at a page. `form_token`: every form must send this token back."""

    caller: Caller
    session: Session
    form_token: str

    def may(self, *scopes: str) -> bool:
        """Whether the caller has one of these scopes."""
        return not self.caller.scopes.isdisjoint(scopes)


class SignedIn(Require):
    """Checks the caller's scope as Require does, but finds the caller by the session's cookie and not by an API key.
    Without a scope, it accepts everybody who is signed in.
    """

    #: A browser without a session is not counted as a refusal for the audit, because it gets the sign-in page.
    counts_strangers = False

    def __init__(self, scope: str = "", *, or_scope: str | None = None) -> None:
        super().__init__(scope, or_scope=or_scope)

    def refuse(self, caller: Caller) -> None:
        if self.scope:
            super().refuse(caller)

    async def identify(self, request: Request, credentials: HTTPAuthorizationCredentials | None) -> Caller:  # noqa: ARG002 - a page reads the cookie
        services = services_of(request)
        session = read(services.settings, request.cookies.get(COOKIE, ""))
        if session is None:
            raise Unauthenticated("missing_api_key", "Sign in first.")
        caller = with_source(request, await _caller_of(services, session))
        request.state.viewer = Viewer(caller, session, _form_token(services.settings, session))
        return caller


async def _caller_of(services: Services, session: Session) -> Caller:
    person = _PERSON.fullmatch(session.owner)
    if person is None:
        return await services.keyring.caller_of_session(session.owner)
    return await services.keyring.caller_of_person_session(UUID(person[1]), int(person[2]))


def owner_of(person_id: UUID, generation: int) -> str:
    """The owner of a person's session, as the cookie names it."""
    return f"person-{person_id.hex}-{generation}"


def viewer_of(request: Request) -> Viewer:
    viewer: Viewer = request.state.viewer
    return viewer


def viewer_or_none(request: Request) -> Viewer | None:
    viewer: Viewer | None = getattr(request.state, "viewer", None)
    return viewer


#: The type of an endpoint's parameter that accepts everybody who is signed in.
Anybody = Annotated[Caller, Depends(SignedIn())]


def begin(services: Services, request: Request, response: Response, owner: str, began: int | None = None) -> None:
    """Begin a session, by a response that sets the session's cookie. `began`: the time of the sign-in, if the person
    signed in earlier; None: now. Raises Unavailable if the installation has no sealing keys, because a sealing key
    signs the cookie.
    """
    now = int(time())
    session = Session(owner, now if began is None else began, now, secrets.token_urlsafe(16))
    _set_cookie(services, request, response, session)


def renew(services: Services, request: Request, response: Response, session: Session) -> None:
    """Extend the session, because its person has opened a page."""
    now = int(time())
    if now - session.seen >= _RENEW_SECONDS:
        _set_cookie(services, request, response, replace(session, seen=now))


def _set_cookie(services: Services, request: Request, response: Response, session: Session) -> None:
    signature = Sealing(services.settings).sign(_SESSION, session.text.encode())
    response.set_cookie(
        COOKIE,
        f"{session.text}.{signature}",
        path=services.settings.console_path or "/",
        httponly=True,
        samesite="strict",
        secure=is_encrypted(services, request),
    )


def end(services: Services, response: Response) -> None:
    response.delete_cookie(COOKIE, path=services.settings.console_path or "/", httponly=True, samesite="strict")


def is_encrypted(services: Services, request: Request) -> bool:
    """Whether browsers reach the API by HTTPS. The setting `public_url` decides; without it, the request's URL
    decides.
    """
    return (services.settings.public_url or str(request.url)).startswith("https://")


def read(settings: Settings, cookie: str) -> Session | None:
    """The session of a cookie. None: the cookie is missing, malformed or too old, or no sealing key verifies it."""
    match = _COOKIE.fullmatch(cookie)
    sealing = Sealing(settings)
    if match is None or not sealing.has_key:
        return None
    session = Session(match[1], int(match[2]), int(match[3]), match[4])
    if not sealing.verifies(_SESSION, session.text.encode(), match[5]):
        return None
    now = time()
    is_idle = now - session.seen > settings.console_session_minutes * 60
    return None if is_idle or now - session.began > MAX_HOURS * 3600 else session


def _form_token(settings: Settings, session: Session) -> str:
    return Sealing(settings).sign(_FORM, session.nonce.encode())


def check_form(request: Request, token: str) -> None:
    """Raises Forbidden `form_expired` if the form was made for another session, and Forbidden `foreign_form` if another
    site has sent the form.
    """
    check_origin(request)
    if not hmac.compare_digest(token.encode(), viewer_of(request).form_token.encode()):
        raise Forbidden(
            "form_expired", "The page was made for another session. Open it again, and send the form again."
        )


def check_origin(request: Request) -> None:
    """Raises Forbidden `foreign_form` for a form of another site. The header `Sec-Fetch-Site` decides. A browser from
    before 2023, and any browser without HTTPS, sends only `Origin`, so then `Origin` decides (`_is_own`). A client that
    sends neither header is no browser, and is not refused here.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        is_foreign = site not in ("same-origin", "none")
    else:
        is_foreign = origin is not None and not _is_own(request, origin)
    if is_foreign:
        raise Forbidden(
            "foreign_form",
            "The form was sent by another site. If it was not, a proxy has changed the host: let it send the browser's"
            " host as X-Forwarded-Host, or set LEASEHOLD_PUBLIC_URL.",
        )


def _is_own(request: Request, origin: str) -> bool:
    """Whether a browser may have opened the console at this origin. A proxy may have changed `Host`, so this function
    also accepts the host of `X-Forwarded-Host` and of the setting `public_url`. This is safe, because no page of
    another site can make a browser send a wrong `Host` or `X-Forwarded-Host`.

    A proxy may drop the port (nginx, `$host`). So a header without a port is compared with the host name alone. Then
    two consoles on different ports of one host are not told apart. But cookies ignore the port, too, so they could not
    be told apart anyway.
    """
    origin_host = _host_of_url(origin)
    if not origin_host:
        return False
    headers = (request.headers.get("host", ""), *request.headers.get("x-forwarded-host", "").split(","))
    own_hosts = {host.strip().lower() for host in headers}
    return (
        origin_host == _host_of_url(services_of(request).settings.public_url or "")
        or origin_host in {_without_default_port(host) for host in own_hosts}
        or re.sub(r":\d+$", "", origin_host) in own_hosts - {""}
    )


def _host_of_url(url: str) -> str:
    """The host of a URL or of an origin, with its port. Empty for the origin `null`."""
    return _without_default_port(url.partition("://")[2].partition("/")[0])


def _without_default_port(host: str) -> str:
    return re.sub(r":(80|443)$", "", host.lower())

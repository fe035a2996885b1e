"""The state that all pages of one API process share. The app makes it when the process starts."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeAlias

from fastapi import Request

from leasehold.api.console.shared import SharedAnswers
from leasehold.api.process.turnstile import Turnstile
from leasehold.domain.errors import Unavailable
from leasehold.settings import Settings

#: Seconds for which a person who signs in waits for a place among the requests to the OpenID provider.
_PATIENCE_SECONDS = 5.0
#: A page as one session sees it: the session's nonce, and the URL.
PageKey: TypeAlias = tuple[str, str]
#: A page that was sent: its mark (a hash, in the header rendering.MARK), and the objects from which the page was
#: rendered.
LastPage: TypeAlias = tuple[str, tuple[object, ...]]


class ConsoleState:
    """`answers`: the answers that pages share for some seconds. `last_pages`: the page that was sent last, by session
    and URL; if nothing has changed since, a refresh gets no new page. `sign_ins`: bounds the requests to the OpenID
    provider, so that a flood of sign-ins delays no other request.
    """

    def __init__(self, settings: Settings) -> None:
        self.answers = SharedAnswers()
        self.last_pages: OrderedDict[PageKey, LastPage] = OrderedDict()
        most_at_once = settings.console_oidc_at_once
        # People who sign in have no tenant yet, so they all count as one tenant.
        self.sign_ins = Turnstile(
            at_most=most_at_once, per_tenant=most_at_once, patience=_PATIENCE_SECONDS, refusal=_busy
        )


def state_of(request: Request) -> ConsoleState:
    state: ConsoleState = request.app.state.console
    return state


def _busy() -> Unavailable:
    return Unavailable("sign_ins_waiting", "Too many people sign in at once. Try again soon.", retry_after=1.0)

"""Makes a form act only once, however often a person presses its button.

Without JavaScript nothing disables the button after the first press. At a second press the browser sends the form
again, and shows only the second answer. So a form with a field `once` acts at the first press only, and the second
press gets the answer to the first press. If the API has not answered the first press yet, the second press waits for
that answer (ConsoleRoute in routes.py repeats the second press until then).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import Request, Response

from leasehold.api.console.rendering import go_to
from leasehold.api.console.routes import Form
from leasehold.api.console.session import viewer_of
from leasehold.api.http.idempotent import Answer, once_over_transactions
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.domain.sentences import counted


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to a form: the page that the browser opens, and the sentence that this page shows (see `go_to`).
    `good`: whether the act succeeded. `has_acted`: whether the form changed anything. If it changed nothing, a second
    press tries again.
    """

    path: str
    sentence: str
    good: bool = True
    has_acted: bool = True


def with_refusals(sentence: str, refusals: Sequence[Mapping[str, Any]]) -> str:
    """The sentence of an act on several jobs. If jobs were refused, it also has the number of refusals and the reason
    of the first.
    """
    if not refusals:
        return sentence
    were_refused = counted(len(refusals), "was refused, because", "were refused, the first because")
    return f"{sentence} {were_refused}: {refusals[0]['detail']}"


def new_form_token() -> str:
    """A new value for the field `once`. A page that is refreshed needs a value that stays the same: see
    `token_of_shown`.
    """
    return secrets.token_hex(16)


def token_of_shown(shown: object) -> str:
    """A value for the field `once`. It stays the same until `shown` (what the page shows) changes. Each act of the form
    must change `shown`. Otherwise the next act would count as a second press.
    """
    return hashlib.sha256(orjson.dumps(shown, default=str)).hexdigest()[:32]


def press_of(request: Request, form: Form) -> str | None:
    """A name for this press of the button. If the same session sends the same fields to the same path again, the press
    has the same name, and counts as a repetition. None: the form has no field `once`.
    """
    if not form.get("once"):
        return None
    # The field `token` has the CSRF token, which differs from page to page.
    fields = [[name, value] for name, value in form.pairs if name != "token"]
    parts = [viewer_of(request).session.nonce, request.url.path, fields]
    return hashlib.sha256(orjson.dumps(parts)).hexdigest()


async def act_once(request: Request, caller: Caller, form: Form, act: Callable[[], Awaitable[Outcome]]) -> Response:
    """Call `act`, and answer the form. A second press gets the answer to the first press, without a call of `act`. In
    two cases a second press calls `act` again: the form has no field `once`, or the first press changed nothing. Raises
    the errors of `act`.
    """

    async def work() -> Answer:
        outcome = await act()
        body = orjson.dumps([outcome.path, outcome.sentence, outcome.good])
        return Answer(HTTPStatus.SEE_OTHER, body, is_stored=outcome.has_acted)

    press = press_of(request, form)
    key = None if press is None else f"console-press-{press}"
    # The key already contains a hash of the whole form, so a repetition always has the hash of the first press.
    request_hash = hashlib.sha256((key or "").encode()).digest()
    answer = await once_over_transactions(services_of(request).pool, caller.tenant_id, key, request_hash, work)
    path, sentence, good = orjson.loads(answer.body)
    return go_to(request, path, sentence, good=good)

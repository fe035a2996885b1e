"""Whom a route admits, whose objects they may use, and what the log says of a request that is refused."""

from __future__ import annotations

from uuid import UUID

import pytest
from fastapi.security import HTTPAuthorizationCredentials

from leasehold.api.auth.audit import _event_of
from leasehold.api.auth.security import OPERATE, RUNS_READ, RUNS_WRITE, Require, listed_tenant, tenant_of
from leasehold.api.process.keyring import Caller
from leasehold.domain.errors import Forbidden, Unauthenticated


def caller(*scopes: str, person: bool = False) -> Caller:
    return Caller("acme", "tests", "prefix", "prefix", frozenset(scopes), person_id=UUID(int=1) if person else None)


@pytest.mark.parametrize(("person", "holder"), [(False, "The API key"), (True, "Your role")])
def test_only_one_of_the_routes_scopes_admits_and_a_refusal_says_what_lacks_it(person: bool, holder: str) -> None:
    for require, admitted in (
        (Require(RUNS_READ), {RUNS_READ}),
        (Require(RUNS_READ, or_scope=OPERATE), {RUNS_READ, OPERATE}),
    ):
        for scope in (RUNS_READ, RUNS_WRITE, OPERATE):
            if scope in admitted:
                require.refuse(caller(scope, person=person))
            else:
                with pytest.raises(Forbidden) as refused:
                    require.refuse(caller(scope, person=person))
                assert str(refused.value) == f"{holder} lacks the scope {RUNS_READ}."
    with pytest.raises(Forbidden):
        Require(RUNS_READ).refuse(caller(person=person))


def test_only_an_operator_uses_the_objects_of_other_tenants() -> None:
    assert tenant_of(caller(RUNS_READ)) == "acme"
    assert tenant_of(caller(RUNS_READ, OPERATE)) is None
    for named in (None, "acme", "rival"):
        assert listed_tenant(caller(RUNS_READ), named) == "acme"
        assert listed_tenant(caller(RUNS_READ, OPERATE), named) == named


@pytest.mark.parametrize(
    ("code", "sent", "event"),
    [
        ("missing_api_key", None, "auth.missing"),
        ("missing_api_key", f"lh_aaaaaaaaaaaa_{'A' * 43}", "auth.missing"),  # of two keys, none counts
        ("invalid_api_key", f"lh_aaaaaaaaaaaa_{'A' * 43}", "auth.rejected"),
        ("invalid_api_key", "a password", "auth.malformed"),
    ],
)
def test_the_log_tells_a_missing_a_malformed_and_a_rejected_key_apart(code: str, sent: str | None, event: str) -> None:
    credentials = None if sent is None else HTTPAuthorizationCredentials(scheme="Bearer", credentials=sent)
    assert _event_of(Unauthenticated(code, "No."), credentials) == event

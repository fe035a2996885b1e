"""Roles: named sets of scopes. A key or a person has a role within one tenant.

A key has a role if it has the scope `role:NAME`. Whenever the API identifies a caller, it replaces the role by the
scopes of the role. So existing keys also get the scopes that a later release adds to the role. `fleet:operate` (acts on
all tenants) and `external:work` (for external workers) belong to no role. Give them in addition to a role.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from leasehold.domain.kind import Kind

#: A scope with this prefix names a role.
ROLE_PREFIX = "role:"
#: From the weakest role to the strongest.
NAMES = ("viewer", "operator", "admin")
_VIEWER = frozenset({"jobs:read", "runs:read"})
_OPERATOR = _VIEWER | {"jobs:operate", "runs:write", "webhooks:write"}
_ADMIN = _OPERATOR | {"jobs:delete", "templates:write", "keys:write", "people:write", "audit:read"}


def roles_of(kinds: Iterable[Kind]) -> Mapping[str, frozenset[str]]:
    """The scopes of each role. A viewer reads jobs of every kind. An operator and an admin also change them. Exception:
    if a kind has one scope for reading and writing, a viewer does not get this scope.
    """
    scopes_of_kinds = [kind.scopes for kind in kinds if kind.scopes is not None]
    reads = frozenset(scopes.read for scopes in scopes_of_kinds if scopes.read != scopes.write)
    writes = frozenset(scopes.write for scopes in scopes_of_kinds)
    return {"viewer": _VIEWER | reads, "operator": _OPERATOR | reads | writes, "admin": _ADMIN | reads | writes}


def role_and_scopes(scopes: Iterable[str]) -> tuple[str | None, list[str]]:
    """The strongest role among the scopes of a key or a person, and the scopes that are not roles. The first value is
    None if there is no role, or only roles that this release does not know.
    """
    ordered = sorted(scopes)
    roles = {scope.removeprefix(ROLE_PREFIX) for scope in ordered if scope.startswith(ROLE_PREFIX)}
    return (
        next((name for name in reversed(NAMES) if name in roles), None),
        [scope for scope in ordered if not scope.startswith(ROLE_PREFIX)],
    )


def expanded(scopes: Iterable[str], roles: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The scopes, with each role replaced by the role's scopes. An unknown role gives no scope."""
    all_scopes = frozenset(scopes)
    direct_scopes = frozenset(scope for scope in all_scopes if not scope.startswith(ROLE_PREFIX))
    role_scopes = all_scopes - direct_scopes
    return direct_scopes.union(*(roles.get(role.removeprefix(ROLE_PREFIX), frozenset()) for role in role_scopes))

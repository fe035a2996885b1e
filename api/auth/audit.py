"""The audit of the API: who did what. Endpoints call `record` to add a row to the audit. The conversion endpoints also
call `log_access` to write a log line for each access.

Rows and lines name a key by its public prefix. They never contain a secret, a body or a file name.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import structlog
from fastapi import Request
from fastapi.security import HTTPAuthorizationCredentials

from leasehold.api.auth.security import Require
from leasehold.api.auth.source_address import source_address
from leasehold.api.process.keyring import Caller
from leasehold.db import audit as audit_rows
from leasehold.db.audit import Target
from leasehold.db.database import Connection
from leasehold.domain.errors import Forbidden, Unauthenticated
from leasehold.security.credentials import parse_key

_log = structlog.get_logger("audit")


async def record(
    connection: Connection,
    caller: Caller,
    action: str,
    target: str | UUID,
    *,
    tenant_id: str | None = None,
    **details: Any,
) -> None:
    """Add a row for the caller's act to the audit. Call this in the transaction of the act.

    `action`: a text such as `key.create`. The word before the dot is the kind of the target. `target`: the id of the
    object on which the caller acted. `tenant_id`: the tenant whose audit gets the row; None: the caller's tenant.
    `details`: stored with the row.
    """
    kind = action.partition(".")[0]
    await audit_rows.record(
        connection, caller.actor, action, Target(kind, str(target), tenant_id or caller.tenant_id), **details
    )


def log_access(event: str, request: Request, caller: Caller | None = None, **fields: Any) -> None:
    """Write one log line. `event`: a stable name such as `result.streamed`. `fields`: further fields of the line."""
    client = {} if caller is None else {"client_id": caller.client_id, "key_prefix": caller.key_prefix}
    _log.info(event, audit=True, source_ip=source_address(request), route=request.url.path, **client, **fields)


class AuditedRequire(Require):
    """Checks the API key as `Require` does, and writes a log line that names the outcome: auth.success, auth.missing,
    auth.malformed, auth.rejected or, for a key without the scope, auth.forbidden.
    """

    async def admit(self, request: Request, credentials: HTTPAuthorizationCredentials | None) -> Caller:
        try:
            caller = await super().admit(request, credentials)
        except Unauthenticated as error:
            log_access(_event_of(error, credentials), request)
            raise
        except Forbidden:  # `Require.admit` has put the client into the log context, so the line names it
            log_access("auth.forbidden", request, scope=self.scope)
            raise
        log_access("auth.success", request, caller)
        return caller


def _event_of(error: Unauthenticated, credentials: HTTPAuthorizationCredentials | None) -> str:
    if error.code == "missing_api_key" or credentials is None:
        return "auth.missing"
    return "auth.rejected" if parse_key(credentials.credentials) is not None else "auth.malformed"

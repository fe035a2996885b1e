"""The audit trail of the conversion API: one line of the logger `audit` for every access: which client, from where.

A line names a key by its public prefix. It never has a secret, a body or a file name.
"""

from __future__ import annotations

from typing import Any

import structlog
from fastapi import Request
from fastapi.security import HTTPAuthorizationCredentials

from leasehold.api.auth.security import Require
from leasehold.api.auth.source_address import source_address
from leasehold.api.process.keyring import Caller
from leasehold.domain.errors import Forbidden, Unauthenticated
from leasehold.security.credentials import parse_key

_log = structlog.get_logger("audit")


def audit(event: str, request: Request, caller: Caller | None = None, **facts: Any) -> None:
    """Write one line: `event` is a stable name such as `result.streamed`."""
    client = {} if caller is None else {"client_id": caller.client_id, "key_prefix": caller.key_prefix}
    _log.info(event, audit=True, source_ip=source_address(request), route=request.url.path, **client, **facts)


class AuditedRequire(Require):
    """`Require` that audits every outcome: auth.success, auth.missing, auth.malformed, auth.rejected and, for a key
    without the scope, auth.forbidden.
    """

    async def admit(self, request: Request, credentials: HTTPAuthorizationCredentials | None) -> Caller:
        try:
            caller = await super().admit(request, credentials)
        except Unauthenticated as error:
            audit(_refused(error, credentials), request)
            raise
        except Forbidden:  # the log context of the request names the client
            audit("auth.forbidden", request, scope=self.scope)
            raise
        audit("auth.success", request, caller)
        return caller


def _refused(error: Unauthenticated, credentials: HTTPAuthorizationCredentials | None) -> str:
    if error.code == "missing_api_key" or credentials is None:
        return "auth.missing"
    return "auth.rejected" if parse_key(credentials.credentials) is not None else "auth.malformed"

"""The audit trail of the conversion door: one log line of the logger `audit` for every access, with who and from where.

A key is named by its public prefix; no secret, no body, no file name is in a line.
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
    who = {} if caller is None else {"client_id": caller.client_id, "key_prefix": caller.key_prefix}
    _log.info(event, audit=True, source_ip=source_address(request), route=request.url.path, **who, **facts)


class AuditedRequire(Require):
    """`Require`, with every outcome audited: auth.success, auth.missing, auth.malformed, auth.rejected and, for a key
    without the scope, auth.forbidden.
    """

    async def admit(self, request: Request, credentials: HTTPAuthorizationCredentials | None) -> Caller:
        try:
            caller = await super().admit(request, credentials)
        except Unauthenticated as error:
            audit(_refused(error, credentials), request)
            raise
        except Forbidden:  # who it was, the request's context names
            audit("auth.forbidden", request, scope=self.scope)
            raise
        audit("auth.success", request, caller)
        return caller


def _refused(error: Unauthenticated, credentials: HTTPAuthorizationCredentials | None) -> str:
    if error.code == "missing_api_key" or credentials is None:
        return "auth.missing"
    return "auth.rejected" if parse_key(credentials.credentials) is not None else "auth.malformed"

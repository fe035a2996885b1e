"""The handlers of an app's tasks, as the core calls them: they decode arguments, call functions, encode results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from leasehold.app import results as encoding
from leasehold.app.arguments import Arguments
from leasehold.app.current import Current, enter, leave
from leasehold.app.limits import ResultLimits
from leasehold.app.results import Results
from leasehold.app.retry import Retry
from leasehold.domain.errors import Permanent
from leasehold.domain.verdicts import Done, File
from leasehold.domain.work import Work


class Handling:
    """One function as a handler: `plain` for a thread, `loop` for `async def`, `isolated` for a child process."""

    def __init__(
        self, name: str, function: Callable[..., Any], arguments: Arguments, results: Results, retry: Retry
    ) -> None:
        self._name = name
        self._function = function
        self._arguments = arguments
        self._results = results
        self._never = retry.never

    def plain(self, attempt: Any) -> Done:
        """For a leasehold.PlainAttempt."""
        positional, named = self._arguments.decoded(attempt.params)
        token = enter(Current(self._name, attempt))
        try:
            result = self._function(*positional, **named)
        except self._never as error:
            raise refused(error) from error
        finally:
            leave(token)
        encoded = self._results.encoded(result)
        if ResultLimits.of(attempt.opened).is_small(encoded):
            return Done(value=encoding.inline(encoded))
        attempt.write(encoding.OUTPUT, encoded, encoding.CONTENT_TYPE)
        return Done(value=encoding.stored())

    async def loop(self, attempt: Any) -> Done:
        """For a leasehold.Attempt."""
        positional, named = self._arguments.decoded(attempt.params)
        token = enter(Current(self._name, attempt))
        try:
            result = await self._function(*positional, **named)
        except self._never as error:
            raise refused(error) from error
        finally:
            leave(token)
        encoded = self._results.encoded(result)
        if ResultLimits.of(attempt.opened).is_small(encoded):
            return Done(value=encoding.inline(encoded))
        await attempt.write(encoding.OUTPUT, encoded, encoding.CONTENT_TYPE)
        return Done(value=encoding.stored())

    def isolated(self, work: Work) -> Done:
        """In the sandbox's child process."""
        positional, named = self._arguments.decoded(work.params)
        token = enter(Current(self._name, work))
        try:
            result = self._function(*positional, **named)
        except self._never as error:
            raise refused(error) from error
        finally:
            leave(token)
        encoded = self._results.encoded(result)
        if ResultLimits.of(None).is_small(encoded):
            return Done(value=encoding.inline(encoded))
        path = work.directory / encoding.OUTPUT
        path.write_bytes(encoded)
        return Done(files={encoding.OUTPUT: File(path, encoding.CONTENT_TYPE)}, value=encoding.stored())


def refused(error: Exception) -> Permanent:
    """The end of a run whose function raised what its Retry names in `never`."""
    return Permanent("handler_error", f"{type(error).__name__}: {error}")

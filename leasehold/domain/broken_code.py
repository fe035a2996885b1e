"""Describes an error that the user's own code raised while it was imported: the traceback without the platform's
frames, and one sentence.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from traceback import TracebackException

from leasehold.domain.errors import CodeBroken

#: The beginnings of the file names of code that the user cannot change. They are the platform's folder, `<` (Python's
#: frozen import, and code that a library makes at run time) and the module `importlib`. Links in the path are not
#: resolved, because a frame has the path under which Python found the file.
_NOT_OF_THE_USER = (f"{Path(__file__).parent.parent}/", "<", importlib.__file__)


def broken_code(source: str, error: BaseException) -> CodeBroken | None:
    """The error that says where the code of `source` is broken. None: no code of the user raised `error`."""
    report = TracebackException.from_exception(error)
    _keep_users_frames(report)
    # The code with a syntax error has not run, so no frame shows its place.
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
    elif report.stack:
        place = f"{report.stack[-1].filename}:{report.stack[-1].lineno}"
    else:
        return None
    sentence = f"{source} cannot be loaded: {type(error).__name__} at {place}"
    return CodeBroken(sentence, "".join(report.format()).rstrip())


def _keep_users_frames(report: TracebackException) -> None:
    """Leave only the user's frames in the traceback, and in the tracebacks of the errors that led to this error."""
    report.stack[:] = [frame for frame in report.stack if not frame.filename.startswith(_NOT_OF_THE_USER)]
    for earlier in (report.__cause__, report.__context__):
        if earlier is not None:
            _keep_users_frames(earlier)

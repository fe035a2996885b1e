"""The attributes of Celery's objects that the objects of leasehold.celery lack, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NoReturn

from leasehold.celery.exceptions import NotSupportedName

#: Sentences of advice that several attributes have in common: what to do instead.
_GROUP = "use group(task.s(item) for item in items)"
_CURRENT = "use progress, emit or checkpoint of leasehold's current()"
_CANVAS = "declare a workflow with leasehold's @app.workflow, which calls tasks in any order"
_HANDLER = "use leasehold's @app.middleware, or on_failure= of a leasehold task"
_DECLARED = "read it where the task is declared"
_SUBMITTED = "give it to apply_async(...) when you submit the call"
_ENDED = "use get, state or result"
_CONSOLE = "use the console or the command leasehold, which show runs, queues and workers"
_CRON = "declare the task with leasehold's @app.cron"
_LIFESPAN = "use leasehold's @app.lifespan"
_SETTINGS = "the connections are those of LEASEHOLD_DATABASE_URL and LEASEHOLD_AMQP_URL"

#: The dictionaries OF_...: for one class of Celery, each attribute that is lacking here -> what to do instead.
OF_TASK = {
    "map": _GROUP,
    "starmap": "use group(task.s(*item) for item in items)",
    "chunks": "use group(...), or a leasehold task with batch=",
    "apply": "call the function here, as in task(1, 2)",
    "update_state": _CURRENT,
    "send_event": _CURRENT,
    "retry": "declare the task with bind=True, and call self.retry",
    "replace": _CANVAS,
    "add_to_chord": _CANVAS,
    "add_trail": _CANVAS,
    "signature_from_request": "use signature(...), or self.retry",
    "subtask_from_request": "use signature(...), or self.retry",
    **dict.fromkeys(("on_failure", "on_success", "on_retry", "after_return", "before_start", "on_replace"), _HANDLER),
    **dict.fromkeys(
        ("max_retries", "default_retry_delay", "rate_limit", "time_limit", "soft_time_limit", "priority", "expires",
         "acks_late", "ignore_result", "serializer", "throws", "track_started", "typing", "abstract"),
        _DECLARED,
    ),
    **dict.fromkeys(("backend", "request_stack", "push_request", "pop_request"), "use bind=True and self.request"),
}  # fmt: skip
OF_SIGNATURE = {
    "set": _SUBMITTED,
    "options": _SUBMITTED,
    "set_immutable": "make the call by .si(...)",
    "immutable": "make the call by .si(...)",
    "clone": "a signature never changes: use it again, or make another by .s(...)",
    "apply": "call it here, as in task.s(1, 2)()",
    "link": "use chain(...), or on_failure= of a leasehold task",
    "link_error": "use on_failure= of a leasehold task",
    "on_error": "use on_failure= of a leasehold task",
    "freeze": "submit it by delay(), whose AsyncResult has the id",
    "id": "submit it by delay(), whose AsyncResult has the id",
    "stamp": "use tags of leasehold's submit",
    "replace": _CANVAS,
    "flatten_links": _CANVAS,
    **dict.fromkeys(("task", "args", "kwargs", "type"), "read it where the call is made"),
}
OF_RESULT = {
    **dict.fromkeys(("info", "maybe_throw", "maybe_reraise", "throw", "date_done", "retries", "worker"), _ENDED),
    **dict.fromkeys(("name", "args", "kwargs", "queue"), "read it where the run is submitted"),
    **dict.fromkeys(("children", "parent", "collect", "get_leaf", "iterdeps", "graph", "build_graph", "as_tuple",
                     "as_list"), _CANVAS),
    **dict.fromkeys(("join", "join_native", "iter_native", "results"), "use get(), which gives a group's results"),
    **dict.fromkeys(("completed_count", "waiting", "save", "restore"), _CONSOLE),
    "then": "use chain(...)",
    "backend": _SETTINGS,
}  # fmt: skip
OF_REQUEST = {
    **dict.fromkeys(("hostname", "timelimit", "correlation_id", "root_id", "parent_id", "expires", "eta", "origin",
                     "properties", "reply_to", "get"), "use leasehold's current(), which has run_id, number and log"),
    **dict.fromkeys(("headers", "stamps"), "use tags of leasehold's submit, or an argument"),
    **dict.fromkeys(("chain", "chord", "group", "callbacks", "errbacks", "children"), _CANVAS),
}  # fmt: skip
OF_APP = {
    **dict.fromkeys(("on_after_configure", "on_after_finalize", "add_periodic_task"), _CRON),
    **dict.fromkeys(("on_configure", "on_init", "on_after_fork", "steps", "loader"), _LIFESPAN),
    **dict.fromkeys(("control", "events", "user_options", "log"), _CONSOLE),
    **dict.fromkeys(("start", "worker_main", "Worker", "Beat"), "run the command leasehold worker MODULE:app"),
    **dict.fromkeys(("connection", "pool", "producer_pool", "amqp", "backend", "broker_connection",
                     "config_from_envvar", "connection_for_read", "connection_for_write"), _SETTINGS),
    **dict.fromkeys(("Task", "register_task", "create_task_cls"), "write a function, and declare it with @app.task"),
    **dict.fromkeys(("GroupResult", "ResultSet"), "use AsyncResult, whose get() gives a group's results"),
    "signature": "use app.tasks[name].signature(...)",
    "current_task": "use bind=True and self, or leasehold's current()",
    "set_current": "current_app() is the app that was made last",
    "set_default": "current_app() is the app that was made last",
    "timezone": "times without a zone are UTC",
    "now": "use datetime.now(UTC)",
    "close": "use app.app.close()",
}  # fmt: skip


class Lacking:
    """The base of the classes that stand for Celery's classes. If Celery's class has an attribute that the class here
    lacks, reading the attribute raises NotSupportedName. This error is also an AttributeError, so that `hasattr` and
    Python's protocols still work.
    """

    #: The name of the class in Celery, and {attribute that is lacking: what to do instead}.
    _IN_CELERY: ClassVar[str]
    _LACKS: ClassVar[Mapping[str, str]]

    if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept every name as an attribute

        def __getattr__(self, name: str) -> NoReturn:
            if name in self._LACKS:
                sentence = f"leasehold.celery has no {self._IN_CELERY}.{name}: {self._LACKS[name]}"
                raise NotSupportedName(sentence, name=name, obj=self)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

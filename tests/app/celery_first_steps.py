"""Celery's own first steps: the module `tasks.py` of its documentation, as it stands there."""

from celery import Celery

app = Celery("tasks", backend="rpc://", broker="pyamqp://guest@localhost//")


@app.task
def add(x, y):
    return x + y

"""A kind of work of your own: two steps, their handlers, and the registry that a worker is pointed to.

LEASEHOLD_PIPELINES=examples.greeting:pipelines leasehold worker
"""

from datetime import timedelta

from leasehold import Attempt, Done, Pipeline, Pipelines, Step

greeting = Pipeline(
    "greeting",
    module="examples.greeting",
    steps=[
        Step("write", max_attempts=3),
        Step("count", needs=("write",), reads=("write",), timeout=timedelta(seconds=30)),
    ],
)


@greeting.handles("write")
async def write(attempt: Attempt) -> Done:
    await attempt.write("greeting.txt", b"hello, world", "text/plain")
    return Done()


@greeting.handles("count")
async def count(attempt: Attempt) -> Done:
    return Done(value={"characters": len(await attempt.read("greeting.txt"))})


def pipelines() -> Pipelines:
    return Pipelines(greeting)

"""A kind of work of your own: two steps, their handlers, and the registry that a worker is pointed to.

LEASEHOLD_PIPELINES=examples.greeting:pipelines leasehold worker
"""

from leasehold import Attempt, Pipeline, Pipelines, Step

steps = [Step("write"), Step("count", needs=("write",), reads=("write",))]
greeting = Pipeline("greeting", module="examples.greeting", steps=steps)


@greeting.handles("write")
async def write(attempt: Attempt) -> None:
    await attempt.write("greeting.txt", b"hello, world", "text/plain")


@greeting.handles("count")
async def count(attempt: Attempt) -> dict[str, int]:
    return {"characters": len(await attempt.read("greeting.txt"))}


def pipelines() -> Pipelines:
    return Pipelines(greeting)

"""A pipeline of your own: two steps with a file between them, their handlers, and the registry.

`leasehold worker examples.letters:pipelines` runs it.
"""

from leasehold import Attempt, Pipeline, Pipelines, Step

steps = [Step("write"), Step("count", needs=("write",), reads=("write",))]
letters = Pipeline("letters", module="examples.letters", steps=steps)


@letters.handles("write")
async def write(attempt: Attempt) -> None:
    await attempt.write("letter.txt", b"hello, world", "text/plain")


@letters.handles("count")
async def count(attempt: Attempt) -> dict[str, int]:
    return {"characters": len(await attempt.read("letter.txt"))}


def pipelines() -> Pipelines:
    return Pipelines(letters)

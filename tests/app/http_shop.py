"""The app that test_over_http serves: the API loads it by this module's name."""

from __future__ import annotations

from datetime import datetime, timedelta

from pydantic import BaseModel, ConfigDict, Field

from leasehold import App, Context, Permanent, Unique, current

app = App("web")


class Order(BaseModel):
    id: int


class Event(BaseModel):
    model_config = ConfigDict(strict=True)
    at: datetime
    lasts: timedelta


class Patterned(BaseModel):
    model_config = ConfigDict(regex_engine="python-re")
    word: str = Field(pattern="^(?!a)")


@app.task
def event_of(event: Event) -> str:
    return f"{event.at.isoformat()} for {event.lasts.total_seconds()} s"


@app.task
def word_of(patterned: Patterned) -> str:
    return patterned.word


@app.task
def double(number: int) -> int:
    if number < 0:
        raise Permanent("negative", "no such order")
    return number * 2


@app.task(name="double_" + "d" * 52)
def double_with_a_long_name(number: int) -> int:
    return number * 2


@app.task
def large(order: Order) -> str:
    return str(order.id) * 100_000


@app.workflow
async def gathers_much(ctx: Context, count: int) -> str:
    """Each of its steps has a large result, and it has one itself."""
    parts = await ctx.gather(*(ctx.run(large, Order(id=7)) for _ in range(count)))
    return parts[-1]


@app.task(unique=Unique(by=("number",)))
def once(number: int) -> int:
    return number


@app.task(debounce=timedelta(seconds=1))
def later(number: int) -> int:
    return number


@app.task
def speaks(words: int) -> None:
    for word in range(words):
        current().emit(word)


@app.workflow
async def waits(ctx: Context, number: int) -> str:
    approved = await ctx.wait_for("approved", Order)
    return f"{number} by {approved.id}"

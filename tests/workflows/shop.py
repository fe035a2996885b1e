"""The app of the tests: tasks that note that they ran, and workflows of them."""

from __future__ import annotations

import ast
import asyncio
import uuid
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from pydantic import BaseModel

from leasehold import App, Cancelled, Context, Permanent, Retry, TaskFailed

app = App("shop")
#: What ran, in this process: {task: its arguments}.
ran: list[tuple[str, Any]] = []


class Order(BaseModel):
    id: int
    amount: int = 1


class Approval(BaseModel):
    by: str


@app.task
async def charge(order: Order) -> int:
    ran.append(("charge", order.id))
    return order.amount


@app.task
def receipt(order: Order, charged: int) -> str:
    ran.append(("receipt", order.id))
    return f"{order.id}: {charged}"


@app.task(retry=Retry(times=1, delay=timedelta(0)))
async def refuse(code: str) -> None:
    raise Permanent(code, "no such card")


@app.task
async def double(number: int) -> int:
    return 2 * number


@app.task
async def large(size: int) -> str:
    return "x" * size


@app.workflow
async def checkout(ctx: Context, order: Order) -> str:
    charged = await ctx.run(charge, order)
    return await ctx.run(receipt, order, charged)


@app.workflow
async def naps(ctx: Context, seconds: float) -> list[str]:
    before = ctx.now()
    await ctx.sleep(seconds)
    return [str((ctx.now() - before).total_seconds() >= seconds), str(ctx.uuid()), str(ctx.random().random())]


@app.workflow
async def approved(ctx: Context, seconds: float | None = None) -> str:
    try:
        first = await ctx.wait_for("approved", Approval, timeout=seconds)
        second = await ctx.wait_for("approved", Approval, timeout=seconds)
    except TimeoutError:
        return "nobody approved"
    return f"{first.by}, {second.by}"


@app.workflow
async def compensates(ctx: Context, code: str) -> str:
    try:
        await ctx.run(refuse, code)
    except TaskFailed as failed:
        return f"{failed.code}; {await ctx.run(double, 21)}"
    return "charged"


@app.workflow
async def fails(ctx: Context, code: str) -> None:
    await ctx.run(refuse, code)


async def _twice(ctx: Context, number: int) -> int:
    return await ctx.run(double, await ctx.run(double, number))


@app.workflow
async def fans(ctx: Context, count: int) -> list[int]:
    plain = await ctx.gather(*(ctx.run(double, number) for number in range(count)))
    branches = await ctx.gather(*(_twice(ctx, number) for number in range(3)))
    return [sum(plain), *branches]


@app.workflow
async def partly(ctx: Context) -> list[str]:
    results = await ctx.gather(ctx.run(double, 1), ctx.run(refuse, "a"), ctx.run(refuse, "b"), return_exceptions=True)
    try:
        await ctx.gather(ctx.run(refuse, "c"), ctx.run(double, 2), ctx.run(refuse, "d"))
    except TaskFailed as failed:
        results.append(failed)
    return [one.code if isinstance(one, TaskFailed) else str(one) for one in results]


def _drawn() -> str:
    ran.append(("drawn", None))
    return uuid.uuid4().hex


async def _exiting() -> None:
    raise SystemExit(3)


@app.workflow
async def exits(ctx: Context, where: str) -> str:
    """Exits the interpreter itself, or in a call; the call's error is an answer."""
    if where == "itself":
        raise SystemExit(3)
    try:
        await ctx.call(_exiting)
    except TaskFailed as error:
        return error.message
    return "no error"


async def _broken() -> None:
    raise ValueError("broken")


@app.workflow
async def calls(ctx: Context) -> list[Any]:
    drawn = await ctx.call(_drawn)
    await ctx.sleep(0.05)
    try:
        await ctx.call(_broken)
    except TaskFailed as failed:
        return [drawn, failed.code, failed.message]
    return []


async def _slow() -> None:
    ran.append(("slow", None))
    await asyncio.sleep(2)


@app.workflow
async def cleans_up(ctx: Context) -> None:
    await ctx.sleep(0.01)
    try:
        await ctx.call(_slow)
        await ctx.run(double, 1)
    except Cancelled:
        await ctx.call(_drawn)
        raise


@app.workflow
async def reads_much(ctx: Context, size: int) -> int:
    return len(await ctx.run(large, size))


@app.workflow
async def awaits_else(ctx: Context) -> None:
    await asyncio.sleep(1)


@app.workflow
async def loops(ctx: Context, count: int) -> int:
    total = 0
    for number in range(count):
        total += await ctx.run(double, number)
    return total


@app.workflow
async def changes(ctx: Context) -> str:
    """Its code is another in each test."""
    raise NotImplementedError


SEVEN = Order(id=7, amount=5)


@app.workflow
async def starts(ctx: Context) -> str:
    child = await ctx.start(checkout, SEVEN)
    return await child.result()


@app.workflow
async def two_approvals(ctx: Context) -> list[str]:
    return list(await ctx.gather(ctx.wait_for("first", str), ctx.wait_for("second", str)))


@app.workflow
async def slow_child(ctx: Context) -> str:
    child = await ctx.start(approved_later)
    await ctx.sleep(0.01)
    return await child.result()


@app.workflow
async def approved_later(ctx: Context) -> str:
    return await ctx.wait_for("go", str)


@app.workflow
async def odd_values(ctx: Context, text: str) -> str:
    return repr(await ctx.call(_value_of(text)))


def _value_of(text: str) -> Callable[[], Awaitable[Any]]:
    async def value() -> Any:
        return ast.literal_eval(text)

    return value


@app.workflow
async def starts_both(ctx: Context) -> None:
    await ctx.start(approved)
    await ctx.detached.start(approved)
    await ctx.wait_for("never")


async def _drawing() -> str:
    return "drawn"


@app.workflow
async def everything(ctx: Context) -> list[Any]:
    drawn = await ctx.call(_drawing)
    first = await ctx.run(double, 1)
    await ctx.sleep(60)
    both = await ctx.gather(_named(ctx, 2), _named(ctx, 3))
    approval = await ctx.wait_for("go", Approval)
    try:
        await ctx.run(refuse, "code")
    except TaskFailed as failed:
        return [drawn, first, both, approval.by, failed.code]
    return []


async def _named(ctx: Context, number: int) -> int:
    await ctx.call(_drawing)
    return await ctx.named("doubling").run(double, number)

"""The app of the sample that test_testing_kit.py runs with the plugin."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from pydantic import BaseModel

from leasehold import App, Context, Limit, Retry, current
from leasehold.celery import Celery

app = App("kit")
celery = Celery("kit-celery")


class Order(BaseModel):
    id: int
    email: str


@app.task(retry=Retry(times=2, delay=timedelta(hours=1)))
def send_receipt(order: Order) -> str:
    return f"sent to {order.email} by attempt {current().number}"


@app.task(retry=Retry(times=3, never=(ValueError,)))
def charge(order: Order) -> str:
    return f"charged {order.email}"


@app.task(isolated=True)
def measure(text: str) -> int:
    return len(text)


@app.task
async def checkout(order: Order) -> str:
    run = await send_receipt.asubmit(order, tags={"customer": "7"})
    return str(run.id)


@app.task
async def add(a: int, b: int = 2) -> int:
    return a + b


@app.workflow
async def remind(ctx: Context) -> int:
    """Polls each hour for three hours: how often."""
    begin, polls = ctx.now(), 0
    while ctx.now() - begin < timedelta(hours=3):
        polls += await ctx.run(add, 1, 0)
        await ctx.sleep(timedelta(hours=1))
    return polls


@app.task(limit=Limit(at_most=1))
async def ask_the_bank(amount: int) -> int:
    return amount


@app.workflow
async def bill(ctx: Context) -> list[int]:
    first = await ctx.gather(ctx.run(ask_the_bank, 1), ctx.run(ask_the_bank, 2), ctx.run(add, 3, 0))
    return [*first, await ctx.run(ask_the_bank, 4)]


@app.cron("0 3 * * *")
async def nightly() -> str:
    return "done"


@celery.task(autoretry_for=(ConnectionError,), max_retries=2, default_retry_delay=0)  # type: ignore[untyped-decorator]  # as Celery's
def pay(amount: int) -> str:
    return f"paid {amount}"


@celery.task(bind=True)  # type: ignore[untyped-decorator]  # as Celery's
def pay_once(self: Any) -> str:
    return f"paid after {self.request.retries} retries"

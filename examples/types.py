"""The types of tasks and their results. mypy and pyright check this file, and each `assert_type` must hold for both."""

from datetime import timedelta
from typing import assert_type

from pydantic import BaseModel

from leasehold import App, Batch, Retry, Run

app = App("types")


class Order(BaseModel):
    id: int
    email: str


@app.task(queue="mail", retry=Retry(times=5, never=(ValueError,)), timeout=timedelta(minutes=5))
def send_receipt(order: Order) -> str:
    return f"sent to {order.email}"


@app.task
async def add(a: int, b: int = 2) -> int:
    return a + b


@app.task
def nothing() -> list[int]:
    return []


@app.cron("0 3 * * *", zone="Europe/Berlin")
def nightly(days: int = 7) -> None: ...


@app.task
async def tagged(*, name: str) -> str:
    return name


@app.task(batch=Batch(size=100))
async def index(orders: list[Order]) -> list[int]:
    return [order.id for order in orders]


@app.task(batch=Batch(size=100), queue="mail")
def count(words: list[str]) -> list[int]:
    return [len(word) for word in words]


async def checked(order: Order) -> None:
    assert_type(
        send_receipt.submit(order, key="order-17", delay=timedelta(minutes=1), tags={"customer": "7"}), Run[str]
    )
    assert_type(send_receipt.submit(order).result(), str)
    assert_type(send_receipt.submit_in(object(), order, key="order-17"), Run[str])
    assert_type(await (await add.asubmit(1, b=3)), int)
    assert_type(await (await add.asubmit(1, key="one")), int)
    assert_type(await (await add.asubmit_in(object(), 1, b=3)), int)
    assert_type(add.options(key="one").submit(1, b=3).result(), int)
    assert_type(nothing.submit(key="one").result(), list[int])
    assert_type([run.result() for run in send_receipt.submit_many([order, send_receipt.call(order)])], list[str])
    assert_type(send_receipt.local(order), str)
    assert_type(send_receipt(order), str)
    assert_type(await add(1), int)
    assert_type(nightly.submit().wait(30), Run[None])
    assert_type(await tagged.submit(name="one"), str)
    assert_type(await index.submit(order, key="one"), int)
    assert_type(await index([order]), list[int])
    assert_type(count(["a"]), list[int])
    assert_type(count.local("a"), int)
    index.submit([order])  # type: ignore[call-overload]  # it takes one item, not a list
    send_receipt.submit(1)  # type: ignore[call-overload]  # 1 is not an Order
    send_receipt.submit(order, keys="one")  # type: ignore[call-overload]  # there is no option `keys`
    tagged.submit(name=1)  # type: ignore[call-overload]  # 1 is not a str
    add.submit(1, b="x")  # type: ignore[call-overload]  # "x" is not an int
    add.options(key="one").submit("x")  # type: ignore[arg-type]  # "x" is not an int

"""The types of tasks and their results. mypy and pyright check this file, and each `assert_type` must hold for both."""

from datetime import timedelta
from typing import assert_type

from pydantic import BaseModel

from leasehold import App, Batch, Context, Retry, Run

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


@app.workflow
async def greet(_ctx: Context, name: str = "you") -> str:
    return f"hello {name}"


@app.workflow(queue="mail")
async def remind(_ctx: Context, days: int = 7) -> int:
    return days


@app.workflow
async def wait(_ctx: Context) -> None: ...


@app.workflow(version=2)
async def ship(_ctx: Context, order: Order, note: str = "") -> int:
    return order.id + len(note)


@app.workflow
async def close(_ctx: Context, *, month: int) -> int:
    return month


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
    assert_type(await tagged.options(key="one").submit(name="one"), str)
    assert_type(await nothing.asubmit_in(object(), key="one"), Run[list[int]])
    assert_type(await index.submit(order, key="one"), int)
    assert_type(await index([order]), list[int])
    assert_type(count(["a"]), list[int])
    assert_type(count.local("a"), int)
    assert_type(greet.submit().result(), str)
    assert_type(await greet.submit("me", key="one"), str)
    assert_type(await greet.submit(name="me"), str)
    assert_type(remind.submit().result(), int)
    assert_type(await remind.submit(14), int)
    assert_type(wait.submit().result(), None)
    assert_type(await ship.submit(order), int)
    assert_type(await ship.submit(order, note="soon"), int)
    assert_type(await close.submit(month=11), int)
    index.submit([order])  # type: ignore[call-overload]  # it takes one item, not a list
    send_receipt.submit(1)  # type: ignore[call-overload]  # 1 is not an Order
    send_receipt.submit(order, keys="one")  # type: ignore[call-overload]  # there is no option `keys`
    tagged.submit(name=1)  # type: ignore[arg-type]  # 1 is not a str
    tagged.submit(key="one")  # type: ignore[call-arg]  # it needs a name
    await tagged.asubmit(key="one")  # type: ignore[call-arg]  # as above
    tagged.submit_in(object(), key="one")  # type: ignore[call-arg]  # as above
    await tagged.asubmit_in(object(), key="one")  # type: ignore[call-arg]  # as above
    add.submit(1, b="x")  # type: ignore[call-overload]  # "x" is not an int
    add.options(key="one").submit("x")  # type: ignore[arg-type]  # "x" is not an int
    ship.submit()  # type: ignore[call-overload]  # it needs an order
    ship.submit(1)  # type: ignore[call-overload]  # 1 is not an Order
    close.submit(month="May")  # type: ignore[arg-type]  # "May" is not an int

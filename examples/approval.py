"""An order that waits for somebody's approval. `leasehold dev examples.approval:app` runs it."""

from datetime import timedelta

from pydantic import BaseModel

from leasehold import App, Context, Permanent, TaskFailed

app = App("orders")
LARGE = 100
SOLD_OUT = {13}


class Order(BaseModel):
    id: int
    amount: int


class Approval(BaseModel):
    by: str


@app.task
def charge(order: Order) -> str:
    return f"charge-{order.id}"


@app.task
def refund(charge_id: str, why: str) -> str:
    return f"{charge_id} is refunded: {why}"


@app.task
async def ship(order: Order) -> str:
    if order.id in SOLD_OUT:
        raise Permanent("out_of_stock", "nothing is left of it")
    return f"parcel-{order.id}"


@app.workflow
async def fulfil(ctx: Context, order: Order) -> str:
    charge_id = await ctx.run(charge, order)
    try:
        if order.amount > LARGE:
            await ctx.wait_for("approved", Approval, timeout=timedelta(days=2))
        return await ctx.run(ship, order)
    except TimeoutError:
        return await ctx.run(refund, charge_id, "nobody approved")
    except TaskFailed as failed:
        return await ctx.run(refund, charge_id, failed.message)

"""A web shop: an order and its receipt are one transaction of the shop's own database session."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from uuid import UUID

from fastapi import FastAPI
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from leasehold import App

app = App("web_shop")
sessions: async_sessionmaker[AsyncSession] = async_sessionmaker(expire_on_commit=False)


class Base(DeclarativeBase): ...


class OrderRow(Base):
    __tablename__ = "shop_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]


class Order(BaseModel):
    email: str
    pieces: int


class Placed(BaseModel):
    order: int
    run: UUID


@app.task
async def send_receipt(order: int, email: str) -> str:
    return f"receipt {order} is on its way to {email}"


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
    engine = create_async_engine(os.environ["SHOP_DATABASE_URL"])
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    sessions.configure(bind=engine)
    yield
    await engine.dispose()


web = FastAPI(lifespan=lifespan)


@web.post("/orders", status_code=201)
async def place(order: Order) -> Placed:
    async with sessions.begin() as session:
        row = OrderRow(email=order.email)
        session.add(row)
        await session.flush()
        run = await send_receipt.asubmit_in(session, row.id, order.email)
        if order.pieces < 1:
            raise ValueError("nothing is ordered: the row and the run vanish together")
    return Placed(order=row.id, run=run.id)


@web.get("/receipts/{run}")
async def receipt(run: UUID) -> str:
    return await send_receipt.find(run)

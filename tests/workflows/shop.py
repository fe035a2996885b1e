"""The app of the tests: tasks that note that they ran, and workflows of them."""

from __future__ import annotations

import ast
import asyncio
import uuid
from collections.abc import Awaitable, Callable
from datetime import date, datetime, time, timedelta
from typing import Annotated, Any
from uuid import UUID

from pydantic import AnyUrl, BaseModel, ConfigDict, Field, NaiveDatetime, PlainSerializer, computed_field

from leasehold import (
    App,
    Cancelled,
    Context,
    Failed,
    Limit,
    NotWhileUndoing,
    Permanent,
    Retry,
    SignalInvalid,
    TaskFailed,
    current,
)

app = App("shop")
#: What ran, in this process: {task: its arguments}.
ran: list[tuple[str, Any]] = []
#: Calls that last until a cancel meets them, also where its statement stands still for seconds.
MANY = 15_000


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
def triple(number: int) -> int:
    return 3 * number


@app.task
async def large(size: int) -> str:
    return "x" * size


@app.task
async def unready() -> None:
    await asyncio.sleep(0.3)
    raise Permanent("unready", "not yet")


@app.task
async def stuck() -> None:
    for _ in range(600):
        await asyncio.sleep(0.1)
        current().checkpoint()


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
async def reads_the_clock(ctx: Context) -> list[str]:
    """The text of the time before its first result, and after each."""
    times = [ctx.now()]
    await ctx.run(double, 1)
    times.append(ctx.now())
    await ctx.wait_for("go")
    times.append(ctx.now())
    await (await ctx.start(double, 1)).result()
    times.append(ctx.now())
    return [time.isoformat() for time in times]


def _too_much() -> str:
    return "x" * 1024 * 1024


@app.workflow
async def ends_by_what_follows_a_failure(ctx: Context) -> None:
    try:
        await ctx.run(unready)
    except TaskFailed:
        await ctx.call(_too_much)


async def _looks() -> None:
    await asyncio.sleep(0.3)


@app.workflow
async def polls_until_a_deadline(ctx: Context, how: str) -> tuple[float, int]:
    """It polls for a second, by its clock: the seconds that passed by it, and how often it polled."""
    began = ctx.now()
    rounds = 0
    while ctx.now() < began + timedelta(seconds=1) and rounds < 50:
        rounds += 1
        try:
            match how:
                case "wait":
                    await ctx.wait_for("ready", timeout=0.3)
                case "step":
                    await ctx.run(unready)
                case "call":
                    await ctx.call(_looks)
        except (TimeoutError, TaskFailed):
            continue
    return (ctx.now() - began).total_seconds(), rounds


@app.workflow
async def approved(ctx: Context, seconds: float | None = None) -> str:
    try:
        first = await ctx.wait_for("approved", Approval, timeout=seconds)
        second = await ctx.wait_for("approved", Approval, timeout=seconds)
    except TimeoutError:
        return "nobody approved"
    return f"{first.by}, {second.by}"


@app.workflow
async def listens(ctx: Context, names: list[str]) -> list[int]:
    return [await ctx.wait_for(name, int) for name in names]


@app.workflow
async def listens_in_vain(ctx: Context, times: int) -> int:
    """How often nothing came in time."""
    missed = 0
    for _ in range(times):
        try:
            await ctx.wait_for("nothing", timeout=0.05)
        except TimeoutError:
            missed += 1
    return missed


@app.workflow
async def hears_twice(ctx: Context, seconds: float) -> list[int]:
    both: list[Any] = await ctx.gather(ctx.sleep(seconds), ctx.wait_for("go", int))
    return [both[1], await ctx.wait_for("go", int)]


@app.workflow
async def insists(ctx: Context) -> list[str]:
    """What was wrong with each signal that does not fit, and then who approved."""
    refusals = []
    while True:
        try:
            approval = await ctx.wait_for("approved", Approval)
        except SignalInvalid as error:
            refusals.append(f"{error.signal} {error.path}: {error.reason}")
        else:
            return [*refusals, approval.by]


class Timed(BaseModel):
    """Each field reads texts that the format of JSON Schema does not allow."""

    at: datetime | None = None
    local: NaiveDatetime | None = None
    day: date | None = None
    opens: time | None = None
    lasts: timedelta | None = None
    key: UUID | None = None
    url: AnyUrl | None = None


class Patterned(BaseModel):
    """The pattern is Python's own: JSON Schema has no such thing."""

    model_config = ConfigDict(regex_engine="python-re")
    word: str = Field(pattern="^(?!a)")


@app.workflow
async def listens_to_times(ctx: Context) -> list[str]:
    return sorted((await ctx.wait_for("go", Timed)).model_fields_set)


@app.workflow
async def listens_to_a_word(ctx: Context) -> str:
    return (await ctx.wait_for("go", Patterned)).word


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
async def doubles(ctx: Context, count: int) -> int:
    return sum(await ctx.gather(*(ctx.run(double, number) for number in range(count))))


@app.workflow
async def doubles_once(ctx: Context, count: int) -> list[int]:
    """Gathers one call several times."""
    call = ctx.run(double, 2)
    return await ctx.gather(*[call] * count)


async def _awaits(*pendings: Awaitable[Any]) -> Any:
    """The result of the last."""
    for pending in pendings:
        result = await pending
    return result


@app.workflow
async def gathers_a_gather(ctx: Context) -> list[Any]:
    """Awaits one gather in several places while it is open."""
    both: Awaitable[list[Any]] = ctx.gather(ctx.run(double, 1), _twice(ctx, 2))
    return [*await ctx.gather(both, both, _awaits(both)), await both]


@app.workflow
async def races(ctx: Context, what: str) -> None:
    """Two branches await one call, and which of them comes first depends on what ends first."""
    call: Awaitable[Any] = ctx.run(double, 1)
    shared = ctx.gather(call) if what == "gather" else call

    async def early() -> None:
        await ctx.run(double, 5)
        if what == "call of a branch of the branch":
            await ctx.gather(_awaits(shared))
        await shared

    async def late() -> None:
        await ctx.wait_for("go", timeout=300)  # a worker keeps no wait without an end
        await (ctx.gather(shared) if what == "call in a gather" else shared)

    await ctx.gather(late(), early())


@app.workflow
async def shares(ctx: Context, who_begins: str) -> list[Any]:
    """Several branches await one call, and it is clear which of them begins it."""
    shared: Awaitable[int] = ctx.run(double, 1)
    first, second = ctx.wait_for("go", timeout=300), ctx.run(double, 5)
    match who_begins:
        case "their gather":
            together = ctx.gather(shared, _awaits(first, shared), _awaits(second, shared))
        case "an earlier branch":
            await ctx.gather(_awaits(second, shared))
            await shared
            together = ctx.gather(_awaits(first, shared), _awaits(ctx.sleep(0), shared))
        case _:  # the first await of a branch
            begins = _awaits(ctx.gather(shared), ctx.sleep(0), shared)
            together = ctx.gather(_awaits(second, shared), begins, _awaits(ctx.gather(_awaits(first, shared))))
    return [*await together, await shared]


@app.workflow
async def never_could_end(ctx: Context, how: str) -> None:
    gathers: list[Awaitable[Any]] = []

    async def waits_for(number: int) -> None:
        await gathers[number]

    match how:
        case "one coroutine twice":
            coroutine = _twice(ctx, 1)
            await ctx.gather(coroutine, coroutine)
        case "a branch waits for its own gather":
            gathers.append(ctx.gather(waits_for(0)))
            await gathers[0]
        case "two gathers wait for each other":
            gathers += [ctx.gather(waits_for(1)), ctx.gather(waits_for(0))]
            await ctx.gather(*gathers)


@app.workflow
async def partly(ctx: Context) -> list[str]:
    results: list[Any] = await ctx.gather(
        ctx.run(double, 1), ctx.run(refuse, "a"), ctx.run(refuse, "b"), return_exceptions=True
    )
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


#: Lets `_slow` go on.
released = asyncio.Event()


async def _slow() -> None:
    ran.append(("slow", None))
    await released.wait()


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
async def starts_large(ctx: Context, size: int) -> int:
    return len(await (await ctx.start(large, size)).result())


@app.workflow
async def starts_reader(ctx: Context, size: int) -> str:
    """The result of a workflow that has a step with a large result itself."""
    return await (await ctx.start(repeats_large, size)).result()


@app.workflow
async def repeats_large(ctx: Context, size: int) -> str:
    return "y" + await ctx.run(large, size)


#: What `unreliable` does: it fails until it is in here.
repaired: set[int] = set()


@app.task(retry=Retry(times=0))
async def unreliable(number: int) -> int:
    if number not in repaired:
        raise Permanent("broken", "it is broken")
    return number


@app.workflow
async def starts_unreliable(ctx: Context, number: int) -> int:
    return await (await ctx.start(unreliable, number)).result()


@app.workflow
async def works_beside_its_child(ctx: Context, number: int) -> str:
    child = await ctx.start(approved, None)
    await ctx.run(unreliable, number)
    return await child.result()


@app.workflow
async def listens_once_repaired(ctx: Context, number: int) -> int:
    """It fails before its first call until the number is repaired."""
    if number not in repaired:
        raise Permanent("broken", "it is broken")
    return await ctx.wait_for("go", int)


@app.workflow
async def awaits_a_listener(ctx: Context, number: int) -> int:
    return await (await ctx.start(listens_once_repaired, number)).result()


@app.workflow
async def survives_its_child(ctx: Context, number: int) -> list[str]:
    """It makes other calls if the run that it starts fails, and then waits."""
    child = await ctx.start(unreliable, number)
    try:
        results = [str(await child.result()), ctx.now().isoformat()]
    except TaskFailed as failed:
        results = [failed.code, str(await ctx.run(double, number))]
    try:
        return [*results, str(await ctx.wait_for("go", int))]
    except Cancelled:
        await ctx.call(_undo, results[0])
        raise


@app.workflow
async def runs_a_workflow(ctx: Context) -> str:
    return await ctx.run(checkout, SEVEN)


class Aliased(BaseModel):
    number: int = Field(alias="orderNumber")


def _aliased() -> Aliased:
    return Aliased(orderNumber=7)


class Priced(BaseModel):
    """Its JSON has a field that it does not read."""

    model_config = ConfigDict(extra="forbid")
    amount: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def cents(self) -> int:
        return 100 * self.amount


@app.task
async def price(order: Order) -> Priced:
    return Priced(amount=order.amount)


@app.workflow
async def compensates_what_it_cannot_read(ctx: Context, how: str) -> list[str]:
    """What it was told, and what it did about it; and then it waits."""
    try:
        if how == "step":
            await ctx.run(price, SEVEN)
        else:
            await (await ctx.start(price, SEVEN)).result()
    except TaskFailed as failed:
        done = [failed.code, failed.message, str(await ctx.run(double, 21))]
        await ctx.wait_for("go")
        return done
    return ["read"]


class Rounded(BaseModel):
    number: Annotated[int, PlainSerializer(lambda number: f"about {number}")]


def _rounded() -> Rounded:
    ran.append(("rounded", None))
    return Rounded(number=7)


async def _has_charged(number: int) -> bool:
    """Waits until the task has run."""
    try:
        async with asyncio.timeout(20):
            while ("charge", number) not in ran:
                await asyncio.sleep(0.01)
    except TimeoutError:
        return False
    return True


@app.workflow
async def calls_beside_a_step(ctx: Context, number: int) -> bool:
    both: list[Any] = await ctx.gather(ctx.run(charge, Order(id=number)), ctx.call(_has_charged, number))
    return bool(both[1])


def _much(size: int) -> str:
    ran.append(("much", size))
    return "x" * size


@app.workflow
async def calls_much(ctx: Context, size: int) -> int:
    return len(await ctx.call(_much, size))


def _unknown() -> Any:
    return 7


_unknown.__annotations__["return"] = "ast.NoSuchThing"


@app.workflow
async def calls_the_unknown(ctx: Context) -> int:
    """The function's annotation names what only a type checker knows."""
    result: int = await ctx.call(_unknown)
    return result


@app.workflow
async def reads_and_waits(ctx: Context, size: int) -> int:
    text = await ctx.run(large, size)
    await ctx.wait_for("go")
    return len(text)


@app.workflow
async def typed_calls(ctx: Context, *, aliased: bool) -> int:
    """The JSON of the call's result has names of its own, or is nothing that the type takes back."""
    return (await ctx.call(_aliased)).number if aliased else (await ctx.call(_rounded)).number


@app.workflow
async def awaits_else(ctx: Context) -> None:
    await asyncio.sleep(1)


async def _ends_late() -> None:
    ran.append(("late", None))
    await asyncio.sleep(0.5)


@app.workflow
async def limits_by_asyncio(ctx: Context, what: str) -> None:
    async with asyncio.timeout(0.1):
        await (ctx.wait_for("approved") if what == "a signal" else ctx.call(_ends_late))


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
async def meets(ctx: Context) -> datetime:
    return await ctx.wait_for("at", datetime)


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


async def _prices() -> Any:
    return {"zebra": 1, "ant": 2, "Ant": 3}


@app.workflow
async def doubles_prices(ctx: Context) -> dict[str, int]:
    """It makes a call for each name, in the order in which the recorded result has them."""
    totals = {}
    for name, price in (await ctx.call(_prices)).items():
        totals[name] = await ctx.run(double, price)
    return totals


@app.workflow
async def starts_both(ctx: Context) -> None:
    await ctx.start(approved, None)
    await ctx.detached.start(approved, None)
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


async def _undo(what: str) -> str:
    ran.append(("undo", what))
    return what


async def _undoing(ctx: Context, what: str) -> None:
    try:
        await ctx.run(double, 5)
        await ctx.wait_for(what)
    except Cancelled:
        await ctx.call(_undo, what)
        raise


@app.workflow
async def undoes(ctx: Context) -> str:
    """Waits in each way there is, and undoes its work when it is cancelled."""
    try:
        await ctx.call(_drawing)
        await ctx.sleep(60)
        child = await ctx.start(checkout, SEVEN)
        await ctx.gather(ctx.run(double, 1), _named(ctx, 2), ctx.run(triple_alone, 3), ctx.sleep(60))
        await ctx.wait_for("go", Approval)
        await child.result()
    except Cancelled:
        await ctx.call(_undo, "first")
        await ctx.call(_undo, "second")
        raise
    return "done"


@app.workflow
async def undoes_a_wait(ctx: Context, kind: str) -> None:
    try:
        match kind:
            case "sleep":
                await ctx.sleep(60)
            case "signal":
                await ctx.wait_for("go", Approval, timeout=60)
            case "run":
                await ctx.run(stuck)
            case "result":
                await (await ctx.start(approved_later)).result()
            case "limited":
                await ctx.run(stuck_alone)
            case _:
                await ctx.gather(ctx.run(stuck), _named(ctx, 2), ctx.run(stuck_alone), ctx.sleep(60))
    except Cancelled:
        await ctx.call(_undo, "first")
        await ctx.call(_undo, "second")
        raise


@app.workflow
async def undoes_after_a_sleep(ctx: Context) -> str:
    try:
        await ctx.sleep(0.01)
        await ctx.wait_for("go", Approval)
    except Cancelled:
        await ctx.call(_undo, "slept")
        raise
    return "done"


@app.workflow
async def undoes_branches(ctx: Context) -> None:
    try:
        await ctx.gather(_undoing(ctx, "a"), _undoing(ctx, "b"))
    finally:
        await ctx.call(_undo, "both")


@app.workflow
async def refunds(ctx: Context) -> None:
    """Its undoing is a run of its own."""
    try:
        await ctx.wait_for("go")
    except Cancelled:
        try:
            await ctx.run(double, 1)
        except NotWhileUndoing:
            await ctx.detached.start(double, 2)
        raise


@app.workflow
async def refunds_a_gather(ctx: Context, how: str) -> list[int]:
    try:
        match how:
            case "results":
                results: list[Any] = await ctx.gather(
                    ctx.run(double, 1), ctx.run(stuck), ctx.wait_for("go"), return_exceptions=True
                )
            case "a gather of results":
                ((*results,),) = await ctx.gather(
                    ctx.gather(ctx.run(double, 1), ctx.wait_for("go"), return_exceptions=True)
                )
            case _:
                results = await ctx.gather(ctx.run(refuse, "first"), ctx.run(stuck), ctx.wait_for("go"))
        return [2 * result for result in results if not isinstance(result, Exception)]
    except TaskFailed as failed:
        await ctx.call(_undo, failed.code)
        return []
    except Cancelled:
        await ctx.detached.start(double, 2)
        raise


@app.workflow
async def undoes_by_waiting(ctx: Context, order: Order) -> None:
    """Calls in its undoing what a cancelled run starts no more; and goes on after each refusal."""
    try:
        await ctx.wait_for("go")
    except Cancelled:
        for refused in (
            ctx.run(charge, order),
            ctx.sleep(1),
            ctx.wait_for("more"),
            ctx.start(charge, order),
            ctx.gather(ctx.run(charge, order)),
        ):
            try:
                await refused
            except NotWhileUndoing as error:
                await ctx.call(_undo, error.call)
        await ctx.run(charge, order)


class Unprintable(Exception):
    """Its text cannot be read."""

    def __str__(self) -> str:
        raise AttributeError("no detail")


@app.workflow
async def undoes_badly(ctx: Context, unprintable: bool) -> None:
    try:
        await ctx.wait_for("go")
    except Cancelled:
        raise (Unprintable() if unprintable else ValueError("no refund")) from None


async def _forever() -> None:
    ran.append(("forever", None))
    await asyncio.sleep(60)


@app.workflow(cancel_grace=timedelta(milliseconds=2600))  # in whole seconds: three
async def undoes_for_ever(ctx: Context) -> None:
    try:
        await ctx.wait_for("go")
    finally:
        await ctx.call(_forever)


@app.workflow
async def repeats(ctx: Context, kind: str, count: int) -> None:
    for number in range(count):
        match kind:
            case "start":
                await ctx.start(double, number)
            case "call":
                await ctx.call(_drawn)
            case "wait":
                await ctx.sleep(0)


@app.workflow
async def keeps_on(ctx: Context) -> None:
    """Calls only functions: it meets the cancel at one of them."""
    try:
        for _ in range(MANY):
            await ctx.call(_drawn)
    except Cancelled:
        await ctx.call(_undo, "loop")
        raise


#: How many attempts of `alone` run now, and the most that have run at once.
alone_now = {"now": 0, "most": 0}


@app.task(limit=Limit(at_most=1))
async def alone(number: int) -> int:
    ran.append(("alone", number))
    alone_now["now"] += 1
    alone_now["most"] = max(alone_now.values())
    await asyncio.sleep(0.05)
    alone_now["now"] -= 1
    return 2 * number


@app.task(limit=Limit(at_most=1), retry=Retry(times=1, delay=timedelta(0)))
async def refuse_alone(code: str) -> None:
    raise Permanent(code, "no such card")


@app.task
async def told(failed: Failed) -> None:
    ran.append(("told", failed.task))


@app.task(limit=Limit(at_most=1), on_failure=told)
async def unreliable_alone(number: int) -> int:
    ran.append(("unreliable_alone", number))
    if number not in repaired:
        raise Permanent("broken", f"{number} is broken")
    return number


@app.task(limit=Limit(at_most=1))
async def large_alone(size: int) -> str:
    return "x" * size


@app.task(limit=Limit(at_most=1))
async def stuck_alone() -> None:
    for _ in range(600):
        await asyncio.sleep(0.1)
        current().checkpoint()


@app.task(limit=Limit(at_most=1))
def triple_alone(number: int) -> int:
    return 3 * number


@app.workflow
async def alone_and_not(ctx: Context) -> list[int]:
    first, second = await ctx.gather(ctx.run(triple_alone, 1), ctx.run(triple, 2))
    return [await ctx.run(triple_alone, first), await ctx.run(double, second)]


@app.workflow
async def gathers_alone(ctx: Context, count: int) -> list[int]:
    return await ctx.gather(*(ctx.run(alone, number) for number in range(count)))


@app.workflow
async def branches_alone(ctx: Context, count: int) -> list[int]:
    """Steps and runs of their own in branches, one after the other."""

    async def branch(number: int) -> int:
        return await ctx.run(alone, await ctx.run(double, number))

    return await ctx.gather(ctx.run(double, 100), *(branch(number) for number in range(count)), ctx.run(alone, 100))


@app.workflow
async def alone_and_listens(ctx: Context) -> list[int]:
    first = await ctx.run(alone, 1)
    await ctx.wait_for("go")
    return [first, await ctx.named("second").run(alone, 2), await ctx.run(alone, 3)]


@app.workflow
async def refused_both_ways(ctx: Context, code: str) -> list[str]:
    errors: list[Any] = await ctx.gather(ctx.run(refuse, code), ctx.run(refuse_alone, code), return_exceptions=True)
    return [f"{type(error).__name__} {error.code}: {error.message}" for error in errors]


@app.workflow
async def reads_large_alone(ctx: Context, size: int) -> int:
    return len(await ctx.run(large_alone, size))


async def note_cancel() -> None:
    ran.append(("note_cancel", None))


@app.workflow
async def stuck_beside(ctx: Context) -> None:
    try:
        await ctx.run(stuck_alone)
    except Cancelled:
        await ctx.call(note_cancel)
        raise


@app.workflow
async def retries_alone(ctx: Context, number: int) -> list[int]:
    return [await ctx.run(alone, number), *await ctx.gather(ctx.run(unreliable_alone, number), ctx.run(alone, 9))]


@app.workflow
async def falls_back(ctx: Context, number: int) -> int:
    try:
        return await ctx.run(unreliable_alone, number)
    except TaskFailed:
        await ctx.run(double, number)
        return await ctx.run(unreliable_alone, number + 1)

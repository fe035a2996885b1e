"""`Driver`: runs the coroutines of a workflow, from one wait to the next.

A branch is the workflow's own coroutine, or a coroutine that it gives to `gather`. A branch yields the call that it
awaits. If the journal (a row for each call) has the result of the call, the driver resumes the branch immediately.
Otherwise the branch waits. When every branch waits, `advance` returns, and the worker suspends the workflow: it commits
the new rows (`calls`) and gives its lease back.

The worker may keep the driver. Then the next `advance` goes on with the results that have come meanwhile. If no worker
has the driver any more, a new driver runs the code again from its top, and gives the calls the results that the journal
has. This is a replay.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import orjson
from pydantic import ValidationError

from leasehold.domain.errors import (
    Cancelled,
    HandlerMissing,
    LeaseLost,
    NotWhileUndoing,
    Permanent,
    ResultUnreadable,
    SignalInvalid,
    StepError,
    TaskFailed,
    deciding,
)
from leasehold.domain.ids import new_id
from leasehold.domain.json_pointer import first_mismatch_of
from leasehold.domain.sentences import with_article
from leasehold.domain.states import JOB_TERMINAL
from leasehold.domain.storable import as_stored, storable_text
from leasehold.runtime.foreign_errors import contained, text_of
from leasehold.transitions.workflows.reading import Entry, Journal, StoredSignal
from leasehold.transitions.workflows.records import Call
from leasehold.workflows.branch import Branch
from leasehold.workflows.ends import needed_ends
from leasehold.workflows.journal import Replay, is_own_run, with_ancestors
from leasehold.workflows.no_task import NoTask, wrong_await
from leasehold.workflows.pending import (
    Gather,
    Journaled,
    LocalCall,
    Outcome,
    Patch,
    Pending,
    ResultCall,
    RunCall,
    SignalCall,
    SleepCall,
    StartCall,
)
from leasehold.workflows.port import Port

#: After the driver has resumed branches this many times in a row, it lets the worker's other attempts run.
_BURST = 200
#: The journal stores at most this many characters of an error's message.
_MAX_MESSAGE = 1000
#: A result of `ctx.call` may have at most this many bytes of JSON, unless the worker allows more. The bound is small,
#: because the result is stored in the journal's row, and each replay reads the whole journal.
MAX_CALL_BYTES = 64 * 1024


class JournalLost(Exception):
    """The journal lacks calls that this driver has committed, because a failover to an asynchronous standby has undone
    them. A new driver must replay the workflow from its beginning.
    """


class _NotCalled(Exception):
    """A function of `ctx.call` was not called, because a cancel came that the workflow had not seen."""


class Driver:
    """Runs one workflow. `start` makes the workflow's coroutine. The coroutine makes its calls on the context (`ctx`),
    and only while the driver runs it. The worker passes a `port`, whose methods read and write the journal.
    `max_calls`: how many calls the workflow may make. `max_call_bytes`: how many bytes of JSON the result of a
    `ctx.call` may have.

    `calls`: rows of the journal that are not committed yet. `news`: the column task.news when the driver last read the
    journal. The column counts the signals, and the ends of steps, that have come for the workflow. If the column has a
    larger value when the worker suspends the workflow, the workflow is due again immediately.
    """

    def __init__(
        self,
        run_id: UUID,
        start: Callable[[Driver], Coroutine[Any, Any, Any]],
        max_calls: int,
        max_call_bytes: int = MAX_CALL_BYTES,
    ) -> None:
        self.run_id = run_id
        self.version = 0  # the version of the workflow's code when the run was submitted
        self.calls: list[Call] = []
        self.news = 0
        self._start = start
        self._max_calls = max_calls
        self._max_call_bytes = max_call_bytes
        self._call_count = 0  # how many calls the workflow has made, in the journal and since, for `max_calls`
        self._replay = Replay(())  # the rows of the journal to which the code has not come yet
        self._signals: deque[StoredSignal] = deque()  # signals that `_read` has read, and no call has taken
        # Together with the journal, `_read` reads only the oldest signals. `_last_signal`: the id of the last signal
        # that `_read` has read, if there are more signals than it has read; else None. `_last_of_name`: name -> the id
        # of the last signal of this name that `_take_signal` has read since.
        self._last_signal: int | None = None
        self._last_of_name: dict[str, int] = {}
        # Waits that raised SignalInvalid in the workflow's code, each with the id of its signal.
        self._invalid_signals: list[tuple[SignalCall[Any], int]] = []
        self._ends: list[Call] = []  # the ends of awaited steps and runs that are not recorded yet (see `_receive_end`)
        # Failures of awaited steps and runs, each with the branch of its call. `_date_failures` decides whether a
        # failure moves the branch's time (`Branch.now`), and adds its record to `_ends`.
        self._failures: list[tuple[Branch, Call]] = []
        self._main: Branch | None = None  # the branch of the workflow's own coroutine
        self._active: Branch | None = None  # the branch whose code runs now
        self._no_task = NoTask()  # keeps asyncio's tasks away from the workflow's code
        self._ready: deque[Branch] = deque()  # branches that can go on
        self._waiting_calls: dict[tuple[str, int], Journaled[Any]] = {}  # (branch, number) -> the call that waits
        # id() of a Pending -> the branches, gathers and calls that wait for this Pending. A RunCall waits for the end
        # of its run.
        self._waiters: dict[int, list[Branch | Gather | RunCall[Any]]] = {}
        self._branches: dict[str, Branch] = {}  # path -> branch
        self._coroutines: set[Coroutine[Any, Any, Any]] = set()  # all coroutines of gathers that have become branches
        self._step_counts: dict[tuple[str, str], int] = {}  # how many calls of `run` there were, by branch and name
        # The asyncio tasks that carry out `ctx.call` and `ctx.start`, and `ctx.run` of limited tasks.
        self._local_tasks: dict[asyncio.Task[Any], LocalCall[Any] | StartCall[Any] | RunCall[Any]] = {}
        self._committing = asyncio.Lock()  # held by `_commit`
        self._cancelling = False  # the workflow has seen the cancel (see `_cancel`)
        self._clock_began: datetime | None = None  # PostgreSQL's time when the loop's clock was 0
        self._cancelled_at: datetime | None = None  # when the cancel was requested; `_read` reads it with the journal
        self._has_met_cancel = False  # Cancelled was raised in a branch

    # --- for the worker

    async def advance(self, port: Port) -> Outcome:
        """Run the workflow on until every branch waits, or until the workflow has ended. This method does not return
        while a function of `ctx.call`, or the start of a run, is under way.

        Raises the error with which the workflow ends (`final_error`), Cancelled and LeaseLost. If it raises
        JournalLost, the workflow's code has not gone on yet.
        """
        await self._read(port)
        main = self._main
        assert main is not None
        try:
            while await self._go_on(port, main):
                if not self._local_tasks:
                    return Outcome(ended=False, wakes_after_ends=needed_ends(main), delay=self._seconds_to_deadline())
                await self._finish_local_task(port)
        finally:
            for task in self._local_tasks:
                task.cancel()
        await self._reopen(port, main.error)
        outcome = self._outcome_of(main)
        # `calls` may still have the row of the signal that was consumed last. If a client requests a cancel only now,
        # PostgreSQL refuses the first commit. The code has already ended, and this cancel must not change how the run
        # ends. So the second commit counts the cancel as seen, and writes the row.
        if not await self._commit(port):
            self._cancelling = True
            await self._commit(port)
        return outcome

    def close(self) -> None:
        """Close the coroutines, because this driver is not needed any more. Their `finally` blocks run, but must not
        call the context.
        """
        for branch in self._branches.values():
            if not branch.is_done:
                # A `finally` may await or raise. Its error is dropped, because it must not change how the run ends.
                with suppress(BaseException), self._no_task:
                    branch.coroutine.close()

    async def _go_on(self, port: Port, main: Branch) -> bool:
        """Raise a requested cancel in the branches, and then run every branch that is ready. Returns True if the
        workflow waits, and False if it has ended.
        """
        if not self._cancelling and (self._cancelled_at is not None or port.cancelled()):
            self._cancel()
        await self._run_ready(port)
        return not main.is_done

    def calls_taken(self) -> None:
        """Forget `calls`, because the worker has taken them and writes them to the journal. If the write fails, the
        worker must not use this driver again.
        """
        self.calls = []

    async def _commit(self, port: Port) -> bool:
        """Write `calls` to the journal now. If a cancel was requested that the workflow has not seen, this writes
        nothing and returns False.
        """
        # Only one commit at a time. Otherwise a caller that finds no calls would go on while another caller is still
        # writing them.
        async with self._committing:
            calls, self.calls = self.calls, []  # the next commit writes the calls that are made meanwhile
            if not calls or await port.record(calls, cancelling=self._cancelling):
                return True
            self.calls = [*calls, *self.calls]
            return False

    async def _commit_or_cancel(self, port: Port) -> bool:
        """Write `calls` to the journal now. Returns False if a cancel came that the workflow had not seen. In that case
        this method has raised Cancelled in the waiting branches, and has written `calls` with the rows of the cancel.
        """
        if await self._commit(port):
            return True
        self._cancel()
        await self._commit(port)
        return False

    async def _reopen(self, port: Port, error: BaseException | None) -> None:
        """If the workflow ends with the SignalInvalid of a wait, record that wait as open again, and its signal as
        consumed. If the run is retried, it then waits for another signal. Exception: if the journal has already
        recorded the wait as done, a retried run gets the same payload again.
        """
        for call, signal in self._invalid_signals:
            if call.error is error and any(row.signal == signal for row in self.calls):
                self.calls = [_open_wait(call, signal) if row.signal == signal else row for row in self.calls]
                await self._commit(port)

    # --- for the context

    @property
    def active(self) -> Branch:
        """The branch that runs. Raises RuntimeError outside of the workflow's own code."""
        if self._active is None:
            raise RuntimeError("the context of a workflow was used outside of its function")
        return self._active

    def patched(self, name: str) -> bool:
        """Implements Context.patched."""
        branch = self.active
        if name in branch.patches:
            return branch.patches[name]
        call = Patch(name)
        call.branch, call.number = branch.path, branch.number + 1
        entry = self._replay.at((call.branch, call.number))
        # If the journal has later rows, but not the patch, the run passed this point with the old code. A look at the
        # patch's place alone would not show this, because this place may be empty although the journal has later rows.
        # This happens in two cases. The next row may be in a branch of a gather. Or the place may belong to a function
        # of `ctx.call`, which has no row while it runs, and the next row comes after it.
        is_patch = entry is not None and (entry.kind, entry.name) == ("patch", name)
        is_new = is_patch or not self._replay.goes_on(branch.path)
        if is_new:
            branch.number += 1
            if self._replay.take(call) is None:
                self._write(Call(call.branch, call.number, "patch", name, state="done"))
        branch.patches[name] = is_new
        return is_new

    # --- results from the journal

    async def _read(self, port: Port) -> None:
        """Read the journal. The first time, read all of it, and make the branch of the workflow's own coroutine. Later,
        read only the rows of the calls that wait, and give these calls the results that have come.
        """
        if self._main is None:
            journal = await port.read(None)
            if journal.is_of_other_step:
                raise Permanent(
                    "two_workflows",
                    "another step of this run is a workflow, too, and a run has one journal: let one workflow start the"
                    " other (ctx.start)",
                )
            self._replay = Replay(journal.entries)
            self._call_count = self._replay.call_count
            self.version = journal.version
            self._main = self._branches[""] = Branch("", self._start(self), journal.started_at)
            self._ready.append(self._main)
            self._take_news(journal)
            return
        journal = await port.read(list(self._waiting_calls))
        if len(journal.entries) < len(self._waiting_calls):
            raise JournalLost
        self._take_news(journal)
        signal_calls = []
        for entry in journal.entries:
            call = self._waiting_calls[entry.branch, entry.number]
            if isinstance(call, SignalCall):
                signal_calls.append((call, entry))
            else:
                await self._receive(port, call, entry)
        for call, entry in signal_calls:
            await self._match_signal(port, call, entry)
        self._date_failures()

    def _take_news(self, journal: Journal) -> None:
        # Remember what came with the journal's rows, for example the first signals and a requested cancel.
        self.news = journal.news
        self._clock_began = journal.read_at - timedelta(seconds=asyncio.get_running_loop().time())
        self._signals = deque(journal.signals)
        self._last_signal = journal.signals[-1].id if journal.has_more_signals else None
        self._last_of_name = {}
        self._cancelled_at = journal.cancelled_at

    async def _receive(self, port: Port, call: Journaled[Any], entry: Entry) -> None:
        """Give the call its result from the journal's entry. If the entry has no result yet, the call waits."""
        if entry.state == "cancelled":
            self._reject_as_cancelled(call)
        elif self._ended_by_cancel(call, entry):
            self._wait(call, None)
        else:
            try:
                await self._receive_result(port, call, entry)
            except ResultUnreadable as error:
                self._receive_unreadable(port, call, entry, error)

    def _receive_unreadable(self, port: Port, call: Journaled[Any], entry: Entry, error: ResultUnreadable) -> None:
        """Reject the call, because its type cannot read its result. The rejection is recorded as an end (see
        `_receive_end`), because a replay by a release that can read the result must not go another way.

        Exception: raises `error` in two cases. First, this is not the last attempt: during a deployment another worker
        may have a release that can read the result. Second, the journal has recorded the result already: the code has
        gone on with the result once, so a rejection would contradict the journal.
        """
        if entry.state != "open" or not port.is_last_attempt():
            raise error
        failure = TaskFailed("result_unreadable", storable_text(str(error)[:_MAX_MESSAGE]))
        self._ends.append(_failed(call, failure, entry.at))
        self._reject(call, failure, entry.at)

    async def _receive_result(self, port: Port, call: Journaled[Any], entry: Entry) -> None:
        """Do what `_receive` does, for a call that no cancel has ended. `entry.state`: the state of the call that the
        journal has recorded. `entry.status`: the present state of the step or run that the call awaits.
        """
        branch = self._branch_of(call)
        if isinstance(call, ResultCall):
            await self._receive_end(port, call, branch, entry)
        elif isinstance(call, RunCall) and call.is_own_run:
            assert entry.child is not None
            await self._await_own_run(port, call, entry.child)
        elif isinstance(call, (RunCall, LocalCall)) and entry.state == "failed":
            self._reject(call, TaskFailed(entry.value["code"], entry.value["message"]), _instant_of(entry.value))
        elif isinstance(call, RunCall) and entry.status == "succeeded":
            self._resolve(call, branch, entry.at, await self._result(port, call, entry))
        elif isinstance(call, RunCall) and entry.status in ("failed", "cancelled", "skipped"):
            message = entry.message or f"the step was {entry.status}"
            self._receive_failure(call, TaskFailed(entry.code or entry.status, message), entry.at)
        elif isinstance(call, StartCall):
            assert entry.child is not None
            call.resolve(call.make(entry.child))
            self._wake(call)
        elif isinstance(call, SleepCall) and (entry.state == "done" or entry.seconds == 0):  # no seconds are left
            self._end_sleep(call, branch, entry)
        elif isinstance(call, LocalCall) and entry.state == "done":
            result = call.decode(orjson.dumps(entry.value["value"]))
            self._resolve(call, branch, _instant_of(entry.value), result)
        elif isinstance(call, SignalCall):
            await self._match_signal(port, call, entry)
        else:
            self._wait(call, entry.seconds)

    async def _await_own_run(self, port: Port, call: RunCall[Any], child: UUID) -> None:
        """Replay the wait for the run that does the work of the call. The transaction that starts the run also writes
        the row of the wait. If the journal lacks this row now, the run had failed, a client has retried this workflow,
        and the retry has deleted the row. Then the workflow retries the run, too.
        """
        if self._replay.at((_branch_of_end(call), 1)) is None:
            if self._cancelling:
                self._reject_as_cancelled(call)
            else:
                self._begin_own_run(port, call, child, again=True)
            return
        end = self._end_of(call, child)
        entry = self._replay.take(end)
        assert entry is not None
        await self._receive(port, end, entry)
        self._check_wait(end)

    def _begin_own_run(self, port: Port, call: RunCall[Any], child: UUID, *, again: bool = False) -> None:
        """Begin to start the run `child`, which does the work of the call. `again`: the journal has the start of this
        run already, so retry the run instead.
        """
        record = Call(call.branch, call.number, "start", call.step, child=child)
        wait = Call(_branch_of_end(call), 1, "result", call.step, child=child)
        if again:
            self._take_ends()
        else:
            self._count_call()
        self._local_tasks[asyncio.ensure_future(self._start_run(port, call, record, wait, again=again))] = call

    def _end_of(self, call: RunCall[Any], child: UUID) -> ResultCall[Any]:
        """The wait for the run that does the work of the call. The wait gives its result to the call. Its place is
        below that of the call: for call 3, branch `3/` and number 1. So a call has the same place whether its task has
        a concurrency limit or not, even if the task gets or loses the limit while the workflow runs.
        """
        end: ResultCall[Any] = ResultCall(call.task, child)
        end.name, end.branch, end.number = call.step, _branch_of_end(call), 1
        end.owner = self._branches[call.branch]
        self._waiters[id(end)] = [call]
        return end

    async def _receive_end(self, port: Port, call: ResultCall[Any], branch: Branch, entry: Entry) -> None:
        """Give the call the end of its run. If the journal has a record of that end, use the record; otherwise use the
        run's present state. If the run has not ended, the call waits.

        If the journal has no such record, the driver writes it together with the next call that the code makes. The
        reason: a replay must come to that next call again, even if the awaited run was retried and ended in another
        way, or was deleted. Before the next call, nothing depends on the end. Exception: a large result is not
        recorded, because it is an output of the run, which stays in the store for as long as the run is kept.
        """
        if entry.state == "failed":
            self._reject(call, TaskFailed(entry.value["code"], entry.value["message"]), _instant_of(entry.value))
        elif entry.state == "done" and (at := _instant_of(entry.value)) is not None:  # the record of an end has `at`
            result = call.task.decode_result(entry.value["value"])
            self._resolve(call, branch, at, result)
        elif entry.status == "succeeded":
            result = await self._result(port, call, entry)
            if entry.value is None or "output" not in entry.value:
                value = {"value": None if entry.value is None else entry.value.get("value"), "at": entry.at.isoformat()}
                self._ends.append(Call(call.branch, call.number, call.kind, call.name, "done", value))
            self._resolve(call, branch, entry.at, result)
        elif (error := _error_of_run(entry)) is not None:
            self._receive_failure(call, error, self._time() if entry.status is None else entry.at)
        else:
            self._wait(call, entry.seconds)

    def _receive_failure(self, call: Journaled[Any], error: TaskFailed, at: datetime) -> None:
        """Reject the call, because its step or run has failed at `at`. The journal has not recorded the failure."""
        self._failures.append((self._branch_of(call), _failed(call, error, at)))
        self._reject(call, error)

    def _date_failures(self) -> None:
        """For each new failure, move the time of the call's branch (`Branch.now`) to the instant of the failure, and
        record the failure with this instant as an end (see `_receive_end`). Call this before any branch goes on.

        Exception: the journal has calls that were made after the failure, but no record of the failure. Then the code
        met the failure under an earlier release, which did not move the time. The later calls may depend on the time,
        so it does not move now, and the record has no instant.
        """
        for branch, failure in self._failures:
            lineage = (self._branches[path] for path in with_ancestors(branch.path) if path in self._branches)
            if self._replay.has_gone_on((ancestor.path, ancestor.gather_count) for ancestor in lineage):
                del failure.value["at"]
            branch.pass_time(_instant_of(failure.value))
            self._ends.append(failure)
        self._failures = []

    def _ended_by_cancel(self, call: Journaled[Any], entry: Entry) -> bool:
        """Whether the awaited step or run ended because this run is being cancelled. The call then gets no result.
        Instead, `_cancel` raises Cancelled where the call is awaited.
        """
        # If the state is not open, the journal has recorded how the call ended. This record decides.
        if self._cancelled_at is None or entry.state != "open":
            return False
        if isinstance(call, RunCall):
            return entry.status in ("cancelled", "skipped")
        return isinstance(call, ResultCall) and entry.status == "cancelled" and entry.at >= self._cancelled_at

    async def _result(self, port: Port, call: RunCall[Any] | ResultCall[Any], entry: Entry) -> Any:
        """The result of the succeeded step or run that the call awaits. A large result is not in the entry. It is an
        output, which the port fetches.
        """
        assert entry.child is not None
        if entry.value is not None and "output" in entry.value:
            encoded = await port.fetch(entry.child, entry.value["output"], is_run=isinstance(call, ResultCall))
            return call.task.decode_result(orjson.loads(encoded))
        return call.task.decode_result(None if entry.value is None else entry.value.get("value"))

    async def _match_signal(self, port: Port, call: SignalCall[Any], entry: Entry | None) -> None:
        """Give the call the signal that the journal has recorded for it, or else the oldest unconsumed signal of its
        name. If there is no such signal, the call times out or waits.
        """
        branch = self._branch_of(call)
        if entry is not None and entry.state == "timed_out":
            self._reject(call, TimeoutError(f"no signal {call.name} came in time"), _instant_of(entry.value))
        elif entry is not None and entry.state == "done":
            at = datetime.fromisoformat(entry.value["at"])
            # Earlier releases recorded no `invalid`, and did not move the time.
            self._deliver(call, branch, entry.value["value"], at, at if "invalid" in entry.value else None)
        elif (signal := await self._take_signal(port, call.name)) is not None:
            value = {"value": signal.payload, "at": signal.at.isoformat()}
            self._deliver(call, branch, signal.payload, signal.at, signal.at)
            if call.error is not None:
                value["invalid"] = True
                self._invalid_signals.append((call, signal.id))
            self._end_wait(entry, Call(call.branch, call.number, "signal", call.name, "done", value, signal=signal.id))
        elif entry is not None and entry.seconds == 0:
            value = {"at": entry.at.isoformat()}
            self._end_wait(entry, Call(call.branch, call.number, "signal", call.name, "timed_out", value))
            self._reject(call, TimeoutError(f"no signal {call.name} came in time"), entry.at)
        else:
            if entry is None:
                self._write(_open_wait(call))
            self._wait(call, call.seconds if entry is None else entry.seconds)

    async def _take_signal(self, port: Port, name: str) -> StoredSignal | None:
        """The oldest signal of this name that no call has taken, or None. The signal may be among those that `_read`
        has read. If it is not, and `_read` has not read all signals, the port reads it.
        """
        signal = next((signal for signal in self._signals if signal.name == name), None)
        if signal is not None:
            self._signals.remove(signal)
        elif self._last_signal is not None:
            signal = await port.signal(name, self._last_of_name.get(name, self._last_signal))
            if signal is not None:
                self._last_of_name[name] = signal.id
        return signal

    def _end_wait(self, entry: Entry | None, record: Call) -> None:
        """Record how the wait for a signal ended. `entry`: the wait's row in the journal, which is counted already;
        None: the wait has no row yet, so count it.
        """
        if entry is None:
            self._count_call()
        self.calls.append(record)

    def _end_sleep(self, call: SleepCall, branch: Branch, entry: Entry) -> None:
        """Let the workflow go on after its sleep, and record the end of the sleep. The record is committed with the
        next calls. A replay must pass the sleep to reach these calls, even if PostgreSQL's clock has gone back since.
        """
        if entry.state == "open":
            self.calls.append(Call(call.branch, call.number, call.kind, call.name, "done"))
        self._resolve(call, branch, entry.at, None)

    def _deliver(
        self, call: SignalCall[Any], branch: Branch, payload: Any, at: datetime, invalid_at: datetime | None
    ) -> None:
        """Give the call the payload of its signal, or SignalInvalid if the payload does not fit. `invalid_at`: the
        instant to which SignalInvalid moves the time.
        """
        try:
            value = call.decode(payload)
        except ValidationError as error:
            self._reject(call, SignalInvalid(call.name, *first_mismatch_of(error)), invalid_at)
            return
        self._resolve(call, branch, at, value)

    def _resolve(self, call: Journaled[Any], branch: Branch, at: datetime | None, value: Any) -> None:
        """End the call with a result. `at`: when the result came; the branch's time moves forward to this instant;
        None: the branch's time stays as it is. `_reject` does the same with an error.
        """
        branch.pass_time(at)
        call.resolve(value)
        self._wake(call)

    def _reject(self, call: Journaled[Any], error: BaseException, at: datetime | None = None) -> None:
        self._branch_of(call).pass_time(at)
        call.fail(error)
        self._wake(call)

    def _time(self) -> datetime:
        """The present time by PostgreSQL's clock, computed from PostgreSQL's last answer."""
        assert self._clock_began is not None
        return self._clock_began + timedelta(seconds=asyncio.get_running_loop().time())

    def _wake(self, pending: Pending[Any]) -> None:
        """Let the branches, gathers and calls that wait for `pending` go on."""
        if isinstance(pending, Journaled):
            self._waiting_calls.pop((pending.branch, pending.number), None)
        for waiter in self._waiters.pop(id(pending), ()):
            if isinstance(waiter, Branch):
                self._ready.append(waiter)
            elif isinstance(waiter, RunCall):
                waiter.is_done, waiter.value, waiter.error = True, pending.value, pending.error
                self._wake(waiter)
            else:
                waiter.open_count -= 1
                if waiter.open_count == 0:
                    self._settle_gather(waiter)

    def _settle_gather(self, gather: Gather) -> None:
        """End a gather whose parts are all done. Its error is the first in the order of the parts, which is the same at
        each replay. Exception: Cancelled comes before all other errors, and is raised even with `return_exceptions`.
        The code that awaits the gather must see the cancel there, so that it can undo its work.
        """
        errors = [part.error for part in gather.parts if part.error is not None]
        cancelled = next((error for error in errors if isinstance(error, Cancelled)), None)
        gather.owner.now = max([gather.owner.now, *(part.now for part in gather.parts if isinstance(part, Branch))])
        if cancelled is not None:
            gather.fail(cancelled)
        elif errors and not gather.return_exceptions:
            gather.fail(errors[0])
        else:
            gather.resolve([part.value if part.error is None else part.error for part in gather.parts])
        self._wake(gather)

    # --- running the branches

    async def _run_ready(self, port: Port) -> None:
        """Run the ready branches, and those that they wake, until none is ready."""
        burst = 0
        while self._ready:
            await self._run_branch(port, self._ready.popleft())
            burst += 1
            if burst % _BURST == 0:
                await asyncio.sleep(0)
                port.check()

    async def _run_branch(self, port: Port, branch: Branch) -> None:
        """Run the branch until it awaits a call or ends. Then begin the call, or wake all that wait for the branch."""
        if self._cancelling and branch.waits_for is not None and isinstance(branch.waits_for.error, Cancelled):
            branch.cancelled = True  # `send` below raises Cancelled in the branch (Pending.__await__)
        self._active, awaited = branch, None
        try:
            with self._no_task:
                awaited = branch.coroutine.send(None)
        except StopIteration as end:
            branch.resolve(end.value)
        except (Exception, Cancelled) as error:  # noqa: BLE001 - the code that awaits the branch gets the error
            branch.fail(error)
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            branch.fail(contained(error))
        finally:
            self._active = None
        if self._no_task.refusal is not None:  # raise it here again, because the code may have caught it
            raise self._no_task.refusal
        branch.waits_for = awaited if isinstance(awaited, Pending) else None
        if branch.is_done:
            self._wake(branch)
        elif isinstance(awaited, Pending):
            self._waiters.setdefault(id(awaited), []).append(branch)
            await self._issue(port, awaited, branch)
            self._date_failures()
            branch.has_awaited = True
        else:
            raise _foreign_await(awaited)

    async def _issue(self, port: Port, pending: Pending[Any], branch: Branch) -> None:
        """Begin the call that the branch awaits: take its result from the journal, or make the call. If an earlier
        await has begun the call, only check that this branch may await the call, too.
        """
        if pending.owner is not None:
            _check_second_await(pending, pending.owner, branch)
            if pending.is_done:
                self._wake(pending)
            return
        pending.owner, pending.is_first = branch, not branch.has_awaited
        if isinstance(pending, Gather):
            await self._issue_gather(port, pending, branch)
        elif isinstance(pending, Journaled):
            await self._issue_call(port, pending, branch)

    async def _issue_call(self, port: Port, call: Journaled[Any], branch: Branch) -> None:
        """Give the call its place in the journal. If the journal has an entry at this place, take the result from the
        entry; otherwise make the call. While the run is being cancelled, the driver makes a call that undoes work
        (`_may_undo`); every other new call fails.
        """
        branch.number += 1
        call.branch, call.number = branch.path, branch.number
        if isinstance(call, RunCall):
            key = (call.branch, call.name)
            self._step_counts[key] = self._step_counts.get(key, 0) + 1
            call.step = f"{call.name}#{self._step_counts[key]}"
            call.is_own_run = self._is_own_run(call)
        entry = self._replay.take(call)
        if entry is not None:
            await self._receive(port, call, entry)
        elif not self._cancelling or _may_undo(call, branch):
            await self._begin(port, call)
        elif branch.cancelled:
            self._reject(call, NotWhileUndoing(f"{call.kind} {call.name}"))
        else:
            self._reject_as_cancelled(call)
        self._check_wait(call)

    def _is_own_run(self, call: RunCall[Any]) -> bool:
        """Whether a separate run, and not a step of this run, does the work of the call. If the journal has the call,
        the journal decides, because the task may have got or lost its concurrency limit since the call was written.
        """
        entry = self._replay.at((call.branch, call.number))
        return call.task.is_limited if entry is None else is_own_run(entry)

    def _check_wait(self, call: Journaled[Any]) -> None:
        """End the call with Cancelled if it waits although the workflow is being cancelled. Such a workflow must not
        wait.
        """
        if self._cancelling and (call.branch, call.number) in self._waiting_calls:
            self._cancel_call(call)

    async def _issue_gather(self, port: Port, gather: Gather, branch: Branch) -> None:
        """Make a branch of each coroutine of the gather, and begin all parts."""
        branch.gather_count += 1
        for number, element in enumerate(gather.elements):
            if isinstance(element, Pending):
                gather.parts.append(element)
            elif isinstance(element, Coroutine):
                if element in self._coroutines:
                    raise wrong_await("one coroutine twice. Call its function once for each time")
                self._coroutines.add(element)
                path = (
                    f"{branch.path}{branch.gather_count}.{number}/"  # "1.0/2.3/": part 3 of gather 2 of branch "1.0/"
                )
                self._branches[path] = Branch(path, element, branch.now, cancelled=branch.cancelled)
                gather.parts.append(self._branches[path])
            else:
                raise _foreign_await(element)
        # This function counts as one part, so that the gather cannot settle before all of its parts have begun.
        gather.open_count = 1
        for part in gather.parts:
            if not part.is_done:
                gather.open_count += 1
                self._waiters.setdefault(id(part), []).append(gather)
            if isinstance(part, Branch):
                self._ready.append(part)
            else:
                await self._issue(port, part, branch)
        gather.open_count -= 1
        if gather.open_count == 0:
            self._settle_gather(gather)

    async def _begin(self, port: Port, call: Journaled[Any]) -> None:
        """Make a call that the journal does not have yet."""
        match call:
            case RunCall(is_own_run=True):
                self._begin_own_run(port, call, new_id())
            case RunCall():
                self._write(
                    Call(call.branch, call.number, "run", call.name, child=new_id(), step=f"{call.branch}{call.step}",
                         argument=call.argument, handler=call.task.handler, **call.task.new_step())
                )  # fmt: skip
                self._wait(call, None)
            case SleepCall():
                self._write(Call(call.branch, call.number, "sleep", call.name, delay=call.seconds))
                self._wait(call, call.seconds)
            case SignalCall():
                await self._match_signal(port, call, None)
            case StartCall():
                # If this workflow ends without success, the workers cancel the runs of `open` rows. So a detached run,
                # which must go on, gets a row that is `done`.
                state = "done" if call.detach else "open"
                record = Call(call.branch, call.number, "start", call.name, state, child=new_id())
                self._count_call()
                self._local_tasks[asyncio.ensure_future(self._start_run(port, call, record))] = call
            case ResultCall():
                self._write(Call(call.branch, call.number, "result", call.name, child=call.child))
                # The run may have ended already. So wait for 0 seconds. Then the workflow is due again immediately
                # after this row is committed, and the driver reads the state of the run.
                self._wait(call, 0.0)
            case LocalCall():
                self._count_call()  # before the function has an effect
                # Rows that are not open record how waits have ended, and where Cancelled was raised. Without them, a
                # replay would not come to this call.
                has_news = any(row.state != "open" for row in self.calls)
                work = self._call_function(port, call, commits_first=has_news, undoes=self._cancelling)
                self._local_tasks[asyncio.ensure_future(work)] = call

    async def _call_function(self, port: Port, call: LocalCall[Any], *, commits_first: bool, undoes: bool) -> Any:
        """Call the function. `commits_first`: first commit `calls`. If the worker dies after the function had an
        effect, a replay comes to this call only if the journal has these rows. `undoes`: the code had seen the cancel
        of its run when it made the call. Raises _NotCalled if a cancel came that the code had not seen.
        """
        if commits_first and (not await self._commit(port) or self._cancelling is not undoes):
            raise _NotCalled
        return await port.call(call.function)

    async def _start_run(
        self,
        port: Port,
        call: StartCall[Any] | RunCall[Any],
        record: Call,
        wait: Call | None = None,
        *,
        again: bool = False,
    ) -> UUID | None:
        """Start the run of the call. The parameters are those of `Port.start`. Returns the run's id, or None if a
        cancel came before the start.
        """
        if not await self._commit(port):  # the journal must have the earlier calls before the run starts
            return None
        return record.child if await port.start(call, record, wait, again=again) else None

    async def _finish_local_task(self, port: Port) -> None:
        """Wait until at least one asyncio task in `_local_tasks` has ended: a function of `ctx.call`, or the start of a
        run. Commit the results of functions, and then give them to the workflow. Before the wait, commit the steps and
        waits that other branches have begun, so that workers can do these steps meanwhile.
        """
        if any(row.state == "open" for row in self.calls) and not await self._commit_or_cancel(port):
            return
        done, _ = await asyncio.wait(self._local_tasks, return_when=asyncio.FIRST_COMPLETED)
        ended: list[tuple[LocalCall[Any], Call, Any]] = []
        broken: Permanent | None = None
        for task, call in self._take_done(done):
            if not isinstance(call, LocalCall):
                self._finish_start(call, task.result())
                continue
            try:
                ended.append((call, *_record_of(call, task, self._max_call_bytes, self._time())))
            except _NotCalled:
                self._finish_as_cancelled(call)
            except Permanent as error:  # raised below, once the results of the other functions are committed
                broken = broken or error
        if ended:
            self._take_ends()
            self.calls += [record for _, record, _ in ended]  # `_begin` has counted them
            await self._commit_or_cancel(port)
        if broken is not None:
            raise broken
        for call, record, result in ended:
            self._give(call, record, result)

    def _give(self, call: LocalCall[Any], record: Call, result: Any) -> None:
        """End the call in the way in which its function has ended. `record`: the committed row of that end."""
        at = _instant_of(record.value)
        if record.state == "failed":
            self._reject(call, TaskFailed(record.value["code"], record.value["message"]), at)
        else:
            self._resolve(call, self._branch_of(call), at, result)

    def _take_done(
        self, done: Collection[asyncio.Task[Any]]
    ) -> list[tuple[asyncio.Task[Any], LocalCall[Any] | StartCall[Any] | RunCall[Any]]]:
        """Remove the asyncio tasks in `done` from `_local_tasks`, and return them with their calls. They are in the
        order of the calls, because a replay goes on in this order.
        """
        taken = [(task, call) for task, call in self._local_tasks.items() if task in done]
        for task, _ in taken:
            del self._local_tasks[task]
        return taken

    def _finish_start(self, call: StartCall[Any] | RunCall[Any], child: UUID | None) -> None:
        """Give the call the handle of its run, or let it wait for the end of its run (`ctx.run` of a limited task).
        `child` is None if the run was not started, because a cancel came first.
        """
        if child is None:
            self._finish_as_cancelled(call)
        elif isinstance(call, RunCall):
            end = self._end_of(call, child)
            # A maintenance loop of the workers (children.py) makes the workflow due when the run has ended, even if the
            # run ends before the workflow suspends.
            self._wait(end, None)
            self._check_wait(end)
        else:
            call.resolve(call.make(child))
            self._wake(call)

    def _finish_as_cancelled(self, call: Journaled[Any]) -> None:
        """End a call that was not made, because a cancel came that the workflow had not seen."""
        self._cancel()
        self._reject_as_cancelled(call)

    def _write(self, call: Call) -> None:
        """Count a new call, and add its row to `calls`. Raises Permanent `workflow_too_long`."""
        self._count_call()
        self.calls.append(call)

    def _count_call(self) -> None:
        """Count a new call. First add the ends that the code has seen to `calls` (`_take_ends`), because the new call
        may depend on them. Raises Permanent `workflow_too_long` if the workflow makes more calls than it may.
        """
        self._take_ends()
        self._call_count += 1
        if self._call_count > self._max_calls:
            sentence = (
                f"a workflow makes at most {self._max_calls} calls (LEASEHOLD_WORKFLOW_MAX_CALLS): start a new run"
            )
            raise Permanent("workflow_too_long", sentence)

    def _take_ends(self) -> None:
        """Add the ends of steps and runs that the code has seen to the rows to commit (see `_receive_end`)."""
        self.calls += self._ends
        self._ends = []

    def _wait(self, call: Journaled[Any], seconds: float | None) -> None:
        """Let the call wait for its result. `seconds`: the wait ends by itself after this time; None: never."""
        self._waiting_calls[call.branch, call.number] = call
        call.deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds

    # --- ending

    def _cancel(self) -> None:
        """Raise Cancelled in every branch that waits. After that a branch may make only the calls of `_may_undo`."""
        self._cancelling = True
        # A call that still waits gets a row `cancelled` instead of `open`.
        self.calls = [call for call in self.calls if call.state != "open"]
        for call in list(self._waiting_calls.values()):
            self._cancel_call(call)

    def _cancel_call(self, call: Journaled[Any]) -> None:
        """End the call with Cancelled, and record that end. The driver commits the record before the code has its next
        effect. So a replay also ends the call with Cancelled, even if the call's result has come meanwhile.
        """
        self.calls.append(Call(call.branch, call.number, call.kind, call.name, "cancelled"))
        self._reject_as_cancelled(call)

    def _reject_as_cancelled(self, call: Journaled[Any]) -> None:
        self._has_met_cancel = True
        self._reject(call, Cancelled())

    def _outcome_of(self, main: Branch) -> Outcome:
        """How the workflow has ended. If Cancelled was raised in any branch, this raises Cancelled. Otherwise, if the
        workflow has failed, this raises `final_error` of the workflow's error.
        """
        if self._has_met_cancel:
            raise Cancelled from (None if isinstance(main.error, Cancelled) else main.error)
        if main.error is not None:
            raise final_error(main.error)
        self._replay.check_end()
        return Outcome(ended=True, result=main.value)

    def _seconds_to_deadline(self) -> float | None:
        """Seconds until the first wait ends by itself. None: no wait ends by itself."""
        now = asyncio.get_running_loop().time()
        deadlines = [call.deadline for call in self._waiting_calls.values() if call.deadline is not None]
        return max(min(deadlines) - now, 0.001) if deadlines else None

    def _branch_of(self, call: Journaled[Any]) -> Branch:
        # A wait that `_end_of` has made has a place in no branch. Its owner is the branch of its call.
        branch: Branch = self._branches.get(call.branch, call.owner)
        return branch


def _branch_of_end(call: RunCall[Any]) -> str:
    """The name of the branch under which the journal has the wait for the run that does the work of the call. No branch
    of a gather has this name, because in the names of such branches each part between slashes has a point.
    """
    return f"{call.branch}{call.number}/"


def _failed(call: Journaled[Any], error: TaskFailed, at: datetime) -> Call:
    """The journal's row of a call whose step, run or function has failed at `at`."""
    value = {"code": error.code, "message": error.message, "at": at.isoformat()}
    return Call(call.branch, call.number, call.kind, call.name, "failed", value)


def _instant_of(value: dict[str, Any] | None) -> datetime | None:
    """The instant at which the result in `value`, a column of the journal, came. None: there is no result, or an
    earlier release wrote the row, without the instant.
    """
    return None if value is None or "at" not in value else datetime.fromisoformat(value["at"])


def _open_wait(call: SignalCall[Any], signal: int | None = None) -> Call:
    """The journal's row of an open wait. `signal`: the id of a signal that the row consumes although the wait stays
    open.
    """
    schema = None if call.schema is None else {"schema": call.schema}
    return Call(call.branch, call.number, "signal", call.name, value=schema, delay=call.seconds, signal=signal)


def _may_undo(call: Journaled[Any], branch: Branch) -> bool:
    """Whether the call may begin while the run is being cancelled, to undo work. Only `ctx.call` and
    `ctx.detached.start` may begin then, and only in a branch in which Cancelled was raised.
    """
    return branch.cancelled and (isinstance(call, LocalCall) or (isinstance(call, StartCall) and call.detach))


def final_error(error: BaseException) -> BaseException:
    """The error that ends the run, made of the error that the workflow raised. It is Permanent, because the same code
    would raise it again. Exceptions: a StepError, HandlerMissing, LeaseLost and Cancelled keep their meaning.
    """
    if isinstance(error, (StepError, HandlerMissing, LeaseLost, Cancelled)):
        return error
    if isinstance(error, TaskFailed):
        return Permanent(error.code, error.message)
    return Permanent("handler_error", text_of(error))


def _record_of(call: LocalCall[Any], task: asyncio.Task[Any], max_bytes: int, at: datetime) -> tuple[Call, Any]:
    """The journal's row for a function of `ctx.call`, which ended at `at`, and the result that the workflow gets. The
    result is decoded from what PostgreSQL makes of the row, as in a replay. Otherwise the names of a dict could have
    another order now than in a replay. If the workflow then made a call for each name, the replay would mix up the
    results of these calls.

    Raises the errors that end the attempt (LeaseLost, asyncio.CancelledError), and _NotCalled. Raises Permanent in
    three cases: the result has more than `max_bytes` of JSON; it cannot be converted to JSON; or its type cannot read
    the JSON back. If such a result were recorded, each replay would fail.
    """
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    if error is None:
        encoded = call.encode(task.result())
        if len(encoded) > max_bytes:
            raise Permanent("result_too_large", _too_large_sentence(call, len(encoded), max_bytes))
        value = as_stored(orjson.loads(encoded))
        row_value = {"value": value, "at": at.isoformat()}
        record = Call(call.branch, call.number, "call", call.name, "done", row_value)
        try:
            return record, call.decode(orjson.dumps(value))
        except ResultUnreadable as unreadable:
            raise Permanent("result_not_serialisable", str(unreadable)) from unreadable
    error = deciding(error)
    if not isinstance(error, (Exception, Cancelled)) or isinstance(error, (LeaseLost, _NotCalled)):
        raise error
    return _failed(call, TaskFailed(*_reported(error)), at), None


def _too_large_sentence(call: LocalCall[Any], size: int, max_bytes: int) -> str:
    return (
        f"the result of {call.name} under ctx.call has {size} bytes of JSON; the journal takes at most {max_bytes}"
        " (LEASEHOLD_RESULT_INLINE_BYTES). Make it a task: ctx.run keeps a large result in the object store"
    )


def _reported(error: BaseException) -> tuple[str, str]:
    """The code and message of an error that a function of `ctx.call` raised, as the journal stores them."""
    code, message = "handler_error", text_of(error)
    if isinstance(error, (StepError, TaskFailed)):
        code, message = error.code, error.message
    return storable_text(code), storable_text(message[:_MAX_MESSAGE])


def _error_of_run(entry: Entry) -> TaskFailed | None:
    """The error of an awaited run that ended without success, or that is deleted. None: the run has not ended."""
    if entry.status is None:
        return TaskFailed("run_deleted", "the run is deleted, and its result with it")
    if entry.status == "cancelled" and entry.message:
        return TaskFailed(entry.status, f"the run is cancelled: {entry.message}")
    if entry.status in JOB_TERMINAL:
        return TaskFailed(entry.code or entry.status, entry.message or f"the run is {entry.status}")
    return None


def _check_second_await(pending: Pending[Any], owner: Branch, branch: Branch) -> None:
    """Raise Permanent `workflow_awaits` if, at a replay, `branch` could await the call before `owner` does. The branch
    that first awaits a call decides the call's place, so at each replay the same branch must be the first.

    Two cases are safe:
    - One of the two branches is an ancestor of the other, which means that a gather of the ancestor began the other. An
      ancestor does nothing while its branches run.
    - The call is the first call that `owner` awaits, and `branch` descends from the parent of `owner`. All branches of
      a gather begin their first call before any of them goes on.
    """
    if branch is owner:
        return
    if isinstance(pending, Gather) and not pending.is_done and _waits_for(pending, branch):
        raise wrong_await("a gather that waits for this branch, so neither could end")
    if owner.path.startswith(branch.path):
        pending.owner, pending.is_first = branch, False
        return
    # If the call is the owner's first, `ancestor` is the path of the owner's parent, in two parts; otherwise it is the
    # path of the owner. `branch.path` must begin with this path.
    ancestor = owner.path.removesuffix("/").rpartition("/")[:2] if pending.is_first else (owner.path,)
    if not branch.path.startswith("".join(ancestor)):
        raise wrong_await(
            f"one call in the branches {owner.path} and {branch.path}: which of them begins it depends on what ends"
            " first. Give the call to their gather, too, as in ctx.gather(call, one(call), other(call))"
        )


def _waits_for(pending: Pending[Any] | None, branch: Branch) -> bool:
    """Whether `pending` ends only after `branch`."""
    if isinstance(pending, Gather):
        return any(_waits_for(part, branch) for part in pending.parts)
    return isinstance(pending, Branch) and (pending is branch or _waits_for(pending.waits_for, branch))


def _foreign_await(awaited: Any) -> Permanent:
    what = "what yields None, as asyncio.sleep(0) does" if awaited is None else with_article(type(awaited).__name__)
    return wrong_await(
        f"{what}: it may await only what its context returns. Wait with ctx.sleep, ctx.wait_for and ctx.gather, and do"
        " other work in a task (ctx.run), or in ctx.call"
    )

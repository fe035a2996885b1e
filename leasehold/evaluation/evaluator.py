"""Checks the schemas and payloads of clients in child processes, because a hostile schema could block the calling
process. Exception: the calling process itself checks payloads against flat schemas, because such a check costs little.
(flat.py says which schemas are flat.)

A question is a schema, with the payloads to check against it. There are two children. Each of them starts when it is
first needed. A question goes to the quick child, where the question may take a tenth of the CPU time that the settings
allow. If the question takes more, the kernel kills the quick child, and the question goes to the slow child. For a
minute the slow child also gets all other questions of that tenant, because tenants with cheap schemas must not wait for
expensive schemas. The children work on one question of a tenant at a time, because other tenants must get turns.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import orjson

from leasehold.domain.errors import Invalid, TooMany, Unavailable
from leasehold.evaluation.child import first_mismatch
from leasehold.evaluation.flat import FlatSchemas
from leasehold.evaluation.process import Died, Late, Process
from leasehold.runtime.gather import cancel_and_wait
from leasehold.settings import Settings

#: The quick child's share of the CPU time that an evaluation may take.
_QUICK_SHARE = 0.1
#: For how many seconds a tenant's questions go to the slow child, after a question of this tenant has killed the quick
#: child.
_SLOW_SECONDS = 60.0
#: For how many seconds a question that was too expensive is refused immediately, and how many such questions are
#: remembered.
_REFUSED_SECONDS = 600.0
_MAX_REFUSALS = 4096


@dataclass(frozen=True, slots=True)
class EvaluationLimits:
    """The limits of evaluations. `schema_max_size`: the highest cost of a schema (cost.py). `cpu_seconds` and
    `wall_seconds`: the CPU time and the elapsed time of one try of a question with all its payloads. A question also
    waits at most `wall_seconds` for its tenant's turn. `memory_bytes`: the memory of a child. `waiting`: how many
    questions of a tenant may wait or run at once.
    """

    schema_max_size: int
    cpu_seconds: float
    wall_seconds: float
    memory_bytes: int
    waiting: int

    @classmethod
    def of(cls, settings: Settings) -> EvaluationLimits:
        return cls(
            settings.schema_max_size,
            settings.evaluation_cpu_seconds,
            settings.evaluation_wall_seconds,
            settings.evaluation_memory_bytes,
            settings.evaluations_waiting,
        )


@dataclass(slots=True)
class _Tenant:
    """A tenant's turn, which one question has at a time, and the number of its questions that wait or run."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    open_questions: int = 0


class Evaluator:
    """Checks schemas and payloads, for all asyncio tasks of one event loop. `evaluating(settings)` opens it."""

    def __init__(self, limits: EvaluationLimits) -> None:
        self._limits = limits
        self._flat = FlatSchemas()
        self._quick = _Child(limits, limits.cpu_seconds * _QUICK_SHARE)
        self._slow = _Child(limits, limits.cpu_seconds)
        self._tenants: defaultdict[str, _Tenant] = defaultdict(_Tenant)
        self._slow_until: dict[str, float] = {}  # by tenant
        self._refused_until: OrderedDict[tuple[str, bytes], float] = OrderedDict()  # by tenant and question
        self._running: set[asyncio.Task[dict[str, Any]]] = set()

    async def check_schema(self, tenant_id: str, schema: dict[str, Any]) -> None:
        """Check a schema that a client wrote. Raises Invalid `invalid_request` when it is not a JSON Schema 2020-12,
        and Invalid `schema_too_complex` when it is too expensive to evaluate. Raises TooMany and Unavailable for the
        reasons that `_ask` names.
        """
        encoded = orjson.dumps(schema)
        question = _Question(_digest_of(encoded), encoded, [], self._limits.schema_max_size)
        too_complex = Invalid(
            "schema_too_complex", "To check this schema takes too long: use fewer patterns, or shorter ones."
        )
        answer = await self._ask(tenant_id, question, too_complex)
        if "cost" in answer:
            raise Invalid(
                "schema_too_complex",
                f"With its references written out the schema has more than {self._limits.schema_max_size} parts.",
            )
        if "cycle" in answer:
            raise Invalid("schema_too_complex", "The schema refers to itself without going deeper into the payload.")
        if "no_schema" in answer:
            raise Invalid("invalid_request", f"payload_schema is not a JSON Schema 2020-12: {answer['no_schema']}")

    async def check(self, tenant_id: str, schema: dict[str, Any], payloads: Sequence[bytes]) -> None:
        """Check JSON payloads against a schema that a client wrote.

        Raises PayloadMismatch `invalid_payload` for the first payload that does not fit, and Invalid
        `payload_too_complex` when the check is too expensive. Raises TooMany and Unavailable for the reasons that
        `_ask` names.
        """
        if not schema:  # every payload fits
            return
        encoded = orjson.dumps(schema)
        # None if a child must check the payloads, because the schema is not flat, or the payloads are too large.
        validator = self._flat.validator(encoded, sum(map(len, payloads)))
        if validator is not None:
            for place, payload in enumerate(payloads):
                if (problem := first_mismatch(validator, orjson.loads(payload))) is not None:
                    raise PayloadMismatch(place, "invalid_payload", mismatch_sentence(*problem))
            return
        question = _Question(_digest_of(encoded), encoded, payloads)
        too_complex = Invalid(
            "payload_too_complex", "To check this payload against its template's schema takes too long."
        )
        answer = await self._ask(tenant_id, question, too_complex)
        if "place" in answer:
            raise PayloadMismatch(
                answer["place"], "invalid_payload", mismatch_sentence(answer["path"], answer["message"])
            )
        if answer:  # the child refuses the schema, although an earlier release accepted it
            raise too_complex

    async def _ask(self, tenant_id: str, question: _Question, too_complex: Invalid) -> dict[str, Any]:
        """Wait for the tenant's turn, and let an asyncio task ask the children. Returns a child's answer, which is
        empty if the child has found no problem.

        Raises `too_complex` when the question takes too much CPU time or memory. Raises TooMany when too many questions
        of the tenant wait, or when the tenant's turn does not come in time. Raises Unavailable when the child has not
        answered in time, because the machine is too busy.
        """
        refusal_key = (tenant_id, question.digest())
        if self._refused_until.get(refusal_key, 0.0) > monotonic():
            raise too_complex
        tenant = self._tenants[tenant_id]
        if tenant.open_questions >= self._limits.waiting:
            raise self._too_many("Too many payloads of this tenant wait to be checked.")
        tenant.open_questions += 1
        try:
            async with asyncio.timeout(self._limits.wall_seconds) as timeout:
                await tenant.turn.acquire()
                timeout.reschedule(None)  # only the wait for the turn has this limit
                # A separate asyncio task asks the children, because a client that disconnects cancels this function,
                # but must not kill a child. The task may outlive this function, so the task releases the turn.
                task = asyncio.create_task(self._ask_children(tenant_id, tenant, question))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            return await asyncio.shield(task)
        except Died:
            self._refused_until[refusal_key] = monotonic() + _REFUSED_SECONDS
            if len(self._refused_until) > _MAX_REFUSALS:
                self._refused_until.popitem(last=False)
            raise too_complex from None
        except Late:
            raise Unavailable("evaluator_busy", "The payload could not be checked in time.") from None
        except TimeoutError:
            raise self._too_many("Other payloads of this tenant take long to be checked.") from None
        finally:
            tenant.open_questions -= 1
            self._forget_idle(tenant_id, tenant)

    def _forget_idle(self, tenant_id: str, tenant: _Tenant) -> None:
        # A client that disconnects leaves its question to an asyncio task, which has the tenant's turn until it ends.
        if not tenant.open_questions and not tenant.turn.locked():
            self._tenants.pop(tenant_id, None)

    def _too_many(self, message: str) -> TooMany:
        return TooMany(
            "evaluations_waiting", message, policy="evaluations", at_most=self._limits.waiting, retry_after=1
        )

    async def _ask_children(self, tenant_id: str, tenant: _Tenant, question: _Question) -> dict[str, Any]:
        """Ask the quick child and, if it dies, the slow child. Then release the tenant's turn. Raises Died if the slow
        child dies, too, and Late if a child does not answer in time.
        """
        try:
            if self._slow_until.get(tenant_id, 0.0) <= monotonic():
                try:
                    return await self._quick.ask(question)
                except Died:
                    now = monotonic()
                    self._slow_until = {name: until for name, until in self._slow_until.items() if until > now}
                    self._slow_until[tenant_id] = now + _SLOW_SECONDS
            return await self._slow.ask(question)
        finally:
            tenant.turn.release()
            self._forget_idle(tenant_id, tenant)

    async def close(self) -> None:
        await cancel_and_wait(*self._running)
        await self._quick.close()
        await self._slow.close()


class PayloadMismatch(Invalid):
    """The payload at the position `place` (counted from 0) does not fit its schema."""

    def __init__(self, place: int, code: str, message: str) -> None:
        super().__init__(code, message)
        self.place = place


def mismatch_sentence(path: str, why: str) -> str:
    return f"The payload does not fit at {path or 'its root'}: {why}"


def _digest_of(schema: bytes) -> str:
    return hashlib.sha256(schema).hexdigest()


@dataclass(frozen=True, slots=True)
class _Question:
    """A question to a child. `name`: the digest of the schema, by which the child finds the compiled schema. `at_most`:
    the child refuses a schema with a higher cost; None: the child does not compute the cost.
    """

    name: str
    schema: bytes
    payloads: Sequence[bytes]
    at_most: int | None = None

    def digest(self) -> bytes:
        # Identifies the question (its schema and all its payloads) among the refused questions.
        digest = hashlib.sha256(self.name.encode())
        for payload in self.payloads:
            digest.update(len(payload).to_bytes(8, "big") + payload)
        return digest.digest()

    def encode(self, *, with_schema: bool) -> bytes:
        """The question as the child reads it. `with_schema`: False leaves the schema out, because the child may still
        have it. A question that checks a schema (`at_most`) always has the schema.
        """
        body: dict[str, Any] = {"name": self.name, "payloads": [orjson.Fragment(text) for text in self.payloads]}
        if with_schema or self.at_most is not None:
            body["schema"] = orjson.Fragment(self.schema)
        if self.at_most is not None:
            body["at_most"] = self.at_most
        return orjson.dumps(body)


class _Child:
    """A child process, which is replaced when it dies. It gets one question at a time. Other questions wait for their
    turn.
    """

    def __init__(self, limits: EvaluationLimits, cpu_seconds: float) -> None:
        self._limits = limits
        self._cpu_seconds = cpu_seconds
        self._turn = asyncio.Lock()
        self._process: Process | None = None

    async def ask(self, question: _Question) -> dict[str, Any]:
        """The child's answer. Raises Died if the child dies, and Late if it does not answer in time. A child may die
        because earlier questions have filled its memory. So a new child gets the question again if the dead child had
        answered earlier questions, and did not die of too much CPU time.
        """
        async with self._turn:
            process = await self._start_if_dead()
            is_new_child = process.answered == 0
            try:
                return await self._exchange(process, question)
            except Died as death:
                if death.cpu_spent or is_new_child:
                    raise
            return await self._exchange(await self._start_if_dead(), question)

    async def _exchange(self, process: Process, question: _Question) -> dict[str, Any]:
        """Ask by the schema's name first. If the child has no schema of this name, ask again with the schema itself."""
        for with_schema in (False, True):
            body = question.encode(with_schema=with_schema)
            answer = await process.ask(body, self._cpu_seconds, self._limits.wall_seconds)
            if "unknown" not in answer:
                break
        return answer

    async def _start_if_dead(self) -> Process:
        """The living process. If there is none, a new process is started."""
        if self._process is None or not self._process.alive:
            self._process = await Process.start(self._limits.memory_bytes)
        return self._process

    async def close(self) -> None:
        if self._process is not None:
            await self._process.end()


@asynccontextmanager
async def evaluating(settings: Settings) -> AsyncIterator[Evaluator]:
    """Open an evaluator, and close it after the block."""
    evaluator = Evaluator(EvaluationLimits.of(settings))
    try:
        yield evaluator
    finally:
        await evaluator.close()

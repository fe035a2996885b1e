"""The parts of an API process that all its endpoints share. The process opens them once, in order, and closes them in
the opposite order.

The parts open even if PostgreSQL, the broker or the store does not answer. The API must answer /livez in this case, and
a submission needs no broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from leasehold.actions.context import Actions
from leasehold.api.process.bodies import Bodies
from leasehold.api.process.keyring import Keyring
from leasehold.api.process.refusals import Refusals
from leasehold.api.process.replica_reads import ReplicaReads
from leasehold.api.process.submissions import Submissions
from leasehold.api.process.tenant_pool import BulkWrites, TenantPool
from leasehold.api.process.tenant_requests import TenantRequests
from leasehold.api.process.turnstile import Turnstile
from leasehold.api.process.watch import JobWatch, LogWatch, QueueWatch, StreamWatch
from leasehold.broker import open_broker
from leasehold.broker.announcer import Announcer, announcing
from leasehold.broker.base import Broker
from leasehold.db.database import make_pool
from leasehold.db.pool_sizes import pool_of_api, pool_of_replica
from leasehold.db.replica import NOTE_SECONDS, open_replica
from leasehold.domain.errors import Unavailable
from leasehold.domain.ids import new_id
from leasehold.domain.kind import Kind
from leasehold.domain.registry import Pipelines
from leasehold.evaluation.evaluator import evaluating
from leasehold.evaluation.templates import Templates
from leasehold.exporter.exporter import exporting
from leasehold.kinds.housekeeping import HousekeepingContext, hooks_before_jobs_go, housekeeping_of
from leasehold.kinds.job_kinds import RUN_SCOPES, JobKinds
from leasehold.kinds.metrics import questions_of
from leasehold.kinds.opening import open_all
from leasehold.limits.admission import Admission
from leasehold.limits.external_files import Files
from leasehold.pipelines import RESERVED_NAMES, RESERVED_QUEUES, kinds_of
from leasehold.runtime.gather import cancel_and_wait
from leasehold.runtime.periodic import Periodic
from leasehold.security.cells import Cells
from leasehold.security.openid import OpenId
from leasehold.security.other_cells import OtherCells, open_other_cells
from leasehold.security.roles import roles_of
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore

#: Seconds for which a request waits for a connection to the database.
_PATIENCE_SECONDS = 10.0
#: How many URLs of webhooks are checked at once, for all tenants together and for one tenant. A check waits up to half
#: a minute for a silent name server. The process resolves at most 32 names at once (security/egress.py), so eight stay
#: free for the OpenID provider.
_URL_CHECKS, _URL_CHECKS_OF_TENANT = 24, 4


@dataclass(slots=True)
class Services:
    """The shared parts. `pool` lends connections to requests, and serves the tenants in turn. Background work of the
    process uses the asyncpg pool inside `pool` directly.
    """

    settings: Settings
    pool: TenantPool
    store: ObjectStore
    broker: Broker
    announcer: Announcer  # publishes hints (messages that tell workers of tasks) after commits
    submissions: Submissions  # writes runs of several requests together
    keyring: Keyring  # identifies the caller of a request by its key
    refusals: Refusals  # records refused requests in the audit
    bodies: Bodies  # reads request bodies, within one budget of memory
    tenant_requests: TenantRequests  # bounds how many requests of one tenant are under way at once
    bulk: BulkWrites  # bounds how many bulk writes (requests that write many jobs) run at once
    url_checks: Turnstile  # bounds how many URLs of webhooks are checked at once
    watch: JobWatch  # long polls wait here for events of jobs
    queues: QueueWatch  # long polls wait here for work in queues
    log_watch: LogWatch  # long polls wait here for log lines
    stream_watch: StreamWatch  # long polls wait here for chunks of streams
    templates: Templates  # finds templates, and checks payloads against them
    admission: Admission  # the checks and charges of every submission
    kinds: tuple[Kind, ...]
    job_kinds: JobKinds  # which pipelines belong to which kind of work, and which scopes a kind needs
    opened: Mapping[str, Any]  # name of a kind of work -> what its hook `opens` has opened for its endpoints
    files: Files  # verifies the files that external workers have uploaded
    actions: Actions  # what leasehold.actions needs of this process to cancel, retry and delete jobs
    openid: OpenId | None  # None if people sign in only with API keys
    replica_reads: ReplicaReads | None  # None if all requests read from the primary
    other_cells: OtherCells | None  # asks the cells (installations) of other tenants; None if there are no other cells
    draining: bool = False

    def drain(self) -> None:
        """Prepare to stop. From now on /readyz answers 503, and every long poll ends immediately."""
        self.draining = True
        self.watch.release_all()
        self.queues.release_all()
        self.log_watch.release_all()
        self.stream_watch.release_all()


@asynccontextmanager
async def open_services(settings: Settings, pipelines: Pipelines) -> AsyncIterator[Services]:
    """Open the parts and start the process's background work. This work notes the state of the standby, exports
    metrics, and writes refusals to the audit.
    """
    async with AsyncExitStack() as stack:
        pool = await make_pool(settings, "api", pool_of_api(settings))
        stack.callback(pool.terminate)
        store = ObjectStore.from_settings(settings)
        await store.open()
        stack.push_async_callback(store.close)
        broker = await stack.enter_async_context(open_broker(settings))
        announcer = await stack.enter_async_context(announcing(broker, pool))
        submissions = await stack.enter_async_context(Submissions(settings, announcer).open())
        kinds = kinds_of(pipelines)
        replica = await stack.enter_async_context(open_replica(settings, "api", pool_of_replica(settings), pool))
        if replica is not None:
            replica_task = asyncio.create_task(Periodic("replica", replica.note, every=NOTE_SECONDS).run())
            stack.push_async_callback(cancel_and_wait, replica_task)
        exporter = stack.enter_context(
            # `questions_of`: the queries for the metrics of each kind of work. `records_up`: the exporter records
            # whether the database is up. Without this option, only calls of /readyz would record it.
            exporting(settings, new_id(), pool, broker, questions_of(kinds), replica, records_up=True)
        )
        # Only one process of the installation, the leader, exports the metrics. A worker gives up this lead when it
        # deletes its row in PostgreSQL. An API process has no such row, so it gives up the lead here.
        stack.push_async_callback(exporter.resign)
        exporter_task = asyncio.create_task(exporter.run())
        stack.push_async_callback(cancel_and_wait, exporter_task)
        watch = JobWatch(pool)
        stack.push_async_callback(watch.close)
        queues = QueueWatch(pool)
        stack.push_async_callback(queues.close)
        log_watch, stream_watch = LogWatch(pool), StreamWatch(pool)
        stack.push_async_callback(log_watch.close)
        stack.push_async_callback(stream_watch.close)
        refusals = Refusals(pool, settings.audit_refusals)
        refusals.start()
        stack.push_async_callback(refusals.close)
        evaluator = await stack.enter_async_context(evaluating(settings))
        templates = Templates(pipelines, evaluator, reserved=RESERVED_NAMES, reserved_queues=RESERVED_QUEUES)
        job_kinds = JobKinds(kinds, pipelines, RUN_SCOPES)
        opened = await open_all(kinds, settings, stack)
        openid = await _open_openid(settings, stack)
        cells = Cells.of(settings)
        other_cells = await stack.enter_async_context(open_other_cells(settings, cells))
        housekeeping = housekeeping_of(kinds, HousekeepingContext(settings, pool.acquire, store))
        yield Services(
            settings=settings,
            pool=TenantPool(pool, pool_of_api(settings), _PATIENCE_SECONDS),
            store=store,
            broker=broker,
            announcer=announcer,
            submissions=submissions,
            keyring=Keyring(
                pool,
                cache_seconds=settings.api_key_cache_seconds,
                roles=roles_of(kinds),
                issuer=settings.console_oidc_issuer,
                cells=cells,
            ),
            refusals=refusals,
            bodies=Bodies(settings.api_body_bytes),
            tenant_requests=TenantRequests(settings.api_connections),
            bulk=BulkWrites(settings),
            url_checks=Turnstile(
                at_most=_URL_CHECKS,
                per_tenant=_URL_CHECKS_OF_TENANT,
                patience=_PATIENCE_SECONDS,
                refusal=_too_many_url_checks,
            ),
            watch=watch,
            queues=queues,
            log_watch=log_watch,
            stream_watch=stream_watch,
            templates=templates,
            admission=Admission(settings, kinds),
            kinds=kinds,
            job_kinds=job_kinds,
            opened=opened,
            files=Files(pool, store),
            actions=Actions(settings, templates, job_kinds, opened, hooks_before_jobs_go(housekeeping)),
            openid=openid,
            replica_reads=None
            if replica is None
            else ReplicaReads(settings, replica, pool_of_replica(settings), _PATIENCE_SECONDS),
            other_cells=other_cells,
        )


async def _open_openid(settings: Settings, stack: AsyncExitStack) -> OpenId | None:
    if settings.console_oidc_issuer is None:
        return None
    egress = await stack.enter_async_context(OpenId.egress(settings))
    return OpenId(settings, settings.console_oidc_issuer, egress)


def _too_many_url_checks() -> Unavailable:
    return Unavailable("busy", "Too many URLs wait for their name servers. Try again soon.", retry_after=2.0)


def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services

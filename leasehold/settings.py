"""The settings of the platform. A process reads them once, from `LEASEHOLD_*` environment variables or a `.env` file.
Secrets may be in files, which are read again when they change (file_secrets.py).

Times are in seconds and sizes in bytes, unless the name has another unit.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from importlib.util import find_spec
from ipaddress import ip_network
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from leasehold.file_secrets import SettingsWithFiles

MIB = 1024 * 1024
_SIGNING_KEY_BYTES = 32  # of Ed25519
_LOOPBACK = ("127.0.0.1", "::1", "localhost")  # the hosts that are this machine


def _refuse_all_tenants(tenant: str) -> str:
    """Raises ValueError for `*`, which is not a tenant's name. In limits and in the audit it stands for all tenants."""
    if tenant == "*":
        raise ValueError("`*` is no tenant: name one, and add the scope fleet:operate to reach all")
    return tenant


class Membership(BaseModel):
    """What the members of a group of the OpenID provider get: a role within a tenant, and additional scopes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tenant: str = Field(min_length=1, max_length=100, pattern=r"^[!-~]+$")
    role: Literal["viewer", "operator", "admin"]
    scopes: tuple[Literal["fleet:operate"], ...] = ()

    @field_validator("tenant")
    @classmethod
    def _is_one_tenant(cls, tenant: str) -> str:
        return _refuse_all_tenants(tenant)


#: The pattern of the names of worker pools.
POOL_NAME = r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$"


class WorkerPool(BaseModel):
    """A pool of workers. An autoscaler asks GET /v1/scaling/{pool} how many workers the pool should have. `queues`: the
    queues that its workers serve; empty: all queues that the pipelines declare. `labels`: the labels of its workers.
    `target_wait_seconds`: how long a task may wait for a worker. `least`, `most`: the fewest and the most workers that
    the endpoint may answer.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    queues: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    target_wait_seconds: float = Field(30.0, ge=1, le=86_400)
    least: int = Field(0, ge=0, le=10_000)
    most: int = Field(100, ge=1, le=10_000)

    @model_validator(mode="after")
    def _are_bounds(self) -> Self:
        if self.least > self.most:
            raise ValueError(f"least is {self.least}, which is more than most, {self.most}")
        return self


def servers_of_database(url: str) -> dict[str, str]:
    """All settings that name a server of PostgreSQL, for an installation whose only server has this URL. Set them all
    together. Otherwise the URL of a standby, or a direct URL, from the environment or from `.env` stays in force, and
    requests that are meant for this installation reach another installation.
    """
    return {"database_url": url, "database_direct_url": "", "database_replica_url": ""}


def as_variables(settings: Mapping[str, str]) -> dict[str, str]:
    return {f"LEASEHOLD_{name.upper()}": value for name, value in settings.items()}


class Settings(SettingsWithFiles):
    """The settings of a process, frozen. Code takes the object as a parameter and never reads the environment."""

    model_config = SettingsConfigDict(
        env_prefix="LEASEHOLD_",
        env_file=".env",
        env_file_encoding="utf-8",
        frozen=True,
        extra="ignore",
        hide_input_in_errors=True,  # a value may be a URL with a password
    )

    # --- the database
    database_url: SecretStr = Field(
        SecretStr("postgresql://leasehold@127.0.0.1:5432/leasehold"),
        description="PostgreSQL 15 to 18, as a libpq URL (postgres:// or postgresql://, sslmode, sslrootcert, ...). "
        "Several hosts: h1:5432,h2:5432 after the @; the first that takes writes is used.",
    )
    database_pool_size: int = Field(
        12, ge=12, le=200, description="The most connections to PostgreSQL of one process, API or worker."
    )
    database_app_role: str | None = Field(
        None,
        description="Role that the API and workers connect as, if another role migrates. `leasehold migrate` lets it "
        "read and write rows, and nothing more.",
    )
    database_timeout: float = Field(
        10.0,
        gt=0,
        description="Seconds that a statement may take. All waits of an API request for PostgreSQL, until its answer "
        "begins, take at most this long together; a bulk write or a promotion may wait this long for each of its "
        "statements.",
    )
    database_direct_url: SecretStr = Field(
        SecretStr(""),
        description="URL of PostgreSQL itself, where database_url leads to a pooler. LISTEN, `leasehold migrate` and "
        "the locks by which workers see who lives need a session of their own. Unset: database_url.",
    )
    database_replica_url: SecretStr = Field(
        SecretStr(""),
        description="URL of a standby of PostgreSQL. Lists, pages of the console and the exporter's counts are read "
        "from it. It may name several hosts: the first that only reads is used. Unset: all is read from database_url.",
    )
    database_replica_max_lag: float = Field(
        10.0,
        ge=1,
        le=3600,
        description="If rows of the standby may be older than this many seconds, they are read from the primary.",
    )
    migrate_lock_seconds: float = Field(
        1.0,
        gt=0,
        le=60,
        description="Seconds that a statement of `leasehold migrate` waits for a lock. Other statements on the table "
        "queue up behind it, so it then gives up, lets them through, and tries again.",
    )
    migrate_seconds: float = Field(
        60.0,
        gt=0,
        description="Seconds after which `leasehold migrate` no longer tries to get the locks of a revision, and ends "
        "with an error.",
    )
    database_host_timeout: float = Field(
        2.0,
        gt=0,
        description="Seconds in which each of several hosts of the URL must accept a connection. After that the next "
        "host is tried. If no host accepts, each gets twice the time at the next attempt, up to its share of "
        "LEASEHOLD_DATABASE_TIMEOUT.",
    )

    # --- the broker
    broker: Literal["amqp", "postgres"] = Field(
        "amqp", description="`amqp` is RabbitMQ; `postgres` needs no broker: workers poll the database."
    )
    amqp_url: SecretStr = Field(
        SecretStr("amqp://guest:guest@127.0.0.1:5672/"),
        description="RabbitMQ 3.10 to 4.x; amqps:// with cacertfile, certfile, keyfile for TLS. For a cluster: a URL "
        "for each node, comma-separated, or several hosts in one URL.",
    )
    amqp_host_timeout: float = Field(
        1.0,
        gt=0,
        description="Seconds in which each of several nodes must accept a connection. Then the next is tried. If "
        "no node accepts, each gets twice the time in the next round, up to 10 s.",
    )
    amqp_queue_type: Literal["classic", "quorum"] = Field(
        "classic", description="`quorum` on a cluster of three nodes; `classic` (durable) on a single one."
    )
    amqp_queue_prefix: str = Field("leasehold", description="Queues are named {prefix}.{queue}.{priority band}.")
    amqp_publish_timeout: float = Field(
        5.0,
        gt=0,
        description="A publish without a confirm counts as unconfirmed after this many seconds. The process then "
        "publishes over a new connection, to the next node, unless RabbitMQ blocks publishers because of an alarm.",
    )
    amqp_heartbeat: int = Field(10, ge=2, le=120, description="AMQP heartbeat interval.")
    amqp_silence_seconds: float = Field(
        2.0,
        ge=0.5,
        description="If a node sends nothing for this many seconds, it counts as frozen or cut off, and the process "
        "connects to the next node. After half of the seconds, the process sends a request, which a healthy node "
        "answers. If the next node is silent, too, within a minute, it gets twice the time, up to 10 s. Heartbeats "
        "alone would notice a frozen node after three intervals.",
    )

    # --- apps that submit runs
    tenant: str = Field(
        "default",
        min_length=1,
        max_length=100,
        description="The tenant of the runs that a program submits directly to PostgreSQL.",
    )
    submit_seconds: float = Field(
        10.0,
        ge=0,
        le=600,
        description="How long such a program tries to submit, read or signal a run while PostgreSQL does not answer.",
    )

    # --- the object store
    object_store: Literal["s3", "none"] = Field(
        "s3", description="`none`: there is no store. Runs work; requests and steps that need objects are refused."
    )
    s3_endpoint: str | None = Field(None, description="URL of the S3 service; unset means AWS.")
    s3_public_endpoint: str | None = Field(
        None, description="URL of the S3 service in signed URLs, if clients need another one than s3_endpoint."
    )
    s3_region: str = Field("us-east-1", description="Region in the signatures of requests.")
    s3_bucket: str = Field("leasehold", description="Bucket for all objects.")
    s3_access_key: SecretStr = Field(SecretStr("leasehold"), description="Access key id.")
    s3_secret_key: SecretStr = Field(SecretStr("leasehold-secret"), description="Secret access key.")
    s3_ca_file: str | None = Field(
        None,
        description="PEM file of the authorities that may sign the S3 service's certificate; unset: certifi's.",
    )
    s3_addressing: Literal["path", "virtual"] = Field(
        "path", description="Whether URLs have the bucket in the path or the host."
    )
    s3_conditional_puts: Literal["probe", "yes", "no"] = Field(
        "probe", description="Whether the store honours If-None-Match; `probe`: the process tests it at start."
    )
    s3_operation_timeout: float = Field(60.0, gt=0, description="The longest one store operation may take.")

    # --- the API
    api_host: str = Field("127.0.0.1", description="Address that the API listens on. `::`: all, of IPv6 and of IPv4.")
    api_port: int = Field(8000, ge=0, le=65535, description="Port that the API listens on.")
    public_url: str | None = Field(None, description="The API's own URL as clients see it.")
    cdn_base_url: str | None = Field(
        None, description="The `final_url` of a picture is this plus its key; unset: a signed URL."
    )
    upload_url_seconds: int = Field(300, ge=10, le=900, description="Life of a signed upload URL.")
    download_url_seconds: int = Field(3600, ge=60, le=86_400, description="Life of a signed download URL.")
    api_key_cache_seconds: float = Field(
        15.0, ge=0, le=30, description="Seconds within which a revoked key stops working."
    )

    # --- cells
    cell: str = Field(
        "",
        pattern=r"^([a-z0-9]{1,11})?$",
        description="Name of this installation among several that share the tenants. Its keys carry the name. Empty: "
        "there are no cells.",
    )
    cells_file: str | None = Field(
        None,
        description='Path of the map of all cells, as JSON: {"cells": {"a": "https://a.example"}, "tenants": {"acme": '
        '"a"}}. It is read again when it changes. A request for a tenant of another cell gets 421 with its address.',
    )
    cells_keys: SecretStr = Field(
        SecretStr(""),
        description='Keys by which the console asks the other cells, as JSON: {"b": "lh_b_..."}, each of scope '
        "fleet:operate in its cell. Without a key of a cell, the console knows only whether that cell is ready.",
    )

    # --- the console
    console: str = Field(
        "on",
        pattern=r"^(on|off|(/[a-z0-9][a-z0-9_-]{0,62}){1,3})$",
        description="`on`: the API serves the console at /console; `off`: it does not; a path such as /ops: it serves "
        "the console there. People sign in with an API key; the cookie is signed with sealing_keys.",
    )
    console_only: bool = Field(
        False,
        description="The API serves the console, its health and its metrics, and nothing else: no client reaches "
        "`/v1` here. `leasehold console` turns this on.",
    )
    console_session_minutes: int = Field(
        60, ge=5, le=1440, description="A person who opens no page of the console for this long must sign in again."
    )
    console_picture_bytes: int = Field(
        8 * MIB, ge=0, le=64 * MIB, description="Largest picture that a job's page shows; larger outputs are linked."
    )

    console_oidc_issuer: str | None = Field(
        None,
        description="People may sign in to the console at this OpenID provider: its issuer, exactly as the provider "
        "names itself. http only on this machine. Behind a proxy, public_url must name the API as browsers do.",
    )
    console_oidc_client_id: str = Field(
        "", description="Client id at the provider. Redirect URI: CONSOLE/oidc/callback."
    )
    console_oidc_client_secret: SecretStr = Field(
        SecretStr(""), description="Client secret at the provider. Empty: a public client, protected by PKCE alone."
    )
    console_oidc_scopes: str = Field(
        "openid profile email groups", description="Scopes that the provider is asked for."
    )
    console_oidc_claim: str = Field("groups", description="Claim of the ID token, or of the userinfo, with the groups.")
    console_oidc_roles: dict[str, Membership] = Field(
        {},
        description='Groups and what they give, as JSON: {"sre": {"tenant": "acme", "role": "admin", "scopes": '
        '["fleet:operate"]}}. The group `*` is everybody whom the provider lets in. A person without a group here is '
        "refused.",
    )
    console_oidc_networks: str = Field(
        "",
        description="Private networks that the provider may be in, comma-separated. It does not open them to webhooks.",
    )
    console_oidc_name: str = Field(
        "OpenID Connect", min_length=1, max_length=60, description="The provider's name on the sign-in page."
    )
    console_oidc_at_once: int = Field(
        8, ge=1, le=100, description="Requests to the provider at once; further sign-ins wait up to 5 seconds."
    )
    people_per_tenant: int = Field(
        10_000, ge=1, description="The most people of a tenant of whom the console keeps a row."
    )
    people_days: int = Field(
        400, ge=30, le=3650, description="Days after which a person who no longer signs in is forgotten."
    )

    # --- limits of clients
    submissions_per_key: int | None = Field(
        None, ge=1, description="Jobs of all kinds that one API key may submit a minute, and uploads that it may begin."
    )
    submissions_per_tenant: int | None = Field(
        None,
        ge=1,
        description="Jobs of all kinds that one tenant may submit a minute, firings of its schedules included, and "
        "uploads that it may begin.",
    )
    queue_depth_limit: int | None = Field(
        None, ge=1, le=1_000_000, description="Tasks that may wait in a queue; more jobs are refused."
    )
    unfinished_per_tenant: int = Field(
        1_000_000, ge=0, description="Unfinished jobs that a tenant may have; 0: no bound."
    )
    stored_bytes_per_tenant: int = Field(
        1024 * 1024 * MIB, ge=0, description="Bytes stored for a tenant: what clients sent, and outputs; 0: no bound."
    )
    templates_per_tenant: int = Field(1000, ge=1, description="Versions of templates that a tenant may write.")
    schedules_per_tenant: int = Field(1000, ge=1, description="Schedules that a tenant may have.")
    webhooks_per_tenant: int = Field(50, ge=1, description="Webhooks that a tenant may have.")
    limits_per_tenant: int = Field(500, ge=1, description="Concurrency limits declared for a tenant, or for `*`.")
    views_per_tenant: int = Field(100, ge=1, le=500, description="Saved views of jobs that a tenant may have.")
    keys_per_tenant: int = Field(1000, ge=1, description="API keys of a tenant that are valid at the same time.")

    external_silent_seconds: float = Field(
        600.0,
        ge=1,
        description="A due step that no external worker claims for this many seconds is listed at /v1/unsettled.",
    )

    # --- the audit
    audit_days: int = Field(400, ge=30, le=36_500, description="Rows of the audit are deleted when they are older.")
    audit_refusals: int = Field(
        100,
        ge=1,
        le=10_000,
        description="In ten seconds an API process writes at most this many rows for refused sign-ins of each tenant, "
        "and as many for those of unknown callers, and one row for each code with the number of the others.",
    )

    # --- payloads and bulk work
    schema_max_size: int = Field(
        10_000, ge=1, le=1_000_000, description="Parts of a template's payload_schema, with all references expanded."
    )
    evaluation_cpu_seconds: float = Field(
        0.25,
        ge=0.01,
        le=10,
        description="CPU time of one check against a client's schema. All payloads of a request are one check.",
    )
    evaluation_wall_seconds: float = Field(
        5.0,
        ge=0.1,
        le=60,
        description="Elapsed seconds of one check; they matter when the machine is overloaded.",
    )
    evaluation_memory_bytes: int = Field(
        256 * MIB, ge=128 * MIB, description="Address space of each of the two processes that check payloads."
    )
    evaluations_waiting: int = Field(
        256, ge=1, le=10_000, description="Checks of one tenant's payloads that may wait or run in one process."
    )
    batch_max_tasks: int = Field(
        5000,
        ge=1,
        le=100_000,
        description="The most tasks (runs times steps) of a POST /v1/runs/batch, written in one commit.",
    )
    bulk_writes_at_once: int = Field(
        3,
        ge=1,
        le=100,
        description="Bulk writes of one API process at once: batches of runs, backfills, and replays of many dead "
        "letters. Each holds a connection to PostgreSQL; one connection always remains for other requests.",
    )
    bulk_writes_per_tenant: int = Field(2, ge=1, le=100, description="Bulk writes of one tenant at once; others wait.")
    bulk_writes_waiting: int = Field(
        16, ge=0, le=10_000, description="Bulk writes of one tenant that may wait in one process; more get 429."
    )
    bulk_writes_wait_seconds: float = Field(
        10.0, gt=0, le=60, description="A bulk write that has waited this long gets 429 `bulk_writes_waiting`."
    )
    operations_per_tenant: int = Field(10, ge=1, description="Unfinished bulk operations that a tenant may have.")
    operation_rate: int = Field(
        5000, ge=1, le=100_000, description="Jobs a second that one bulk operation acts on, at most."
    )
    operation_retry_rate: int = Field(
        2500,
        ge=0,
        le=100_000,
        description="Jobs a second that a bulk retry acts on, unless its submitter names a rate. The retried jobs then "
        "run beside the jobs of others, and leave them room. 0: as fast as LEASEHOLD_OPERATION_RATE allows.",
    )
    operation_canary_seconds: int = Field(
        3600, ge=1, description="A bulk operation stops if its canary jobs, which go first, have not ended by then."
    )
    operation_refusals: int = Field(
        10_000, ge=0, le=1_000_000, description="Refusals of one bulk operation that are kept; all are counted."
    )
    backfill_max_days: int = Field(
        3660, ge=1, le=36_600, description="How many days back a schedule's backfill may begin."
    )
    json_max_depth: int = Field(100, ge=10, le=200, description="Levels of lists and objects in a JSON body.")

    # --- connections, bodies and uploads
    trusted_proxies: str = Field(
        "",
        description="Networks of proxies, comma-separated. The API believes X-Forwarded-For only from them.",
    )
    api_connections: int = Field(
        1000,
        ge=10,
        le=100_000,
        description="Connections to one API process at once; more get 503 `busy`. The requests of one tenant take at "
        "most nine tenths of them.",
    )
    api_body_bytes: int = Field(
        128 * MIB, ge=2 * MIB, description="Bytes of request bodies in the memory of one API process at once."
    )
    api_header_seconds: float = Field(
        10.0, gt=0, le=120, description="The API closes a connection that has not sent its request's head by then."
    )
    upload_unfinished_bytes: int = Field(
        4096 * MIB,
        ge=MIB,
        description="Bytes of a tenant's unfinished uploads: the declared sizes, else the largest allowed ones.",
    )
    upload_unfinished_seconds: int = Field(
        3300, ge=900, le=86_400, description="An upload that was not completed by then is deleted."
    )
    upload_require_length: bool = Field(
        False, description="Refuse uploads without a content_length. The store then accepts only that size."
    )

    external_files: int = Field(100, ge=1, le=1000, description="Files that one attempt of an external step may have.")
    external_files_bytes: int = Field(
        256 * MIB,
        ge=1,
        le=5 * 1024 * MIB,
        description="Bytes of all files together that one attempt of an external step may have.",
    )

    # --- addresses and secrets of clients
    egress_allow: str = Field(
        "", description="Private networks that webhooks and providers may be in, comma-separated."
    )
    sealing_keys: SecretStr = Field(
        SecretStr(""), description="Fernet keys that encrypt clients' secrets, comma-separated, the newest first."
    )

    # --- pictures
    picture_max_bytes: int = Field(32 * MIB, gt=0, description="Largest original that is accepted.")
    picture_max_pixels: int = Field(50_000_000, gt=0, description="Largest width x height of one frame.")
    picture_max_total_pixels: int = Field(
        200_000_000, gt=0, description="Largest width x height x frames of an animation."
    )
    picture_max_frames: int = Field(300, gt=0, description="The largest number of frames of an animation.")
    picture_heic: bool = Field(
        default_factory=lambda: find_spec("pi_heif") is not None,
        description="Accept HEIC: workers need the extra `heic`. Unset: accepted if this process has the extra.",
    )

    media_retention_days: int | None = Field(
        None, ge=1, le=3650, description="Days that a picture is kept after it is READY or FAILED; unset: forever."
    )

    # --- conversion
    conversion_toolchain: Literal["open", "kneron"] = Field(
        "open", description="`kneron` needs workers with the vendor's package `ktc`, and also accepts .tflite."
    )
    conversion_tflite: bool = Field(
        False, description="Accept .tflite in the open toolchain: workers need the extra `tflite`."
    )
    conversion_signing_key: SecretStr = Field(
        SecretStr(""), description="Ed25519 key that signs packages; `leasehold signing-key` makes one."
    )
    promote_bucket: str | None = Field(None, description="Bucket of the same store that models are promoted to.")
    promote_url: str | None = Field(
        None,
        description="URL of an HTTP file service, instead of promote_bucket: models are PUT to {promote_url}/{key}. A "
        "service in a private network needs egress_allow.",
    )
    promote_token: SecretStr = Field(SecretStr(""), description="Bearer token for promote_url.")
    promote_token_url: str | None = Field(
        None, description="OAuth 2.0 token endpoint, instead of promote_token. It gives a token for client credentials."
    )
    promote_client_id: str = Field("", description="Client id for promote_token_url.")
    promote_client_secret: SecretStr = Field(SecretStr(""), description="Client secret for promote_token_url.")
    promote_scope: str = Field("", description="Scopes of the token of promote_token_url, separated by spaces.")
    conversion_deadline_seconds: int = Field(
        21_600, ge=60, description="A conversion that has not ended by then fails, and its user may send another."
    )
    conversion_posts_per_key: int | None = Field(
        60, ge=1, description="Conversions that one API key may submit, promote or cancel a minute; unset: no bound."
    )
    conversion_reads_per_key: int | None = Field(
        6000, ge=1, description="Reads of conversions and lists by one API key a minute; unset: no bound."
    )

    # --- generation
    generation_provider: str = Field("", description="Provider for requests that name none.")
    generation_jimeng_url: str = Field("https://visual.volcengineapi.com", description="URL of the provider `jimeng`.")
    generation_ark_url: str = Field("https://ark.cn-beijing.volces.com", description="URL of the provider `ark`.")
    generation_replicate_url: str = Field("https://api.replicate.com", description="URL of the provider `replicate`.")
    generation_fal_url: str = Field("https://queue.fal.run", description="URL of the provider `fal`.")
    generation_http_providers: str = Field(
        "", description="Declarations of further providers: a JSON list, or the path of a file with one."
    )
    generation_credentials: dict[str, SecretStr] = Field(
        {}, description='Credentials by provider, for requests that bring none: {"ark": "..."}.'
    )
    generation_limits: dict[str, int] = Field(
        {}, description='Generations at once by provider, of all tenants together: {"ark": 20}.'
    )
    generation_per_server: int = Field(
        3,
        ge=0,
        description="Generations at once of one server_id, and of each tenant without a server_id; 0: no bound.",
    )
    generation_default_server: str = Field(
        "default",
        description="The server_id under which generations without one are counted, for each tenant by itself.",
    )
    generation_image_seconds: int = Field(3600, ge=1, description="An image that is not finished by then fails.")
    generation_video_seconds: int = Field(86_400, ge=1, description="A video that is not finished by then fails.")
    generation_keep_seconds: int = Field(86_400, ge=60, description="How long results are kept.")
    generation_image_poll_seconds: float = Field(10.0, gt=0, description="How often a worker polls for an image.")
    generation_video_poll_seconds: float = Field(15.0, gt=0, description="How often a worker polls for a video.")
    generation_image_max_bytes: int = Field(64 * MIB, gt=0, description="Largest image that is stored.")
    generation_video_max_bytes: int = Field(2048 * MIB, gt=0, description="Largest video that is stored.")
    generation_source_max_bytes: int = Field(20 * MIB, gt=0, description="Largest source image of /v1/upload/images.")

    # --- workers
    pipelines: str = Field(
        "leasehold.pipelines:shipped", description="module:callable that returns the pipelines this installation knows."
    )
    worker_queues: str = Field(
        "", description="Queues this worker serves, comma-separated; empty: all that its pipelines declare."
    )
    worker_labels: str = Field(
        "", description="Labels of this worker, comma-separated. It also does work that is pinned to one of them."
    )
    worker_pool: str = Field(
        "default", pattern=POOL_NAME, description="The pool that this worker counts for in GET /v1/scaling/{pool}."
    )
    pools: dict[Annotated[str, Field(pattern=POOL_NAME)], WorkerPool] = Field(
        {},
        description="Pools of workers that are scaled by load, for the API, as JSON: "
        '{"models": {"queues": ["conversion"], "labels": [], "target_wait_seconds": 30, "least": 0, "most": 20}}. The '
        "pool `default` needs no declaration.",
    )
    worker_concurrency: int = Field(
        128,
        ge=1,
        le=4096,
        description="Inline steps (they run in the worker's own process) of one tenant at once in one worker. All "
        "tenants together may run a seventh more, rounded down.",
    )
    worker_reserve: int | None = Field(
        None,
        ge=0,
        le=4096,
        description="Inline steps at once beyond those of worker_concurrency, each for a tenant that has none in this "
        "worker; unset: as many as worker_concurrency.",
    )
    webhook_slots: int = Field(
        32,
        ge=1,
        le=1024,
        description="Webhook deliveries at once in one worker. Up to the same number run in addition, each for a "
        "tenant without another delivery. Deliveries use no inline slots.",
    )
    webhook_per_tenant: int = Field(4, ge=1, le=1024, description="Deliveries of one tenant at once in one worker.")
    webhook_per_host: int = Field(4, ge=1, le=1024, description="Deliveries to one host at once in one worker.")
    webhook_seconds: float = Field(15.0, gt=0, le=50, description="The longest that one webhook delivery may take.")
    worker_threads: int = Field(
        16,
        ge=1,
        le=1024,
        description="Handlers that are plain functions, at once; each runs in a thread of the worker.",
    )
    run_signals: int = Field(
        1000, ge=1, le=100_000, description="Signals of one run that its workflow has not consumed; more get 429."
    )
    workflow_max_calls: int = Field(
        20_000, ge=1, le=30_000, description="The most calls of `ctx` that one run of a workflow may make."
    )
    workflow_memory: int = Field(
        1000, ge=0, description="Coroutines of waiting workflows that a worker keeps in memory; 0: none."
    )
    workflow_memory_seconds: float = Field(
        10.0,
        ge=0,
        description="A worker keeps the coroutine of a waiting workflow for this many seconds. After that, the "
        "workflow runs from its top, with the results that its journal has.",
    )
    loop_blocked_seconds: float = Field(
        0.1, gt=0, description="The worker logs a warning about a handler that blocks its event loop longer than this."
    )
    worker_children: int = Field(
        0, ge=0, le=256, description="Child processes for isolated steps; 0: as many as the machine has cores."
    )
    lease_seconds: float = Field(30.0, gt=0, description="How long a lease lasts unless it is renewed.")
    renew_seconds: float = Field(10.0, gt=0, description="How often leases are renewed.")
    trust_margin_seconds: float = Field(
        5.0, gt=0, description="A worker stops trusting a lease this long before the lease ends."
    )
    drain_seconds: float = Field(
        25.0, ge=0, description="On SIGTERM: time for running steps before leases are released."
    )
    isolation: Literal["required", "best_effort"] = Field(
        "required",
        description="If the kernel lacks seccomp or Landlock, which confine the parsers of clients' bytes: `required`"
        " refuses queues with isolated steps; `best_effort` runs them with less protection, and warns at each start.",
    )
    poll_seconds: float = Field(
        1.0, gt=0, description="How often a worker looks for due tasks of which no message told it."
    )
    sweep_seconds: float = Field(2.0, gt=0, description="How often the elected sweeper runs.")
    presence: bool = Field(
        True,
        description="Each worker holds an advisory lock: when it dies, others take over its tasks at once. Turn it off "
        "behind a pooler.",
    )
    max_losses: int = Field(5, ge=1, le=100, description="Attempts lost with dead workers before a task fails.")
    schedule_failures_limit: int = Field(
        5, ge=1, le=100, description="Failed or finally refused firings in a row before a schedule is paused."
    )
    result_inline_bytes: int = Field(
        64 * 1024,
        ge=0,
        le=MIB,
        description="The result of an app's task up to this size is a row of PostgreSQL; a larger one is an object.",
    )
    result_max_bytes: int = Field(
        64 * MIB, ge=1024, le=1024 * MIB, description="A larger result of an app's task fails its run."
    )
    work_dir: str | None = Field(None, description="Folder for the files of attempts; unset: the system's.")

    failpoints: str = Field("", description="Only for tests of failures: see leasehold/runtime/failpoints.py.")

    # --- retention, logs, metrics, traces
    job_log_lines: int = Field(
        1000, ge=0, le=100_000, description="Lines of one attempt that are kept with its job; 0: none are."
    )
    job_log_bytes: int = Field(
        262_144, ge=1024, le=64 * MIB, description="Bytes of one attempt's log that are kept with its job."
    )
    stream_chunks: int = Field(10_000, ge=0, le=1_000_000, description="Chunks that one attempt may emit; 0: none.")
    stream_bytes: int = Field(MIB, ge=1024, le=64 * MIB, description="Bytes that one attempt may emit.")
    retention_days: int = Field(
        7,
        ge=1,
        le=3650,
        description="Days that finished jobs and events are kept. A job that is kept longer keeps its events.",
    )
    tombstone_hours: int = Field(
        24, ge=1, le=8760, description="Hours after which a deleted or expired job answers 404 and no longer 410."
    )
    log_format: Literal["auto", "json", "console"] = Field("auto", description="`auto`: console on a terminal.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The lowest level that is logged."
    )
    metrics: bool = Field(True, description="Collect metrics; off: nothing is counted and /metrics is not served.")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port for a separate listener: /metrics, and a worker's /livez and /readyz, also while metrics are "
        "off; 0: a free port; unset: no listener.",
    )
    metrics_host: str = Field(
        "127.0.0.1",
        description="Address of the listener of metrics_port; `::`: all, of IPv6 and of IPv4. It needs no key: only "
        "Prometheus should reach it.",
    )
    traces: bool = Field(False, description="Make OpenTelemetry spans; OTEL_* variables name their destination.")
    metrics_public: bool = Field(
        False, description="Also serve /metrics on the API's public port, without a key, unless metrics are off."
    )

    @field_validator(
        "database_app_role", "s3_endpoint", "s3_public_endpoint", "s3_ca_file", "public_url", "cdn_base_url",
        "cells_file", "console_oidc_issuer", "promote_bucket", "promote_url", "promote_token_url", "work_dir",
        mode="before",
    )  # fmt: skip
    @classmethod
    def _unset_if_empty(cls, text: object) -> object:
        """Turn an empty text into None, because Compose and Helm write a variable without a value as an empty text."""
        return None if text == "" else text

    @field_validator("tenant")
    @classmethod
    def _is_one_tenant(cls, tenant: str) -> str:
        return _refuse_all_tenants(tenant)

    @field_validator("console_oidc_issuer")
    @classmethod
    def _is_issuer(cls, text: str | None) -> str | None:
        parts = urlsplit(text or "")
        is_safe = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK)
        if text is not None and not (is_safe and parts.hostname and not parts.query and not parts.fragment):
            raise ValueError("an issuer is an https URL without query; http only on this machine")
        return text

    @field_validator("conversion_signing_key")
    @classmethod
    def _is_signing_key(cls, key: SecretStr) -> SecretStr:
        try:
            size = len(b64decode(key.get_secret_value(), validate=True))
        except ValueError:
            size = -1
        if size not in (0, _SIGNING_KEY_BYTES):
            raise ValueError("a signing key is 32 bytes in base64: `leasehold signing-key` makes one")
        return key

    @field_validator("trusted_proxies", "console_oidc_networks", "egress_allow")
    @classmethod
    def _are_networks(cls, text: str) -> str:
        for part in text.split(","):
            if part.strip():
                ip_network(part.strip())
        return text

    @model_validator(mode="after")
    def _is_anything_served(self) -> Self:
        if self.console_only and self.console_path is None:
            raise ValueError("LEASEHOLD_CONSOLE_ONLY is on, but LEASEHOLD_CONSOLE is off: nothing would be served")
        return self

    @model_validator(mode="after")
    def _are_leases_renewed_in_time(self) -> Self:
        if self.renew_seconds >= self.lease_seconds - self.trust_margin_seconds:
            raise ValueError(
                "LEASEHOLD_RENEW_SECONDS must be less than LEASEHOLD_LEASE_SECONDS without"
                " LEASEHOLD_TRUST_MARGIN_SECONDS: a worker would stop trusting each lease before it renews it"
            )
        return self

    @model_validator(mode="after")
    def _is_promotion_bucket_separate(self) -> Self:
        self.refuse_own_bucket()
        return self

    def refuse_own_bucket(self) -> None:
        """Raises ValueError when models would be promoted into the bucket that holds every tenant's objects."""
        if self.promote_bucket is not None and self.promote_bucket == self.s3_bucket:
            raise ValueError("LEASEHOLD_PROMOTE_BUCKET is LEASEHOLD_S3_BUCKET: models are promoted to another bucket")

    def direct(self) -> Self:
        """The settings for connections that need a PostgreSQL session of their own, which a pooler may not give. In the
        returned settings, `database_url` is the URL of PostgreSQL itself.
        """
        if not self.database_direct_url.get_secret_value():
            return self
        return self.model_copy(update={"database_url": self.database_direct_url})

    def pool(self, name: str) -> WorkerPool | None:
        """The declaration of a pool of workers; None: there is no such pool. The pool `default` always exists."""
        return self.pools.get(name, WorkerPool() if name == "default" else None)

    @property
    def console_path(self) -> str | None:
        """The path of the console, without a slash at the end. It is None if the API serves no console."""
        return {"on": "/console", "off": None}.get(self.console, self.console)

    @property
    def silent_seconds(self) -> float:
        """A worker counts as silent after this many seconds without a heartbeat: it has missed three renewals."""
        return 3 * self.renew_seconds

    @property
    def silent_seconds_of_reads(self) -> float:
        """The same bound as `silent_seconds`, but for reads that the standby may answer. With a standby the bound is
        longer, because the rows of workers on the standby may be older than those on the primary.
        """
        has_replica = bool(self.database_replica_url.get_secret_value())
        return self.silent_seconds + (self.database_replica_max_lag if has_replica else 0.0)

    @property
    def queues(self) -> tuple[str, ...]:
        """The names in `worker_queues`."""
        return tuple(name.strip() for name in self.worker_queues.split(",") if name.strip())

    @property
    def labels(self) -> tuple[str, ...]:
        """The names in `worker_labels`."""
        return tuple(name.strip() for name in self.worker_labels.split(",") if name.strip())

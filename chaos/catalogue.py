"""The catalogue of faults: what breaks, which processes it hits, for how long, and what the machine must support.

A name begins with the number under which docs/explanation/chaos.md lists the fault.
"""

from __future__ import annotations

from dataclasses import dataclass

from chaos.operations import OPERATIONS

WORKERS = ("worker-0", "worker-1", "worker-2")
APIS = ("api-0", "api-1")
LINKS = ("postgres", "amqp", "s3")
#: What a fault may need of the machine. A plan leaves out a fault whose need the machine lacks.
BROKER, MOUNTS, MEMORY, CLOCK = "a broker", "mounts", "a memory limit", "a clock that can jump"
STANDBY = "a standby"
EVERYTHING = frozenset({BROKER, MOUNTS, MEMORY, CLOCK, STANDBY})


@dataclass(frozen=True, slots=True)
class Kind:
    """A fault of the catalogue.

    `seconds`: how long it lasts; 0: it ends immediately. `on`: it hits one of these processes; (): no
    single one. `link`: it hits this link of that process, or of all processes. `needs`: one of EVERYTHING, or "".
    """

    name: str
    on: tuple[str, ...] = ()
    link: str = ""
    seconds: float = 0.0
    needs: str = ""
    from_release: bool = False  # the run begins with the schema and the processes of the release
    is_release: bool = False  # a process of the release serves beside the others for a while
    by_signal: bool = False  # a signal makes it, which the processes of the release do not know

    @property
    def starts_release(self) -> bool:
        """Whether a process of the release serves in its run."""
        return self.from_release or self.is_release


def _failpoint(number: str, point: str, act: str, on: tuple[str, ...] = WORKERS) -> Kind:
    return Kind(f"{number} {point}:{act}", on, needs=BROKER if point == "after_publish" else "")


def _links(name: str, seconds: float) -> tuple[Kind, ...]:
    """One fault for each link; each hits one process. No fault hits the link from an API to the store: an API seldom
    sends a request to the store, and a fault without traffic has no effect.
    """
    return tuple(
        Kind(f"{name} {link}", WORKERS if link == "s3" else WORKERS + APIS, link, seconds, _need_of(link))
        for link in LINKS
    )


def _fleet(name: str, seconds: float) -> tuple[Kind, ...]:
    """One fault for each link; each hits all processes."""
    return tuple(Kind(f"{name} {link}", (), link, seconds, _need_of(link)) for link in LINKS)


def _need_of(link: str) -> str:
    return BROKER if link == "amqp" else ""


FAILPOINTS = (
    _failpoint("F1", "after_hint", "kill"),
    _failpoint("F2", "after_claim", "kill"),
    _failpoint("F2", "after_intent", "kill"),
    _failpoint("F3", "after_download", "kill"),
    _failpoint("F4", "mid_process", "kill"),
    _failpoint("F5", "mid_upload", "kill"),
    _failpoint("F6", "after_upload", "kill"),
    _failpoint("F6", "after_purchase", "kill"),
    _failpoint("F7", "mid_batch", "kill"),
    _failpoint("F8", "after_commit", "kill"),
    _failpoint("F8", "after_batch", "kill"),
    _failpoint("F9", "after_claim", "stop"),
    _failpoint("F9", "after_download", "stop"),
    _failpoint("F9", "mid_process", "stop"),
    _failpoint("F9", "after_upload", "stop"),
    _failpoint("F9", "after_commit", "stop"),
    _failpoint("F11", "after_claim", "sleep"),
    _failpoint("F11", "mid_upload", "raise"),
    _failpoint("F34", "before_relay", "kill"),
    _failpoint("F34", "after_publish", "kill"),
)
#: Kills after the commits of each operation that the load requests; tests/chaos/test_plan.py compares the operations
#: with the API's.
API_POINTS = tuple(_failpoint("F34", f"commit.{operation}", "kill", APIS) for operation in OPERATIONS)
BLOWS = (
    Kind("F4 kill a child", WORKERS),
    Kind("F7 cut a settlement", WORKERS, "postgres"),
    Kind("F9 hold a settlement", WORKERS, "postgres", 6.5),
    Kind("F9 hold a put", seconds=6.0),
    Kind("F10 drain, then kill", WORKERS, seconds=1.0),
    Kind("F10 drain", WORKERS),
    Kind("F11 stop a worker", WORKERS, seconds=6.5),
    Kind("F13 kill the broker", seconds=1.0, needs=BROKER),
    Kind("F14 kill the broker as it declares", needs=BROKER),
    Kind("F15 stop the broker", seconds=5.0, needs=BROKER),
    Kind("F16 the broker is away", seconds=6.0, needs=BROKER),
    Kind("F17 memory alarm", seconds=4.0, needs=BROKER),
    Kind("F17 disk alarm", seconds=4.0, needs=BROKER),
    Kind("F18 purge the queues", needs=BROKER),
    Kind("F18 delete the queues", needs=BROKER),
    Kind("F20 foreign messages", needs=BROKER),
    Kind("F21 terminate sessions"),
    Kind("F22 kill a backend"),
    Kind("F23 kill the database", seconds=0.5),
    Kind("F24 stop the database at once", seconds=0.5),
    Kind("F25 lock a job", seconds=3.0),
    Kind("F26 read-only", seconds=3.0),
    *_links("F27 slow", 4.0),
    *_links("F28 reset", 0.0),
    *_links("F29 half-open", 5.0),
    *_links("F30 one-way", 3.0),
    *_links("F30 mirrored", 3.0),
    *(
        Kind(f"F31 store {trouble}", seconds=4.0)
        for trouble in ("error", "slow", "cut", "corrupt", "refuse", "hang", "late", "mute", "deny", "overwrite")
    ),
    Kind("F32 disk full", seconds=4.0, needs=MOUNTS),
    Kind("F33 a clock ahead", WORKERS + APIS, seconds=6.0, by_signal=True),
    Kind("F33 a clock behind", WORKERS + APIS, seconds=6.0, by_signal=True),
    Kind("F34 restart everything", seconds=0.5),
    Kind("F35 freeze the database", seconds=5.0),
    Kind("F36 database disk stalls", seconds=5.0, needs=MOUNTS),
    Kind("F37 database disk full", seconds=4.0, needs=MOUNTS),
    Kind("F38 database clock ahead", seconds=6.0, needs=CLOCK),
    Kind("F38 database clock behind", seconds=6.0, needs=CLOCK),
    Kind("F39 broker and database away", seconds=2.0, needs=BROKER),
    *_fleet("F40 fleet half-open", 5.0),
    *_fleet("F40 fleet one-way", 3.0),
    *_fleet("F40 fleet mirrored", 3.0),
    Kind("F41 worker out of memory", WORKERS, needs=MEMORY, by_signal=True),
    Kind("F41 API out of memory", APIS, needs=MEMORY, by_signal=True),
    Kind("F42 an old worker beside the new", WORKERS, seconds=9.0, is_release=True),
    Kind("F42 an old API beside the new", APIS, seconds=9.0, is_release=True),
    Kind("F43 upgrade from the release", from_release=True),
    Kind("F44 alter tables", seconds=3.0),
)
#: A run with one of these has no other fault: it changes the server that every process connects to, or the program that
#: every process runs.
ALONE = (
    Kind("F45 failover: the primary is killed", needs=STANDBY),
    Kind("F46 failover: switchover", needs=STANDBY),
    Kind("F47 failover: the primary freezes", seconds=2.0, needs=STANDBY),
    Kind("F48 failover: the primary is cut off", seconds=4.0, needs=STANDBY),
    Kind("F49 rollback to the release", seconds=12.0, is_release=True),
)
CATALOGUE = FAILPOINTS + API_POINTS + BLOWS + ALONE
BY_NAME = {kind.name: kind for kind in CATALOGUE}

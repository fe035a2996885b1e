"""What must come out where a verb meets a state: written down first, by hand, and read by the tests as it stands.

A cell is the state that the verb leaves the run in, `-` where it must be refused or change nothing, and `=` where it is
accepted and leaves the state as it is.
"""

from __future__ import annotations

#: The states of a run with one step, as a client or an operator tells them apart. `due`: a step that snoozed and was
#: woken. `taken`: as `running`, but another worker than ours has the lease. `stopping`: a cancel was asked for, and our
#: worker has not stopped yet; `leaving`: the other has not.
STATES = (
    "held", "scheduled", "pending", "running", "taken", "retry", "waiting", "due", "stopping", "leaving",
    "succeeded", "failed", "cancelled", "expired", "forgotten",
)  # fmt: skip

#: Of a client: cancel, retry, rerun. Of an operator: lift (the limit). Of our worker: complete, fail (to be tried again
#: in an hour), die (fail for good), snooze, release (drain), ack (it stopped, as it was asked to), renew. Of another:
#: claim. Of a provider: signal. Of time: lose (the worker), grace, expire (the deadline), forget (the retention).
VERBS = """
           held      scheduled pending   running   taken     retry     waiting   due       stopping  leaving   succeeded failed    cancelled expired
cancel     cancelled cancelled cancelled stopping  leaving   cancelled cancelled cancelled -         -         -         -         -         -
retry      -         -         -         -         -         -         -         -         -         -         -         pending   -         -
rerun      =         =         =         =         =         =         =         =         =         =         =         =         =         =
lift       pending   -         -         -         -         -         -         -         -         -         -         -         -         -
claim      -         -         taken     -         -         -         -         taken     -         -         -         -         -         -
complete   -         -         -         succeeded -         -         -         -         succeeded -         -         -         -         -
fail       -         -         -         retry     -         -         -         -         -         -         -         -         -         -
die        -         -         -         failed    -         -         -         -         -         -         -         -         -         -
snooze     -         -         -         waiting   -         -         -         -         -         -         -         -         -         -
release    -         -         -         pending   -         -         -         -         -         -         -         -         -         -
ack        -         -         -         -         -         -         -         -         cancelled -         -         -         -         -
renew      -         -         -         =         -         -         -         -         =         -         -         -         -         -
signal     -         -         -         -         -         -         due       =         -         -         -         -         -         -
lose       -         -         -         pending   pending   -         -         -         cancelled cancelled -         -         -         -
grace      -         -         -         -         -         -         -         -         cancelled cancelled -         -         -         -
expire     expired   expired   expired   expired   expired   expired   expired   expired   expired   expired   -         -         -         -
forget     -         -         -         -         -         -         -         -         -         -         forgotten forgotten forgotten forgotten
"""  # noqa: E501 - a table is read as one

#: What a worker says of its attempt. Said again, or too late, it changes nothing; whether it is told that it had
#: settled before, or that its lease is lost, is all the same to it.
SETTLES = frozenset({"complete", "fail", "die", "snooze", "release", "ack"})

#: What time does is done again and again: passed over once, because somebody else had the row, it comes again.
COMES_AGAIN = frozenset({"claim", "lose", "grace", "expire", "forget", "lift"})

#: A run comes to a scope where another is in a state: what becomes of the newcomer, and of the other. The rows are the
#: template's rule for runs of the same scope. One that is to start later does not ask for its place earlier.
ARRIVALS = """
         scheduled         pending           running           retry             waiting           stopping          succeeded         failed          cancelled         expired
allow    pending/scheduled pending/pending   pending/running   pending/retry     pending/waiting   pending/stopping  pending/succeeded pending/failed  pending/cancelled pending/expired
reject   refused/scheduled refused/pending   refused/running   refused/retry     refused/waiting   refused/stopping  pending/succeeded pending/failed  pending/cancelled pending/expired
queue    pending/held      held/pending      held/running      held/retry        held/waiting      held/stopping     pending/succeeded pending/failed  pending/cancelled pending/expired
replace  pending/cancelled pending/cancelled held/stopping     pending/cancelled pending/cancelled held/stopping     pending/succeeded pending/failed  pending/cancelled pending/expired
"""  # noqa: E501 - as above

#: The same for a limit of one run at once.
LIMITED = """
         pending           running           retry             waiting           stopping          succeeded         failed          cancelled         expired
limit    held/pending      held/running      held/retry        held/waiting      held/stopping     pending/succeeded pending/failed  pending/cancelled pending/expired
"""  # noqa: E501 - as above

#: A schedule fires while its run before is in a state: what becomes of the tick (`none`: no run; `buffered`: it waits
#: for the run before it), and of the run before.
FIRINGS = """
             scheduled         pending           running           retry             waiting           stopping          succeeded         failed          cancelled         expired
skip         none/scheduled    none/pending      none/running      none/retry        none/waiting      none/stopping     pending/succeeded pending/failed  pending/cancelled pending/expired
buffer_one   buffered/scheduled buffered/pending buffered/running  buffered/retry    buffered/waiting  buffered/stopping pending/succeeded pending/failed  pending/cancelled pending/expired
cancel_other pending/cancelled pending/cancelled pending/stopping  pending/cancelled pending/cancelled pending/stopping  pending/succeeded pending/failed  pending/cancelled pending/expired
allow_all    pending/scheduled pending/pending   pending/running   pending/retry     pending/waiting   pending/stopping  pending/succeeded pending/failed  pending/cancelled pending/expired
"""  # noqa: E501 - as above


def table(text: str) -> dict[str, dict[str, str]]:
    """Row -> column -> cell."""
    head, *rows = [line.split() for line in text.strip().splitlines()]
    assert all(len(row) == len(head) + 1 for row in rows), "a row has a cell too few or too many"
    return {row[0]: dict(zip(head, row[1:], strict=True)) for row in rows}

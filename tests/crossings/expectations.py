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
#: for the run before it), and of the run before. The rows are the template's rule for runs of the same scope, and the
#: schedule's overlap policy. A tick that is refused cancels nothing. After a run that has ended it is always `pending`.
FIRINGS = """
                      scheduled           pending             running             retry               waiting             stopping
allow+skip            none/scheduled      none/pending        none/running        none/retry          none/waiting        none/stopping
allow+buffer_one      buffered/scheduled  buffered/pending    buffered/running    buffered/retry      buffered/waiting    buffered/stopping
allow+cancel_other    pending/cancelled   pending/cancelled   pending/stopping    pending/cancelled   pending/cancelled   pending/stopping
allow+allow_all       pending/scheduled   pending/pending     pending/running     pending/retry       pending/waiting     pending/stopping
reject+skip           none/scheduled      none/pending        none/running        none/retry          none/waiting        none/stopping
reject+buffer_one     buffered/scheduled  buffered/pending    buffered/running    buffered/retry      buffered/waiting    buffered/stopping
reject+cancel_other   pending/cancelled   pending/cancelled   none/running        pending/cancelled   pending/cancelled   none/stopping
reject+allow_all      none/scheduled      none/pending        none/running        none/retry          none/waiting        none/stopping
queue+skip            none/held           none/pending        none/running        none/retry          none/waiting        none/stopping
queue+buffer_one      buffered/held       buffered/pending    buffered/running    buffered/retry      buffered/waiting    buffered/stopping
queue+cancel_other    pending/cancelled   pending/cancelled   held/stopping       pending/cancelled   pending/cancelled   held/stopping
queue+allow_all       pending/held        held/pending        held/running        held/retry          held/waiting        held/stopping
replace+skip          none/held           none/pending        none/running        none/retry          none/waiting        none/stopping
replace+buffer_one    buffered/held       buffered/pending    buffered/running    buffered/retry      buffered/waiting    buffered/stopping
replace+cancel_other  pending/cancelled   pending/cancelled   held/stopping       pending/cancelled   pending/cancelled   held/stopping
replace+allow_all     pending/cancelled   pending/cancelled   held/stopping       pending/cancelled   pending/cancelled   held/stopping
"""  # noqa: E501 - as above


#: What deliveries say of a run. The rows are what became of its tenant's webhooks, the columns how it ended: whoever is
#: subscribed when it ends is told, however late it came, and nobody who is not, or who is turned off until the telling.
TOLD = """
           succeeded           failed        cancelled           acknowledged        forced              expired         withdrawn           overdue
there      succeeded           failed        cancelled           cancelled           cancelled           expired         cancelled           expired
two        succeeded+succeeded failed+failed cancelled+cancelled cancelled+cancelled cancelled+cancelled expired+expired cancelled+cancelled expired+expired
failures   -                   failed        -                   -                   -                   -               -                   -
anothers   -                   -             -                   -                   -                   -               -                   -
late       succeeded           failed        cancelled           cancelled           cancelled           expired         cancelled           expired
too_late   -                   -             -                   -                   -                   -               -                   -
off        -                   -             -                   -                   -                   -               -                   -
turned_off -                   -             -                   -                   -                   -               -                   -
turned_on  succeeded           failed        cancelled           cancelled           cancelled           expired         cancelled           expired
off_at_end succeeded           failed        cancelled           cancelled           cancelled           expired         cancelled           expired
deleted    -                   -             -                   -                   -                   -               -                   -
"""  # noqa: E501 - as above


#: What a client or an external worker is answered over HTTP about a run, and the state that it leaves, `202>stopping`;
#: or only the status where nothing changes. `late`: as running, past the step's time limit. `strange`:
#: another tenant's run. A worker that says the same again of its epoch is answered again.
ASKED = """
           held          scheduled     pending       running       late          retry         stopping      succeeded     failed        cancelled     expired       strange
get        200           200           200           200           200           200           200           200           200           200           200           404
explain    200           200           200           200           200           200           200           200           200           200           200           404
cancel     202>cancelled 202>cancelled 202>cancelled 202>stopping  202>stopping  202>cancelled 202           409           409           409           409           404
retry      409           409           409           409           409           409           409           409           202>pending   409           409           404
rerun      202           202           202           202           202           202           202           202           202           202           202           404
replay     404           404           404           404           404           404           404           404           202>pending   404           404           404
bulk       202           202           202           202           202           202           202           202           202>pending   202           202           202
heartbeat  409           409           409           200           409>retry     409           200           409           409           409           409           409
progress   409           409           409           200           409>retry     409           200           409           409           409           409           409
complete   409           409           409           200>succeeded 409>retry     409           200>succeeded 200           409           409           409           409
fail       409           409           409           200>retry     409>retry     200           200>cancelled 409           200           409           409           409
ack        409           409           409           409           409           409           200>cancelled 409           409           409           409           409
"""  # noqa: E501 - as above

#: The same of a picture. `asked`: a URL was given out; `sent`: the object is there; `refused`: it was no picture.
PICTURED = """
           asked       sent        refused     waiting      running      ready        failed       deleted
get        200         200         200         200          200          200          200          404
take       409         202>waiting 422         202          202          202          202          404
delete     204>deleted 204>deleted 204>deleted 204>deleted  204>deleted  204>deleted  204>deleted  404
"""


def table(text: str) -> dict[str, dict[str, str]]:
    """Row -> column -> cell."""
    head, *rows = [line.split() for line in text.strip().splitlines()]
    assert all(len(row) == len(head) + 1 for row in rows), "a row has a cell too few or too many"
    return {row[0]: dict(zip(head, row[1:], strict=True)) for row in rows}

"""Drives Celery: results in PostgreSQL, late ACKs, confirmed publishes."""

import os
import sys

from celery import Celery
from stamps import paced, record_wait

PROCESSES = os.environ["PEER_PROCESSES"]

database = os.environ["PEER_DATABASE_URL"].partition("://")[2]
app = Celery("peer", broker=os.environ["PEER_AMQP_URL"], backend=f"db+postgresql+psycopg2://{database}")
app.conf.update(
    task_acks_late=True,
    worker_prefetch_multiplier=32,
    broker_transport_options={"confirm_publish": True},
    broker_connection_retry_on_startup=True,
)


@app.task(name="noop")
def noop():
    return None


@app.task(name="stamped")
def stamped(submitted_at):
    record_wait(submitted_at)


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        app.backend.ResultSession()  # creates the tables of the results
    elif sys.argv[1] == "submit":
        for _ in range(int(sys.argv[2])):
            noop.delay()
    elif sys.argv[1] == "pace":
        for now in paced(int(sys.argv[2]), float(sys.argv[3])):
            stamped.delay(now)
    else:
        app.worker_main(["worker", "--pool=prefork", f"--concurrency={PROCESSES}", "--loglevel=ERROR",
                         "--without-gossip", "--without-mingle", "--without-heartbeat"])  # fmt: skip

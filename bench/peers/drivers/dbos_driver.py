"""Drives DBOS Transact: PostgreSQL alone; every workflow is a row."""

import json
import os
import sys
import time
from statistics import median

from dbos import DBOS, DBOSClient
from stamps import paced, record_wait

URL = os.environ["PEER_DATABASE_URL"]
DBOS(config={"name": "peer", "system_database_url": URL, "log_level": "ERROR", "application_version": "1"})


@DBOS.workflow(name="noop")
def noop():
    return None


@DBOS.workflow(name="stamped")
def stamped(submitted_at):
    record_wait(submitted_at)


@DBOS.step(name="nothing")
def nothing():
    return None


@DBOS.workflow(name="stepped")
def stepped(steps):
    for _ in range(steps):
        nothing()


def sdk(workflows, steps, results):
    """Print the steps a second, and the milliseconds of a workflow's result, for `bench/sdk.py`."""
    DBOS.launch()
    DBOS.start_workflow(stepped, 10).get_result()
    began = time.monotonic()
    for handle in [DBOS.start_workflow(stepped, steps) for _ in range(workflows)]:
        handle.get_result()
    rate = workflows * steps / (time.monotonic() - began)
    ways = []
    for _ in range(results):
        began = time.monotonic()
        DBOS.start_workflow(noop).get_result()
        ways.append(1000 * (time.monotonic() - began))
    sys.stdout.write(json.dumps({"dbos_steps": rate, "dbos_way": median(ways)}) + "\n")
    DBOS.destroy()


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        DBOS.launch()
        DBOS.register_queue("peer", polling_interval_sec=0.1)
        DBOS.destroy()
    elif sys.argv[1] == "submit":
        client = DBOSClient(system_database_url=URL)
        for _ in range(int(sys.argv[2])):
            client.enqueue({"queue_name": "peer", "workflow_name": "noop", "app_version": "1"})
    elif sys.argv[1] == "sdk":
        sdk(*map(int, sys.argv[2:5]))
    elif sys.argv[1] == "pace":
        client = DBOSClient(system_database_url=URL)
        for now in paced(int(sys.argv[2]), float(sys.argv[3])):
            client.enqueue({"queue_name": "peer", "workflow_name": "stamped", "app_version": "1"}, now)
    else:
        DBOS.launch()
        DBOS.register_queue("peer", polling_interval_sec=0.1)
        while True:
            time.sleep(60)

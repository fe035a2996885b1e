"""DBOS Transact: PostgreSQL alone; every workflow is a row."""

import os
import sys
import time

from dbos import DBOS, DBOSClient
from stamps import note, paced

URL = os.environ["PEER_DATABASE_URL"]
DBOS(config={"name": "peer", "system_database_url": URL, "log_level": "ERROR", "application_version": "1"})


@DBOS.workflow(name="noop")
def noop():
    return None


@DBOS.workflow(name="stamped")
def stamped(asked):
    note(asked)


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        DBOS.launch()
        DBOS.register_queue("peer", polling_interval_sec=0.1)
        DBOS.destroy()
    elif sys.argv[1] == "submit":
        client = DBOSClient(system_database_url=URL)
        for _ in range(int(sys.argv[2])):
            client.enqueue({"queue_name": "peer", "workflow_name": "noop", "app_version": "1"})
    elif sys.argv[1] == "pace":
        client = DBOSClient(system_database_url=URL)
        for now in paced(int(sys.argv[2]), float(sys.argv[3])):
            client.enqueue({"queue_name": "peer", "workflow_name": "stamped", "app_version": "1"}, now)
    else:
        DBOS.launch()
        DBOS.register_queue("peer", polling_interval_sec=0.1)
        while True:
            time.sleep(60)

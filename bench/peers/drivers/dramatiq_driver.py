"""Drives Dramatiq. Dramatiq keeps no results in PostgreSQL, so a middleware writes a row for each job, as users do."""

import os
import sys
import threading

import dramatiq
import psycopg
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from stamps import paced, record_wait

PROCESSES = os.environ["PEER_PROCESSES"]

URL = os.environ["PEER_DATABASE_URL"]
thread_state = threading.local()


class Rows(dramatiq.Middleware):
    def after_process_message(self, broker, message, *, result=None, exception=None):
        if not hasattr(thread_state, "connection"):
            thread_state.connection = psycopg.connect(URL, autocommit=True)
        thread_state.connection.execute("INSERT INTO peer_done (id) VALUES (%s)", (message.message_id,))


broker = RabbitmqBroker(url=os.environ["PEER_AMQP_URL"], confirm_delivery=True)
broker.add_middleware(Rows())
dramatiq.set_broker(broker)


@dramatiq.actor
def noop():
    return None


@dramatiq.actor
def stamped(submitted_at):
    record_wait(submitted_at)


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        with psycopg.connect(URL, autocommit=True) as connection:
            connection.execute("CREATE TABLE peer_done (id text PRIMARY KEY, at timestamptz DEFAULT clock_timestamp())")
    elif sys.argv[1] == "submit":
        for _ in range(int(sys.argv[2])):
            noop.send()
    elif sys.argv[1] == "pace":
        for now in paced(int(sys.argv[2]), float(sys.argv[3])):
            stamped.send(now)
    else:
        os.execv(sys.executable, [sys.executable, "-m", "dramatiq", "dramatiq_driver", "--processes", PROCESSES,
                                  "--threads", "8", "--path", os.path.dirname(__file__)])  # fmt: skip

"""Settings for a broker that lives, on a machine that may keep RabbitMQ from its processor for seconds."""

from __future__ import annotations

#: RabbitMQ does not count as silent, and a hint not as unconfirmed, while a test runs.
BROKER_ROOM = {"amqp_silence_seconds": 60.0, "amqp_publish_timeout": 60.0}

from __future__ import annotations

import socket

import pytest

from leasehold.cli.installation import Installation
from leasehold.embedded.process import EmbeddedError


async def test_a_second_installation_on_a_port_that_answers_already_is_refused_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EmbeddedError, match=f"port {port} is in use"):
            async with Installation(port=port):
                pass

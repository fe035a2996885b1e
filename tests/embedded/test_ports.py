"""Two processes never choose the same port, and no outgoing connection can take a chosen one."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
from typer.testing import CliRunner

from leasehold.cli.installation import Installation
from leasehold.cli.main import app
from leasehold.embedded.ports import BLOCK_SIZE, Ports, _outgoing_range, free_port, ports_outside
from leasehold.embedded.process import EmbeddedError

TAKES = 3 * BLOCK_SIZE
#: Chooses ports, prints them, and lives on until its input ends. All have the same seed.
CHOOSER = f"""
import random, sys
from leasehold.embedded.ports import free_port
random.seed(1)
print(*(free_port() for _ in range({TAKES})), flush=True)
sys.stdin.read()
"""


def own_block() -> range:
    """A block that no other process reserves: real blocks begin at other ports. Servers may listen on its ports."""
    return range(first := 20_001 + BLOCK_SIZE * (os.getpid() % 300), first + BLOCK_SIZE)


def listener_on_one_of(ports: range) -> socket.socket:
    for port in ports:
        with suppress(OSError):  # a server listens there already
            return socket.create_server(("127.0.0.1", port))
    raise AssertionError("something listens on each of these ports")


def started(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def iter_until_exhausted(ports: Ports) -> Iterator[int]:
    with suppress(EmbeddedError):
        while True:
            yield ports.take()


def test_processes_that_live_at_once_never_choose_the_same_port() -> None:
    choosers = [started(CHOOSER) for _ in range(3)]
    ports: list[int] = []
    for chooser in choosers:
        assert chooser.stdout is not None
        ports += map(int, chooser.stdout.readline().split())
    for chooser in choosers:
        chooser.communicate()
    assert len(ports) == len(set(ports)) == 3 * TAKES


def test_a_fork_does_not_go_on_with_the_block_of_its_parent() -> None:
    """The parent may reserve its next block meanwhile. Once the child is dead, its block is free again."""
    taken = free_port()
    (read, write), (read_end, write_end) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(write_end)
        os.write(write, b"%d" % free_port())
        os.read(read_end, 1)  # until the parent has chosen
        os._exit(0)
    port_of_child = int(os.read(read, 10))
    ports = {free_port() for _ in range(BLOCK_SIZE)}
    for descriptor in (read, write, read_end, write_end):
        os.close(descriptor)
    os.waitpid(child, 0)
    assert port_of_child not in {taken, *ports}


def test_a_block_is_taken_by_one_and_free_again_when_its_process_is_dead() -> None:
    block = own_block()
    program = f"from leasehold.embedded.ports import Ports; print(Ports({block}).take(), flush=True); input()"
    first = started(program)
    assert first.stdout is not None
    assert int(first.stdout.readline()) in block
    with closing(Ports(block)) as second:
        for _ in range(2):
            with pytest.raises(EmbeddedError, match=r"no free port on 127\.0\.0\.1: .* Address already in use"):
                second.take()
    first.kill()
    first.communicate()
    with closing(Ports(block)) as third:
        assert third.take() in block


def test_a_machine_that_lets_no_block_be_reserved_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_socket: socket.socket, _address: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with closing(Ports(own_block())) as ports, pytest.raises(EmbeddedError, match="Operation not permitted"):
        ports.take()


def test_a_process_that_has_taken_all_ports_is_told_so() -> None:
    with closing(Ports(own_block())) as ports:
        assert list(iter_until_exhausted(ports))
        with pytest.raises(EmbeddedError, match="this process has used all blocks of ports"):
            ports.take()


def test_a_port_on_which_a_stranger_listens_is_passed_over_and_none_is_returned_twice() -> None:
    candidates = ports_outside(*_outgoing_range())
    with closing(Ports(candidates)) as ports:  # reserves a real block, so no other test chooses from it
        first = ports.take()
        end = first + BLOCK_SIZE - (first - candidates.start) % BLOCK_SIZE
        with listener_on_one_of(range(first + 1, end)) as stranger:
            taken = [first, *(ports.take() for _ in range(BLOCK_SIZE))]  # the rest of the block, and of another
            assert stranger.getsockname()[1] not in taken
    assert len(set(taken)) == len(taken)


@pytest.mark.parametrize(
    ("outgoing", "ports"),
    [
        ((32_768, 60_999), range(20_000, 32_768)),
        ((20_000, 40_000), range(40_001, 65_536)),
        ((15_000, 65_535), range(20_000, 32_000)),  # nothing is left
        ((20_000 + BLOCK_SIZE, 65_535), range(20_000, 20_000 + BLOCK_SIZE)),
        ((19_999 + BLOCK_SIZE, 65_535), range(20_000, 32_000)),
        ((10, 10_000), range(20_000, 65_536)),
    ],
)
def test_ports_lie_outside_the_range_of_outgoing_connections(outgoing: tuple[int, int], ports: range) -> None:
    assert ports_outside(*outgoing) == ports


def test_blocks_do_not_reach_beyond_the_candidates() -> None:
    first = own_block().start
    with closing(Ports(range(first, first + BLOCK_SIZE + BLOCK_SIZE // 2))) as ports:
        taken = list(iter_until_exhausted(ports))
    assert taken
    assert max(taken) < first + BLOCK_SIZE


async def test_a_second_installation_on_a_port_that_answers_already_is_refused_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EmbeddedError, match=f"port {port} is in use"):
            async with Installation(port=port):
                pass


async def test_a_port_that_only_root_may_use_is_not_called_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_socket: socket.socket, _address: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    installation = Installation(port=80)
    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(EmbeddedError, match="port 80 cannot be used: Permission denied: choose another one"):
        async with installation:
            pass


@pytest.mark.parametrize(("port", "bound"), [("65536", "less than or equal to 65535"), ("-1", "greater than or equal")])
def test_a_port_that_does_not_exist_is_refused_with_its_bound(port: str, bound: str) -> None:
    result = CliRunner().invoke(app, ["dev", "--port", port])
    assert (result.exit_code, bound in result.stderr) == (2, True)

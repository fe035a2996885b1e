"""The listener of a process: metrics for Prometheus, and probes for the kubelet."""

from __future__ import annotations

import socket

import httpx2
import pytest

from leasehold.settings import Settings
from leasehold.telemetry import listener, meters
from leasehold.telemetry.listener import Health, listen, listening_at


def status(port: int, path: str, host: str = "127.0.0.1") -> int:
    return httpx2.get(f"http://{host}:{port}{path}", timeout=60).status_code


def test_a_worker_is_ready_when_it_serves_and_alive_while_its_loop_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    health = Health()
    port = listen("127.0.0.1", 0, health)
    assert (status(port, "/livez"), status(port, "/readyz")) == (200, 503)
    health.record_turn()
    health.is_ready = True
    assert (status(port, "/livez"), status(port, "/readyz")) == (200, 200)
    monkeypatch.setattr(listener, "DEAD_SECONDS", 0.0)
    assert (status(port, "/livez"), status(port, "/readyz")) == (503, 200)
    assert "leasehold_" in httpx2.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text


def test_without_metrics_the_probes_answer_and_nothing_else_does() -> None:
    health = Health()
    health.is_ready = True
    port = listen("127.0.0.1", 0, health, has_metrics=False)
    assert [status(port, path) for path in ("/livez", "/readyz", "/metrics", "/")] == [200, 200, 404, 404]
    health.is_ready = False
    assert status(port, "/readyz") == 503


def test_with_metrics_off_a_process_serves_what_it_has_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "switch_off", lambda: None)  # the metrics of this process go on
    off = Settings(_env_file=None, metrics=False, metrics_port=0)
    assert meters.expose(off, "api") is None
    assert meters.expose(off.model_copy(update={"metrics_port": None}), "worker", Health()) is None
    port = meters.expose(off, "worker", Health())
    assert port is not None
    assert (status(port, "/livez"), status(port, "/metrics")) == (200, 404)


def test_all_addresses_are_those_of_both_versions_and_a_kernel_without_ipv6_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = listen("::", 0, None)
    assert [status(port, "/metrics", host) for host in ("127.0.0.1", "[::1]")] == [200, 200]
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    assert status(listen("::", 0, None), "/metrics") == 200
    with listening_at("::", 0) as opened:
        assert opened.family == socket.AF_INET


def test_one_address_of_ipv6_is_not_all_of_ipv4() -> None:
    while True:
        port = listen("::1", 0, None)
        with socket.socket() as held:  # else another program may listen there
            try:
                held.bind(("127.0.0.1", port))
            except OSError:  # one does
                continue
            with pytest.raises(httpx2.ConnectError):
                status(port, "/metrics")
            return


def test_without_probes_there_are_metrics_alone_also_over_ipv6() -> None:
    port = listen("::1", 0, None)
    assert "leasehold_" in httpx2.get(f"http://[::1]:{port}/metrics", timeout=60).text
    assert "leasehold_" in httpx2.get(f"http://[::1]:{port}/readyz", timeout=60).text

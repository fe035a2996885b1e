"""The proxy before the store: it forwards, it hangs on demand, and it hides no store that is away."""

from __future__ import annotations

import asyncio

from bench.hostile.store_proxy import StoreProxy, store_proxy
from leasehold.embedded.ports import free_port

SECONDS = 60.0


async def connect(proxy: StoreProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))


async def test_a_proxy_forwards_until_it_hangs() -> None:
    received = asyncio.Queue[bytes]()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            received.put_nowait(data)
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, store_proxy(f"http://127.0.0.1:{port}") as proxy, asyncio.timeout(SECONDS):
        reader, writer = await connect(proxy)
        writer.write(b"before")
        assert await reader.read(100) == await received.get() == b"before"
        proxy.hang()
        writer.write(b"after")
        other_reader, other_writer = await connect(proxy)  # it still accepts connections
        other_writer.write(b"after")
        await asyncio.gather(writer.drain(), other_writer.drain())
        for _ in range(100):  # turns of the event loop: enough for bytes on loopback to pass
            await asyncio.sleep(0)
        assert received.empty()
        assert not other_reader.at_eof()
        for open_writer in (writer, other_writer):
            open_writer.close()


async def test_a_store_that_is_away_closes_the_connection_of_its_client() -> None:
    failures: list[str] = []
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: failures.append(repr(context)))
    try:
        async with store_proxy(f"http://127.0.0.1:{free_port()}") as proxy, asyncio.timeout(SECONDS):
            reader, writer = await connect(proxy)
            assert await reader.read() == b""
            writer.close()
    finally:
        loop.set_exception_handler(before)  # the loop is that of all tests
    assert [failure for failure in failures if StoreProxy.__name__ in failure] == []

"""An agent: each answer of the model and each tool is a durable step, and the model's tokens are streamed."""

import json
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx2
from pydantic import BaseModel

from leasehold import App, Context, Permanent, current

app = App("agent")
MOST_TURNS = 10


class Message(BaseModel):
    role: str
    text: str


class Reply(BaseModel):
    text: str = ""
    tool: str | None = None
    arguments: dict[str, Any] = {}


@app.task(queue="models")
async def ask_model(messages: list[Message]) -> Reply:
    """The model answers with lines of JSON: tokens of its text, or one tool to call."""
    reply = Reply()
    body = {"messages": [message.model_dump() for message in messages]}
    async with (
        httpx2.AsyncClient(timeout=60) as client,
        client.stream("POST", os.environ["MODEL_URL"], json=body) as response,
    ):
        response.raise_for_status()  # after an error the step is tried again, and its stream begins anew
        async for line in lines_of(response):
            chunk = json.loads(line)
            if "token" in chunk:
                reply.text += chunk["token"]
                current().emit(chunk["token"])
            else:
                reply = Reply(tool=chunk["tool"], arguments=chunk["arguments"])
    return reply


async def lines_of(response: httpx2.Response) -> AsyncIterator[bytes]:
    """The lines between line feeds. `aiter_lines` would also split at U+2028, which JSON may have inside a text."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


@app.task
async def weather(city: str) -> str:
    return f"it rains in {city}"


@app.task
def add(a: int, b: int) -> str:
    return str(a + b)


@app.workflow
async def answer(ctx: Context, question: str) -> str:
    messages = [Message(role="user", text=question)]
    for _ in range(MOST_TURNS):
        reply = await ctx.run(ask_model, messages)
        if reply.tool is None:
            return reply.text
        match reply.tool:
            case "weather":
                result = await ctx.run(weather, reply.arguments["city"])
            case "add":
                result = await ctx.run(add, reply.arguments["a"], reply.arguments["b"])
            case _:
                result = f"there is no tool {reply.tool}"
        messages += [Message(role="model", text=reply.model_dump_json()), Message(role="tool", text=result)]
    raise Permanent("too_many_turns", f"the model called tools {MOST_TURNS} times and gave no answer")

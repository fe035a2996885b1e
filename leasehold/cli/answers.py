"""The parts that all commands that call the API use: a client, options, and functions that print answers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any
from uuid import UUID

import typer

from leasehold.app.dev_file import dev_variables
from leasehold.cli.api_client import ApiClient, Interrupted, Refused
from leasehold.cli.running import FAILED, UNREACHABLE, WRONG_USE, failure_printed
from leasehold.cli.terminal import print_line, print_table
from leasehold.client.errors import ClientError
from leasehold.client.requests import key_of, url_of

AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Cursor = Annotated[str | None, typer.Option(help="Show the page after the one that ended with this `next_cursor`.")]
IdempotencyKey = Annotated[
    str | None,
    typer.Option(
        help="Your own key for this request. Within 24 hours, the same command with the same key does nothing twice."
    ),
]

#: The id that error messages show as an example.
_EXAMPLE_ID = "0199d3f0-6c1e-7a52-9d1b-3f6a2b8c4d5e"


@contextmanager
def api_client() -> Iterator[ApiClient]:
    """A client for LEASEHOLD_URL with the key LEASEHOLD_API_KEY. If both are unset, the client calls the API of the
    `leasehold dev` that runs in the current folder. If the API refuses a request, the command prints the reason and
    ends (`raise failure_printed`).
    """
    try:
        with ApiClient(*api_and_key()) as client:
            yield client
    except ClientError as error:
        raise failure_printed(str(error), WRONG_USE) from None
    except UnicodeEncodeError:  # Python decodes bytes that are not UTF-8 to lone surrogates
        raise failure_printed("an argument has bytes that are not UTF-8 text", WRONG_USE) from None
    except Refused as error:
        raise failure_printed(str(error), UNREACHABLE if isinstance(error, Interrupted) else FAILED) from None


def api_and_key() -> tuple[str, str]:
    """The URL of the API that `api_client` calls, and the API key. Without a key, the command prints an error and ends.
    Raises ClientError if LEASEHOLD_URL is no URL.
    """
    from_environment = {
        name: os.environ[name] for name in ("LEASEHOLD_URL", "LEASEHOLD_API_KEY") if os.environ.get(name)
    }
    variables = from_environment or dev_variables()
    key = variables.get("LEASEHOLD_API_KEY")
    if not key:
        raise failure_printed("set LEASEHOLD_API_KEY to an API key (leasehold keys create)", WRONG_USE)
    return url_of(variables.get("LEASEHOLD_URL")), key_of(key)


def id_of(what: str) -> Callable[[typer.Context, Any], Any]:
    """A typer callback that checks an argument, which must be one id, or a list of ids. For any other text, the command
    prints an error and ends. `what`: what has the id, with its article, for example "an operation".
    """

    def check(context: typer.Context, value: Any) -> Any:
        if value is None or context.resilient_parsing:  # while a shell completes the line, nothing is printed
            return value
        for text in value if isinstance(value, list) else [value]:
            try:
                UUID(text)
            except ValueError:
                raise failure_printed(
                    f"{text!r} is not the id of {what}: an id looks like {_EXAMPLE_ID}", WRONG_USE
                ) from None
        return value

    return check


def json_argument(payload: str) -> Any:
    """The JSON value of an argument. If the text is not JSON, or cannot be sent in a request (`NaN`, for example), the
    command prints an error and ends.
    """
    try:
        value = json.loads(payload)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # as the HTTP library encodes it
    except RecursionError:
        raise failure_printed("the payload is nested too deep", WRONG_USE) from None
    except UnicodeEncodeError:
        raise failure_printed("the payload has a text that cannot be encoded as UTF-8", WRONG_USE) from None
    except ValueError as error:
        raise failure_printed(f"the payload is not JSON: {error}", WRONG_USE) from None
    return value


def show(answer: Any, as_json: bool, print_answer: Callable[[], None]) -> None:
    """Print the answer as JSON, or call `print_answer`, which prints it for people."""
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        print_answer()


def print_next_page(page: dict[str, Any]) -> None:
    """Print the option that shows the next page of a list, if there is a next page."""
    if page.get("next_cursor") is not None:  # an API of an earlier release sends some lists without this field
        print_line(f"The next page: --cursor {page['next_cursor']}")


def print_fields(rows: Sequence[dict[str, Any]], *columns: str) -> None:
    """Print these fields of the rows as a table."""
    print_table(columns, ([row.get(column) for column in columns] for row in rows))

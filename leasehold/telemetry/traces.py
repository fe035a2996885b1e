"""Traces: one a job, from the HTTP request through the outbox row and the broker's message to every step.

What carries a trace is a W3C `traceparent` in the job's `trace`, in the outbox row's and the message's headers. It is
there always, for logs; spans are made only where `LEASEHOLD_TRACES` is on. Off, nothing is imported and a span is a
call that returns a constant. Where spans go, and how many, is OpenTelemetry's own variables (`OTEL_*`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal

from leasehold.domain.errors import LeaseholdError

if TYPE_CHECKING:
    from opentelemetry.trace import Span as Recorded
    from opentelemetry.trace import Tracer

Kind = Literal["INTERNAL", "SERVER", "PRODUCER", "CONSUMER"]
Headers = Mapping[str, str]


class NoExporter(LeaseholdError):
    """Traces are switched on, and the extra `otel` is not installed."""


class Span:
    """A span that goes on, or nothing at all."""

    traceparent: str | None = None

    def named(self, name: str) -> None:
        """Give it the name that it could not have at its start."""

    def tell(self, **attributes: str | float) -> None:
        """Add attributes: names and codes, never what a client or a handler said."""

    def failed(self, code: str) -> None:
        """It did not end well."""


class _RecordedSpan(Span):
    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        context = recorded.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def named(self, name: str) -> None:
        self._recorded.update_name(name)

    def tell(self, **attributes: str | float) -> None:
        self._recorded.set_attributes(_dotted(attributes))

    def failed(self, code: str) -> None:
        from opentelemetry.trace import StatusCode  # noqa: PLC0415 - the extra, here for sure

        self._recorded.set_status(StatusCode.ERROR, code)


#: OpenTelemetry's own names that one dot does not make.
_NAMES = {"http_request_method": "http.request.method", "http_response_status_code": "http.response.status_code"}
_NOTHING: AbstractContextManager[Span] = nullcontext(Span())
_tracer: Tracer | None = None


def begin_traces(role: str) -> None:
    """Make spans from now on. What waits to be sent is sent when the process ends.

    Raises NoExporter when OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415 - as above
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - as above
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - as above
    except ImportError as error:
        raise NoExporter("LEASEHOLD_TRACES is on, but the extra `otel` is not installed") from error
    ours = Resource({"service.name": f"leasehold-{role}", "service.version": version("leasehold")})
    provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))  # OTEL_SERVICE_NAME wins
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    global _tracer  # noqa: PLW0603 - one tracer a process, set once by its main
    _tracer = provider.get_tracer("leasehold", version("leasehold"))


def span(
    name: str, kind: Kind = "INTERNAL", *, parent: Headers | None = None, **attributes: str | float
) -> AbstractContextManager[Span]:
    """Measure the block. Its parent is what `parent` (headers with a traceparent) names, else the span around it.

    An attribute `messaging_system` is told as `messaging.system`.
    """
    return _NOTHING if _tracer is None else _record(_tracer, name, kind, parent, attributes)


@contextmanager
def _record(
    tracer: Tracer, name: str, kind: Kind, parent: Headers | None, attributes: Mapping[str, str | int | float]
) -> Iterator[Span]:
    from opentelemetry.trace import SpanKind  # noqa: PLC0415 - the extra, here for sure
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415 - as above

    context = TraceContextTextMapPropagator().extract(parent) if parent else None
    # Not the library's way to record an exception: its message may hold what must not leave the process.
    with tracer.start_as_current_span(
        name,
        context,
        SpanKind[kind],
        _dotted(attributes),
        record_exception=False,
        set_status_on_exception=False,
    ) as recorded:
        span = _RecordedSpan(recorded)
        try:
            yield span
        except BaseException as error:
            span.failed(type(error).__name__)
            raise


@contextmanager
def announced(headers: Sequence[Headers]) -> Iterator[list[Headers]]:
    """The publishing of messages with these headers; gives what to send: with the publishing as the parent."""
    if _tracer is None:
        yield list(headers)
        return
    with ExitStack() as spans:
        told = [spans.enter_context(span("hint publish", "PRODUCER", parent=one)) for one in headers]
        yield [
            {**one, "traceparent": said.traceparent or ""} if "traceparent" in one else one
            for one, said in zip(headers, told, strict=True)
        ]


def _dotted(attributes: Mapping[str, str | int | float]) -> dict[str, str | int | float]:
    return {_NAMES.get(name, name.replace("_", ".", 1)): value for name, value in attributes.items()}


def trace_id_of(headers: Headers | None) -> str | None:
    """The 32 hexadecimal digits that name the trace."""
    traceparent = (headers or {}).get("traceparent", "")
    return traceparent[3:35] or None


def exemplar_of(headers: Headers | None) -> dict[str, str] | None:
    """The trace, as an example of what a histogram counts."""
    trace_id = trace_id_of(headers)
    return {"trace_id": trace_id} if trace_id else None

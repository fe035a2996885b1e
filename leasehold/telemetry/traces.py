"""Records traces. Each job has one trace, from the HTTP request through the database and the broker to every step.

The W3C `traceparent` names the trace. The column `job.trace` stores the `traceparent`, and so do the rows of the outbox
(messages that wait to be sent). Each message has the `traceparent` as a header. Jobs have a `traceparent` even when
traces are off, because logs show the trace's id. Spans are recorded only with the setting LEASEHOLD_TRACES. Without
this setting OpenTelemetry is not imported, and `span` returns a constant. OpenTelemetry's own variables (`OTEL_*`)
define where spans are sent, and how many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal

from leasehold.domain.errors import LeaseholdError

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

#: OpenTelemetry's kinds of spans that the platform uses.
Kind = Literal["INTERNAL", "SERVER", "PRODUCER", "CONSUMER"]
#: The headers of a request or a message.
Headers = Mapping[str, str]


class NoExporter(LeaseholdError):
    """Traces are switched on, but the extra `otel` is not installed."""


class Span:
    """A span that has begun. This base class records nothing. It is used when traces are off."""

    traceparent: str | None = None

    def rename(self, name: str) -> None:
        """Change the name, if the right name was not known at the start."""

    def set_attributes(self, **attributes: str | float) -> None:
        """Add attributes: names and codes, never text of a client or a handler."""

    def mark_failed(self, code: str) -> None:
        """Mark the span as failed."""


# A span that OpenTelemetry records.
class _RecordedSpan(Span):
    def __init__(self, recorded: OtelSpan) -> None:
        self._recorded = recorded
        context = recorded.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def rename(self, name: str) -> None:
        self._recorded.update_name(name)

    def set_attributes(self, **attributes: str | float) -> None:
        self._recorded.set_attributes(_dotted_names(attributes))

    def mark_failed(self, code: str) -> None:
        from opentelemetry.trace import StatusCode  # noqa: PLC0415 - the extra is installed: a tracer exists

        self._recorded.set_status(StatusCode.ERROR, code)


#: OpenTelemetry's attribute names with more than one dot. In all other names `_dotted_names` makes the first `_` a dot.
_NAMES = {"http_request_method": "http.request.method", "http_response_status_code": "http.response.status_code"}
#: What `span` returns while traces are off.
_NO_SPAN: AbstractContextManager[Span] = nullcontext(Span())
#: OpenTelemetry's tracer of this process; None: traces are off.
_tracer: Tracer | None = None


def begin_traces(role: str) -> None:
    """From now on, `span` records. `role`: `api` or `worker`; the spans name the service `leasehold-{role}`. Spans that
    still wait to be sent at the end of the process are sent then.

    Raises NoExporter when OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415 - as above
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - as above
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - as above
    except ImportError as error:
        raise NoExporter("LEASEHOLD_TRACES is on, but the extra `otel` is not installed") from error
    resource = Resource({"service.name": f"leasehold-{role}", "service.version": version("leasehold")})
    # The variable OTEL_SERVICE_NAME replaces this service.name.
    provider = TracerProvider(resource=resource.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    global _tracer  # noqa: PLW0603 - one tracer a process, set once by its main
    _tracer = provider.get_tracer("leasehold", version("leasehold"))


def span(
    name: str, kind: Kind = "INTERNAL", *, parent: Headers | None = None, **attributes: str | float
) -> AbstractContextManager[Span]:
    """Record a span for the block. The parent of this span is the traceparent in the headers `parent`. Without
    `parent`, the parent is the span around the block.

    An attribute `messaging_system` is recorded as `messaging.system`.
    """
    return _NO_SPAN if _tracer is None else _record(_tracer, name, kind, parent, attributes)


@contextmanager
def _record(
    tracer: Tracer, name: str, kind: Kind, parent: Headers | None, attributes: Mapping[str, str | int | float]
) -> Iterator[Span]:
    from opentelemetry.trace import SpanKind  # noqa: PLC0415 - the extra is installed: a tracer exists
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415 - as above

    context = TraceContextTextMapPropagator().extract(parent) if parent else None
    # record_exception=False: the exception's message may contain texts of clients, which must not leave the process.
    with tracer.start_as_current_span(
        name,
        context,
        SpanKind[kind],
        _dotted_names(attributes),
        record_exception=False,
        set_status_on_exception=False,
    ) as recorded:
        span = _RecordedSpan(recorded)
        try:
            yield span
        except BaseException as error:
            span.mark_failed(type(error).__name__)
            raise


@contextmanager
def publishing_spans(headers: Sequence[Headers]) -> Iterator[list[Headers]]:
    """Record one span for each message that is published in the block. `headers`: the headers of each message. Yields
    the headers to send instead, in the same order. Their `traceparent` names the message's span, so that the receiver's
    span becomes a child of the message's span.
    """
    if _tracer is None:
        yield list(headers)
        return
    with ExitStack() as spans:
        publish_spans = [spans.enter_context(span("hint publish", "PRODUCER", parent=parent)) for parent in headers]
        yield [
            {**parent, "traceparent": child.traceparent or ""} if "traceparent" in parent else parent
            for parent, child in zip(headers, publish_spans, strict=True)
        ]


def _dotted_names(attributes: Mapping[str, str | int | float]) -> dict[str, str | int | float]:
    return {_NAMES.get(name, name.replace("_", ".", 1)): value for name, value in attributes.items()}


def trace_id_of(headers: Headers | None) -> str | None:
    """The 32 hexadecimal digits of the trace's id; None without a trace."""
    traceparent = (headers or {}).get("traceparent", "")
    return traceparent[3:35] or None


def exemplar_of(trace_id: str | None) -> dict[str, str] | None:
    """The labels of an exemplar: they link a measurement of a histogram to its trace. None without a trace."""
    return {"trace_id": trace_id} if trace_id else None

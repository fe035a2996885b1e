"""A template declares the steps and policies of a kind of run. Clients write templates over HTTP, in versions. A
written version never changes, except that it can be enabled and disabled.

The API stores templates. To start a run, the API makes a Pipeline of the template, as if code had declared it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from leasehold.domain.errors import DeclarationError, Invalid
from leasehold.domain.json_values import MAX_SMALLINT, Flag, Integer, JsonNumber
from leasehold.domain.pipeline import Concurrency, Pipeline, RunTerms, SkipIf, Step
from leasehold.domain.sentences import full_stop

#: The name of a template, of a step or of a queue.
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]
#: Who does a step. `external`: an external worker. `PIPELINE.STEP`: the platform's workers, with the handler of that
#: step of that pipeline. The name of a pipeline may contain a dot.
WorkerType = Annotated[str, Field(pattern=r"^(external|[a-z][a-z0-9_-]{0,62}(\.[a-z][a-z0-9_-]{0,62}){1,2})$")]
Seconds = Annotated[int, Field(ge=1, le=7 * 86_400), JsonNumber]

#: The longest timeout of a run, and the longest wait for its start, in seconds.
MAX_SECONDS = 30 * 86_400
#: The largest payload schema and the largest payload, in bytes of JSON.
MAX_SCHEMA = 64 * 1024
MAX_PAYLOAD = 256 * 1024
EXTERNAL = "external"  # a WorkerType


class _Declaration(BaseModel):
    # A part of a template. A client may not send fields that the part does not have.
    model_config = ConfigDict(extra="forbid", frozen=True)


class RetryPolicy(_Declaration):
    """`backoff_seconds`: the delays before the second attempt, the third, and so on. The last delay repeats."""

    max_attempts: Integer = Field(5, ge=1, le=100)
    backoff_seconds: tuple[Annotated[int, Field(ge=0, le=7 * 86_400), JsonNumber], ...] = Field(
        (60, 300, 1800, 7200), min_length=1, max_length=20
    )

    @property
    def ladder(self) -> tuple[timedelta, ...]:
        return tuple(timedelta(seconds=seconds) for seconds in self.backoff_seconds)


class CancelPolicy(_Declaration):
    """`grace_seconds`: how long a running step may take to stop. After that the platform ends it."""

    supported: Flag = True
    mode: Literal["cooperative"] = "cooperative"
    grace_seconds: Integer = Field(30, ge=0, le=3600)


class SkipWhen(_Declaration):
    """The run skips the step when its payload holds `equals` at the JSON pointer. A step that needs the skipped step
    then waits for the steps that the skipped step needs.
    """

    pointer: str = Field(pattern=r"^(/([^/~]|~[01])*){1,32}$", max_length=500)
    equals: JsonValue = True


class TemplateStep(_Declaration):
    id: Name
    name: str = Field("", max_length=200)
    worker_type: WorkerType = EXTERNAL
    queue: Name = "default"
    needs: tuple[Name, ...] | None = Field(
        None, max_length=50, description="Steps that must have succeeded first. Left out: the step before this one."
    )
    skip_if: SkipWhen | None = None
    timeout_seconds: Seconds = 300
    cancelable: Flag = True
    retry: RetryPolicy | None = Field(None, description="Left out: the template's retry_policy.")


class Template(_Declaration):
    """One version of a template."""

    type: Name
    version: Integer = Field(1, ge=1, le=MAX_SMALLINT)
    name: str = Field("", max_length=200)
    description: str = Field("", max_length=2000)
    enabled: Flag = True
    repeatable: Flag = Field(True, description="Whether a run may be rerun.")
    payload_schema: dict[str, Any] = Field(default_factory=dict, description="JSON Schema 2020-12 of the payload.")
    steps: tuple[TemplateStep, ...] = Field(min_length=1, max_length=100)
    concurrency_policy: Concurrency = "allow"
    dedupe_keys: tuple[Annotated[str, Field(min_length=1, max_length=100)], ...] = Field((), max_length=10)
    timeout_seconds: Annotated[int, Field(ge=1, le=MAX_SECONDS), JsonNumber] | None = Field(
        None, description="The longest a run may take, from its admission at its scope and its concurrency limits."
    )
    start_within_seconds: Annotated[int, Field(ge=1, le=MAX_SECONDS), JsonNumber] | None = Field(
        None, description="The longest a run may wait for that admission. Left out: any time."
    )
    cancel_policy: CancelPolicy = CancelPolicy()
    retry_policy: RetryPolicy = RetryPolicy()
    schedulable: Flag = True

    @field_validator("payload_schema")
    @classmethod
    def _check_schema_size(cls, schema: dict[str, Any]) -> dict[str, Any]:
        # Only the size is checked here. leasehold.evaluation checks the schema itself, in a child process, because that
        # check is too slow for an event loop.
        try:
            size = len(orjson.dumps(schema))
        except TypeError as error:
            raise ValueError(f"a payload schema cannot be stored: {error}") from None
        if size > MAX_SCHEMA:
            raise ValueError(f"a payload schema has at most {MAX_SCHEMA} bytes")
        return schema

    @model_validator(mode="after")
    def _check_pipeline(self) -> Template:
        try:
            self.pipeline()
        except DeclarationError as error:
            raise ValueError(str(error)) from None
        return self

    def step(self, name: str) -> TemplateStep | None:
        """The step, or None."""
        return next((step for step in self.steps if step.id == name), None)

    def retry(self, step: str) -> RetryPolicy:
        """The retry policy of a step: its own, else the template's."""
        declared_step = self.step(step)
        own_policy = declared_step.retry if declared_step is not None else None
        return own_policy or self.retry_policy

    def pipeline(self) -> Pipeline:
        """The pipeline of this template. Raises DeclarationError if a step needs an unknown step, if steps need each
        other in a cycle, or if two steps have the same name.
        """
        return Pipeline(
            self.type,
            version=self.version,
            module="",  # a step names its code itself (`handler`)
            steps=[self._pipeline_step(number) for number in range(len(self.steps))],
            terms=RunTerms(
                title=self.name,
                description=self.description,
                concurrency=self.concurrency_policy,
                dedupe_keys=self.dedupe_keys,
                timeout=_timedelta_of(self.timeout_seconds),
                start_within=_timedelta_of(self.start_within_seconds),
                cancelable=self.cancel_policy.supported,
                grace=timedelta(seconds=self.cancel_policy.grace_seconds),
                repeatable=self.repeatable,
                schedulable=self.schedulable,
            ),
        )

    def _pipeline_step(self, number: int) -> Step:
        step = self.steps[number]
        step_before = (self.steps[number - 1].id,) if number else ()
        retry = step.retry or self.retry_policy
        is_external = step.worker_type == EXTERNAL
        return Step(
            step.id,
            needs=step_before if step.needs is None else step.needs,
            queue=step.queue,
            max_attempts=retry.max_attempts,
            timeout_seconds=step.timeout_seconds,
            cancelable=step.cancelable,
            skip_if=None if step.skip_if is None else SkipIf(step.skip_if.pointer, step.skip_if.equals),
            external=is_external,
            handler=None if is_external else step.worker_type,
        )


def encoded_payload(payload: Mapping[str, Any]) -> bytes:
    """The payload as JSON. Raises Invalid `payload_too_large`, or `invalid_payload` for a value such as 2**64."""
    try:
        encoded = orjson.dumps(payload)
    except TypeError as error:
        raise Invalid("invalid_payload", full_stop(f"The payload cannot be stored: {error}")) from None
    if len(encoded) > MAX_PAYLOAD:
        sentence = f"The payload has {len(encoded)} bytes; at most {MAX_PAYLOAD} are accepted."
        raise Invalid("payload_too_large", sentence)
    return encoded


def _timedelta_of(seconds: int | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)


def template_of_pipeline(pipeline: Pipeline) -> Template:
    """A pipeline of code in the form of a template, because the API shows all templates in the same form."""
    terms = pipeline.terms
    return Template.model_construct(
        type=pipeline.name,
        version=pipeline.version,
        name=terms.title,
        description=terms.description,
        enabled=True,
        repeatable=terms.repeatable,
        payload_schema=pipeline.params.model_json_schema(),
        steps=tuple(
            TemplateStep.model_construct(
                id=step.name,
                name="",
                worker_type=EXTERNAL if step.external else f"{pipeline.name}.{step.name}",
                queue=step.queue,
                needs=step.needs,
                skip_if=None,
                timeout_seconds=int(step.timeout.total_seconds()),
                cancelable=step.cancelable,
                retry=RetryPolicy.model_construct(
                    max_attempts=step.max_attempts,
                    backoff_seconds=tuple(int(delay.total_seconds()) for delay in step.retry_ladder),
                ),
            )
            for step in pipeline.steps
            if not step.part  # a part belongs to a step that fans out
        ),
        concurrency_policy=terms.concurrency,
        dedupe_keys=terms.dedupe_keys,
        timeout_seconds=None if terms.timeout is None else int(terms.timeout.total_seconds()),
        start_within_seconds=None if terms.start_within is None else int(terms.start_within.total_seconds()),
        cancel_policy=CancelPolicy.model_construct(
            supported=terms.cancelable, mode="cooperative", grace_seconds=int(terms.grace.total_seconds())
        ),
        retry_policy=RetryPolicy(),
        schedulable=terms.schedulable,
    )

"""Labels of metrics about failed and refused requests: a small, fixed set of words."""

from __future__ import annotations

from protocol.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RequestError,
    ServiceError,
    TargetUnreachable,
)
from router.fleet.worker import Loss

_ERRORS: dict[type[Exception], str] = {
    Overloaded: "overloaded",
    DeadlineUnreachable: "deadline_unreachable",
    TargetUnreachable: "target_unreachable",
    PromptTooLong: "prompt_too_long",
    InvalidRequest: "invalid_request",
    GenerationFailed: "failed",
    DeadlineExceeded: "failed",
}


def error_label(error: RequestError | ServiceError) -> str:
    """The label of an error; uncommon errors share one."""
    return _ERRORS.get(type(error), "other")


def failure_kind(retryable: bool, lacks_room: bool, loss: Loss | None) -> str:
    """The kind of an attempt's failure: the worker was lost (two kinds), the worker had no room,
    the request can never succeed, or another attempt may succeed."""
    if loss is not None:
        return "connection_broke" if loss is Loss.BROKEN else "worker_lost"
    if lacks_room:
        return "no_room"
    return "retryable" if retryable else "final"

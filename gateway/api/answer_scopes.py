"""The scope under which a request's answer is remembered, and under which remembered answers are
found for its prompts."""

from __future__ import annotations

from starlette.types import Scope

from gateway.api.context import ApiContext
from gateway.history.answers import AnswerScope, PromptText
from gateway.http.request_scope import record_of
from gateway.output.event_ids import StreamIdentity


def scope_of(
    identity: StreamIdentity,
    cache_salt: str | None,
    is_conversation: bool,
    may_be_kept: bool = True,
) -> AnswerScope:
    """The scope of a request that generates. A request that resumes a stream restores exactly those
    answers that the stream's first life restored."""
    tenant, is_resumed = identity.terms.tenant, bool(identity.restored)
    return AnswerScope(
        tenant.salt_with(cache_salt or ""),
        tenant.cache_salt,
        is_conversation,
        may_leave=may_be_kept,
        restores=not identity.life or is_resumed,
        is_resumed=is_resumed,
    )


def counting_scope(
    scope: Scope, cache_salt: str | None = None, is_conversation: bool = True
) -> AnswerScope:
    """The scope of a request that only asks for its tokens."""
    tenant = record_of(scope).tenant
    return AnswerScope(tenant.salt_with(cache_salt or ""), tenant.cache_salt, is_conversation)


async def restore(
    context: ApiContext, scope: AnswerScope, parts: list[str], ids: list[int]
) -> tuple[PromptText, list[int]]:
    """The text of a prompt, and its ids with those of the remembered answers in it."""
    text = parts[0] if len(parts) == 1 else "".join(parts)
    prompt = PromptText(text, scope)
    if context.answers is None:
        return prompt, ids
    restored = await context.answers.restored(prompt, parts, ids)
    if restored is ids:
        return prompt, ids
    return PromptText(text, scope, is_restored=True), restored

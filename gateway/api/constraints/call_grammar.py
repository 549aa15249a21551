"""The grammar that workers enforce on answers that may call tools.

Each tool's schema is enforced as far as it can be, as those of `response_format` are. Errors name
the field of the caller's tool that holds the schema. A call has no arguments besides those that the
schema lists, unless the schema says more of others than nothing.
"""

from __future__ import annotations

from msgspec.structs import replace
from starlette.types import Scope

from gateway.api.constraints.answer_grammar import check_schema
from gateway.api.context import ApiContext
from gateway.chat.conversation import Conversation, ToolMode
from gateway.grammars.closed_schemas import closed
from gateway.grammars.grammar import only_rule
from gateway.grammars.json_schemas import SchemaReader
from protocol.errors import InvalidRequest


async def call_grammar(
    context: ApiContext, scope: Scope, conversation: Conversation, prompt: str, wished: str | None
) -> str | None:
    """The grammar of an answer that may call tools; with `wished`, an answer without calls must
    match that grammar. None if the tools need no grammar. Raises InvalidRequest."""
    if not conversation.may_call_tools:
        return None
    form = None if wished is None else only_rule(wished)
    is_free_to_call = conversation.tool_choice.mode is ToolMode.AUTO
    if wished is not None and form is None and is_free_to_call:
        raise InvalidRequest(
            "a 'regex' or 'grammar' beside 'tools' needs a 'tool_choice' that leaves nothing open: "
            "no call, at least one, or one by name",
            "tool_choice",
        )
    has_strict = any(tool.strict for tool in conversation.tools)
    if is_free_to_call and form is None and not has_strict:
        return None

    only_strict = is_free_to_call and form is None
    return await _enforced(context, scope, conversation, only_strict, prompt, form)


async def _enforced(
    context: ApiContext,
    scope: Scope,
    conversation: Conversation,
    only_strict: bool,
    prompt: str,
    form: str | None,
) -> str | None:
    """The grammar of calls that follow their tools' schemas, or only those of strict tools. Parts
    that cannot be enforced are dropped and named. Raises InvalidRequest, naming the schema's
    field."""
    chosen = conversation.tool_choice.name
    readers: dict[int, SchemaReader] = {}

    def written() -> str | None:
        tools = list(conversation.tools)
        for place, reader in readers.items():
            assert isinstance(reader.schema, dict), "so is the tool's"
            tools[place] = replace(tools[place], parameters=reader.schema)
        return context.markup.grammar(replace(conversation, tools=tuple(tools)), prompt, form)

    def read() -> str | None:
        for place, tool in enumerate(conversation.tools):
            if chosen in (None, tool.name) and (tool.strict or not only_strict):
                readers[place] = SchemaReader(closed(tool.schema), tool.param, tool.strict)
        return written()

    grammar = await context.tokenizer.in_thread(read)
    if grammar is None:
        return None
    try:
        await context.grammars.check(grammar, "tools")
    except InvalidRequest:
        for place, reader in readers.items():
            await check_schema(reader, conversation.tools[place].param, context)
        grammar = await context.tokenizer.in_thread(written)
        assert grammar is not None, "there was one before"
        await context.grammars.check(grammar, "tools")
    dropped = [name for reader in readers.values() for name in reader.dropped]
    if dropped:
        context.name_ignored(scope, dropped)
    return grammar

"""Valid inputs of every parser, for the fuzzing bench to mutate.

Inputs for our own messages are made from the message types, so that a new message is included.
"""

from __future__ import annotations

import json
from typing import Any

from msgspec import inspect

_SAMPLING = {
    "model": "m",
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "stop": ["x", "yz"],
    "seed": 7,
    "n": 2,
    "logit_bias": {"5": 1.5},
    "stream": True,
    "stream_options": {"include_usage": True},
}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}}
_CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "More"},
]


def _bodies(*bodies: dict[str, Any]) -> list[bytes]:
    return [json.dumps(body).encode() for body in bodies]


BODIES = {
    "/v1/completions": _bodies(
        _SAMPLING | {"prompt": "text", "logprobs": 2},
        _SAMPLING | {"prompt": [1, 2, 3], "echo": True},
        {"model": "m", "prompt": [[1, 2], [3]], "ignore_eos": True},
        {"model": "m", "prompt": ["a", "b"], "response_format": _FORMAT},
    ),
    "/v1/chat/completions": _bodies(
        _SAMPLING | {"messages": _CHAT, "logprobs": True, "top_logprobs": 3},
        {"model": "m", "messages": _CHAT, "tools": [_TOOL], "tool_choice": "auto"},
        {"model": "m", "messages": _CHAT[:1], "response_format": _FORMAT},
        {"model": "m", "messages": _CHAT[-1:], "max_completion_tokens": 9},
    ),
    "/v1/responses": _bodies(
        {"model": "m", "input": "Hi", "max_output_tokens": 9, "temperature": 0.5},
        {"model": "m", "input": _CHAT[-1:], "instructions": "Be brief.", "stream": True},
    ),
    "/v1/messages": _bodies(
        {"model": "m", "messages": _CHAT[1:], "max_tokens": 9, "system": "Be brief."},
        {"model": "m", "messages": _CHAT[-1:], "max_tokens": 9, "stop_sequences": ["x"]},
    ),
    "/tokenize": _bodies({"model": "m", "prompt": "text"}, {"model": "m", "messages": _CHAT}),
    "/detokenize": _bodies({"model": "m", "tokens": [1, 2, 3]}),
}
HEADS = [
    b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    b'authorization: Bearer key\r\ncontent-length: 17\r\n\r\n{"prompt": "abc"}',
    b"POST /x?a=b&c=%20 HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n3;x=y\r\nabc\r\n0\r\ntrailer: t\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    b"GET /a HTTP/1.0\r\nconnection: keep-alive\r\n\r\nGET /b HTTP/1.1\r\nhost: b\r\n\r\n",
    b"PUT /c HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n{}",
]
_SCALARS: dict[type[Any], Any] = {
    inspect.IntType: 3,
    inspect.FloatType: 1.5,
    inspect.BoolType: True,
    inspect.StrType: "text",
    inspect.BytesType: b"of 16 bytes each",
    inspect.NoneType: None,
    inspect.AnyType: 1,
}


def variants(union: Any) -> list[Any]:
    """One example of every member of a union of messages."""
    return [_example(member) for member in inspect.multi_type_info(union.__args__)]


def example(message: type[Any]) -> Any:
    """An example of a message type, with every field filled."""
    return _example(inspect.type_info(message))


def _example(kind: inspect.Type) -> Any:
    if isinstance(kind, inspect.StrType) and kind.pattern is not None:
        return "tcp://127.0.0.1:1"
    if type(kind) in _SCALARS:
        return _SCALARS[type(kind)]
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            return cls(**{field.name: _example(field.type) for field in fields})
        case inspect.EnumType(cls=cls):
            return next(iter(cls))
        case inspect.UnionType(types=types):
            filled = [each for each in types if not isinstance(each, inspect.NoneType)]
            return _example(filled[0])
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            made = [_example(item), _example(item)]
            return made if isinstance(kind, inspect.ListType) else tuple(made)
        case inspect.TupleType(item_types=items):
            return tuple(_example(item) for item in items)
        case inspect.DictType(key_type=key, value_type=value):
            return {_example(key): _example(value)}
    raise TypeError(f"no example of {kind}")

"""A server whose scripted model thinks and calls tools, for the clients of several APIs."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.gateway.api_harness import write_checkpoint

TEMPLATE = """\
{%- if tools %}{{- 'tools:' }}{% endif %}
{%- for tool in tools or [] %}{{- tool.function.name }} {% endfor %}
{%- for message in messages %}
{{- '<|start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
{%- endfor %}
{%- if message.tool_call_id %}({{ message.tool_call_id }}){% endif %}
{{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
"""
THINKING = "<think>Let me see</think>"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
SHORT_CALL = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
ARGUMENTS = {"city": "Köln", "days": 2}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def write_tools_checkpoint(path: Path) -> Path:
    """The harness' checkpoint with a template that knows tools and thoughts, Hermes style."""
    write_checkpoint(path)
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"chat_template": TEMPLATE}
    file.write_text(json.dumps(config))
    return path

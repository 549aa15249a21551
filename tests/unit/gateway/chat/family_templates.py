"""A small chat template of each family, in the manner of those that its models come with."""

from __future__ import annotations

HEAD = """\
{%- if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}{{ '<|start|>' + m.role + '\\n' }}"""
TAIL = """\
{{- '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"""
PLAIN = "{{- m.content }}"


def template(calls: str, head: str = HEAD, tail: str = TAIL) -> str:
    """A template that writes calls like this."""
    return f"{head}{PLAIN}{{%- for call in m.tool_calls or [] %}}{calls}{{% endfor %}}{tail}"


TAGS = """\
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' }}
{%- if value is mapping or (value is sequence and value is not string) %}{{ value | tojson }}
{%- else %}{{ value | string }}{% endif %}{{ '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}"""
AS_TEXT = "{{ value if value is string else value | tojson }}"
GLM_TAGS = """\
{{- '\\n<tool_call>' + call.function.name }}
{% for key, value in call.function.arguments | items %}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}
</tool_call>"""
GLM_47_TAGS = (
    "{{- '<tool_call>' + call.function.name }}"
    "{%- for key, value in call.function.arguments | items %}"
    f"<arg_key>{{{{ key }}}}</arg_key><arg_value>{AS_TEXT}</arg_value>"
    "{%- endfor %}</tool_call>"
)
MINIMAX_TAGS = """\
{{- '<invoke name="' + call.function.name + '">\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter name="' + key + '">' }}
{{- value if value is string else value | tojson }}{{ '</parameter>\\n' }}
{%- endfor %}{{ '</invoke>\\n' }}"""
DSML_TAGS = """\
{{- '\\n<｜DSML｜invoke name="' + call.function.name + '">\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<｜DSML｜parameter name="' + key + '" string="' + (value is string) | string | lower + '">' }}
{{- value if value is string else value | tojson }}{{ '</｜DSML｜parameter>' }}
{%- if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}
{{- '\\n</｜DSML｜invoke>' }}"""
SEED_TAGS = """\
{{- '\\n<seed:tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>' + value | string + '</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</seed:tool_call>' }}"""
KEYWORDS = """\
{{- call.function.name }}(
{%- for key, value in call.function.arguments | items %}{{ key }}="{{ '%s' | format(value) }}"
{%- if not loop.last %}, {% endif %}{% endfor %})"""
JSON = "{{ call.function | tojson }}"
COMMA = "{% if not loop.last %}, {% endif %}"


def listed(begin: str, item: str, end: str) -> str:
    """A template that writes the calls of a message between two texts."""
    calls = f"{{%- for call in m.tool_calls %}}{item}{COMMA}{{% endfor %}}"
    return f"{HEAD}{PLAIN}{{%- if m.tool_calls %}}{begin}{calls}{end}{{% endif %}}{TAIL}"


def in_section(begin: str, call: str, end: str, separator: str = "") -> str:
    """A template that writes the calls of a message in a section."""
    behind = f"{{% if not loop.last %}}{{{{ '{separator}' }}}}{{% endif %}}"
    calls = f"{{%- for call in m.tool_calls %}}{call}{behind}{{%- endfor %}}"
    return f"{HEAD}{PLAIN}{{%- if m.tool_calls %}}{begin}{calls}{end}{{% endif %}}{TAIL}"


DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
TEMPLATES = {
    "deepseek_v3": in_section(
        DEEPSEEK[0],
        "{{ '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name"
        " + '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}",
        DEEPSEEK[1],
        "\\n",
    ),
    "deepseek_v31": in_section(
        DEEPSEEK[0],
        "{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>'"
        " + call.function.arguments + '<｜tool▁call▁end｜>' }}",
        DEEPSEEK[1],
    ),
    "kimi_k2": in_section(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
        "{{ call.function.arguments | tojson }}<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "deepseek_v32": in_section(
        "{{ '\\n\\n<｜DSML｜function_calls>' }}",
        DSML_TAGS,
        "{{ '\\n</｜DSML｜function_calls>' }}",
    ),
    "deepseek_v4": in_section(
        "{{ '\\n\\n<｜DSML｜tool_calls>' }}", DSML_TAGS, "{{ '\\n</｜DSML｜tool_calls>' }}"
    ),
    "glm": template(GLM_TAGS),
    "minimax_m2": in_section(
        "{{ '\\n<minimax:tool_call>\\n' }}", MINIMAX_TAGS, "</minimax:tool_call>"
    ),
    "hermes": template("{{ '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}"),
    "qwen3_coder": template(TAGS),
    "seed_oss": template(SEED_TAGS),
    "llama3": template(
        """{{- '{"name": "' + call.function.name + '", "parameters": ' }}"""
        """{{- call.function.arguments | tojson }}{{ '}' }}"""
    ),
    "function_tag": template(
        "{{- '<function=' + call.function.name + '>' }}"
        "{{- call.function.arguments | tojson }}</function>"
    ),
    "functionary": template(
        "{{- '>>>' + call.function.name + '\\n' + call.function.arguments }}",
        tail=TAIL.replace("'<|start|>assistant\\n'", "'<|start|>assistant\\n>>>'"),
    ),
    "mistral": listed("[TOOL_CALLS] [", JSON, "]"),
    "nemotron": listed("<TOOLCALL>[", JSON, "]</TOOLCALL>"),
    "xlam": listed("[", JSON, "]"),
    "pythonic": listed("[", KEYWORDS, "]"),
}
BARE_VALUES = """\
{{- call.function.name }}(
{%- for key in call.function.arguments %}
{{- key + '=' + '%s' | format(call.function.arguments[key]) }}
{%- if not loop.last %}, {% endif %}{% endfor %})"""
NO_COMMAS = """\
{{- call.function.name }}(
{%- for key, value in call.function.arguments | items %}{{ key }}={{ value | tojson }}
{%- endfor %})"""
LAST_USER = """\
{%- if m.role == 'user' and loop.last %}{{ 'Call functions.\\n\\n' }}{% endif %}"""
WRONG = {
    "values without quotes": ("pythonic", listed("[", BARE_VALUES, "]")),
    "a letter behind values": ("pythonic", listed("[", BARE_VALUES.replace("%s", "%sr"), "]")),
    "no commas": ("pythonic", listed("[", NO_COMMAS, "]")),
    "more in front of the last message": (
        "mistral",
        listed("[TOOL_CALLS] [", JSON, "]")
        .replace(PLAIN, LAST_USER + PLAIN)
        .replace("'<|start|>assistant\\n'", "''")
        .replace("'<|start|>' + m.role + '\\n'", "'[INST] ' if m.role == 'user' else ''")
        .replace("'<|end|>\\n'", "'[/INST]' if m.role == 'user' else '<|end|>'"),
    ),
}
"""Families of templates that do not write calls as their models do, or prompts as histories."""
OTHERS = {
    "deepseek": template(
        "{{- '<|tool_call|>' + call.function.name + '<|sep|>' + call.function.arguments }}"
    ),
    "a marker of another family": template("{{- '<|tool|>' + call.function | tojson }}"),
    "its calls are explained, but not written": HEAD + PLAIN + TAIL + "{# <tool_call> #}",
    "python": template("{{ call.function }}"),
}

"""What a chat template may do, however it is written, is bounded."""

from __future__ import annotations

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.text import rendering_budget
from gateway.text.chat_template import ChatTemplate
from gateway.text.rendering_budget import CURRENT, Budget, BudgetExceeded
from gateway.text.template_sandbox import BudgetedEnvironment
from protocol.errors import InvalidRequest, ModelLoadError

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
LOOP = "{% set ns = namespace(s='x') %}{% for i in range(60) %}BODY{% endfor %}{{ ns.s }}"

NESTED = (
    "{% set ns = namespace(s=['x']) %}"
    "{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"
)

BOMBS = {
    "ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "recursive loop": "{% for i in [4] recursive %}{% if i < 60 %}{{ loop([i+1]) }}"
    "{{ loop([i+1]) }}{% endif %}{% endfor %}",
    "product": "{{ 'x' * 10**9 }}",
    "product of a list": "{{ ([1] * 10**9) | length }}",
    "doubled": LOOP.replace("BODY", "{% set ns.s = ns.s + ns.s %}"),
    "doubled by ~": LOOP.replace("BODY", "{% set ns.s = ns.s ~ ns.s %}"),
    "doubled in a block": LOOP.replace(
        "BODY", "{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}"
    ),
    "doubled by join": LOOP.replace("BODY", "{% set ns.s = [ns.s, ns.s] | join %}"),
    "doubled by format": LOOP.replace("BODY", "{% set ns.s = '{}{}'.format(ns.s, ns.s) %}"),
    "doubled by %": LOOP.replace("BODY", "{% set ns.s = '%s%s' % (ns.s, ns.s) %}"),
    "join with a long separator": "{{ range(9000) | join('x' * 100000) | length }}",
    "join of a text's letters": "{{ ('x' * 100000).join('a' * 10000) | length }}",
    "join of an iterator": "{{ range(9000) | map('string') | join('x' * 100000) | length }}",
    "join of lists": "{% set l = ['x' * 1000] * 1000 %}{{ ([l] * 9000) | join | length }}",
    "nested list written": NESTED + "{{ ns.s }}",
    "nested list as text": NESTED + "{{ ns.s | string | length }}",
    "nested list joined by ~": NESTED + "{{ (ns.s ~ '') | length }}",
    "nested list formatted": NESTED + "{{ '{}'.format(ns.s) | length }}",
    "nested list by %": NESTED + "{{ ('%s' % [ns.s]) | length }}",
    "nested list as JSON": NESTED + "{{ ns.s | tojson | length }}",
    "nested list in a namespace": NESTED + "{{ ns }}",
    "list of a long text written": "{% set s = 'x' * 1000000 %}{% for i in range(90) %}"
    "{% set t %}{{ [s] }}{% endset %}{% endfor %}",
    "nested list compared": NESTED + "{% set a = ns.s %}" + NESTED + "{{ ns.s == a }}",
    "nested list searched for": NESTED + "{% set a = [ns.s] %}" + NESTED + "{{ ns.s in a }}",
    "nested list as a key": NESTED.replace("[", "(").replace("]", ",)") + "{{ {ns.s: 1} }}",
    "sum of lists": "{{ ([[1] * 1000] * 9000) | sum(start=[]) | length }}",
    "sum of lists by place": "{{ ([[1] * 1000] * 9000) | sum(none, []) | length }}",
    "translate": "{{ 'x'.translate({120: 'y' * 100000}) | length }}",
    "expandtabs": "{{ 'x'.expandtabs(99999) }}",
    "pprint": "{{ messages | pprint }}",
    "format many times": "{{ ('{0}' * 10000).format('x' * 100000) | length }}",
    "percent many times": "{{ ('%(a)s' * 10000) | format(a='x' * 100000) | length }}",
    "replace by name": "{{ ('x' * 10000) | replace(old='x', new='y' * 10000) | length }}",
    "indent by a text": "{{ ('y\n' * 10000) | indent('x' * 10000) | length }}",
    "separators of JSON": "{{ ([1] * 9000) | tojson(separators=['x' * 100000, ':']) | length }}",
    "doubled lists": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}"
    "{% set ns.s = (ns.s | list) + (ns.s | list) %}{% endfor %}",
    "read again and again": "{% set s = 'x' * 1000000 %}{% for i in range(9000) %}"
    "{% set z = s.count('y') %}{% endfor %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "power of powers": "{% set ns = namespace(s=9) %}{% for i in range(60) %}"
    "{% set ns.s = ns.s * ns.s %}{% endfor %}",
    "center": "{{ 'x' | center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "indent": "{{ messages | tojson(indent=1000000000) }}",
    "percent": "{{ '%999999999d' % 1 }}",
    "star": "{{ '%*d' % (999999999, 1) }}",
    "format": "{{ '{:999999999}'.format(1) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "replace": "{{ ('x' * 1000000) | replace('x', 'y' * 100000) }}",
    "replace method": "{{ ('x' * 1000000).replace('x', 'y' * 100000) }}",
    "literal text": "{% for i in range(99999) %}{% set t %}"
    + "x" * 9999
    + "{% endset %}{% endfor %}",
    "literal text of a macro": "{% macro m() %}" + "x" * 99999 + "{% endmacro %}"
    "{% for i in range(9999) %}{% set t = m() %}{% endfor %}",
}  # fmt: skip


@pytest.fixture
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering_budget, "MAX_STEPS", 10_000)
    monkeypatch.setattr(rendering_budget, "MAX_CHARS", 10_000_000)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused(small_budget: None, bomb: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template") as raised:
        ChatTemplate(BOMBS[bomb], {}).render(MESSAGES)
    assert isinstance(raised.value.__cause__, BudgetExceeded)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self._TemplateReference__context.x }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ lipsum() }}",
        "{% include 'x' %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages | map(attribute='__class__') | list }}{{ undefined.x }}",
        "{{ 1 / 0 }}",
        "{{ raise_exception('a') }}",
    ],
)
def test_a_way_out_of_the_sandbox_is_closed(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        ChatTemplate(source, {}).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    ["{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}", "{% if 1 %}" * 300 + "{% endif %}" * 300,
     "{% for %}", "{{ 1 +", "{{ 1 | nofilter }}"],
)  # fmt: skip
def test_what_cannot_be_compiled_is_an_error_of_the_checkpoint(source: str) -> None:
    with pytest.raises(ModelLoadError, match="cannot be compiled"):
        ChatTemplate(source, {})


def test_loops_see_what_they_would_see_without_a_budget() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}"
        "{{ loop.previtem is defined }}{{ loop.nextitem is defined }};{% endfor %}"
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
        "{% for k, v in messages[0].items() %}{{ k }}{% endfor %}"
        "{% for m in [] %}{% else %}0{% endfor %}"
        "{% for x in [1, [2]] recursive %}{% if x is number %}{{ x }}{% else %}{{ loop(x) }}"
        "{% endif %}{% endfor %}{{ 'a' ~ 1 ~ none }}{{ messages[0].role + '!' }}{{ [1] + [2] }}"
        "{{ 'ab' * 2 }}"
    )
    expected = "1/2TrueFalseFalseTrue;2/2FalseTrueTrueFalse;hirolecontent012a1Noneuser![1, 2]abab"
    assert ChatTemplate(source, {}).render(MESSAGES) == expected


def test_a_budget_is_for_one_rendering(small_budget: None) -> None:
    template = ChatTemplate("{% for i in range(9000) %}{% endfor %}{{ messages[0].content }}", {})
    assert [template.render(MESSAGES) for _ in range(3)] == ["hi"] * 3


def test_the_largest_conversation_fits() -> None:
    """As many messages as a body may have, with a template of three steps for each."""
    source = (
        "{% for m in messages %}{% for p in [m.content] %}{{ p.strip() }}{% endfor %}{% endfor %}"
    )
    text = ChatTemplate(source, {}).render([{"role": "user", "content": " x" * 500}] * 16_384)
    assert len(text) == 16_384 * 999


@pytest.mark.parametrize(
    "expression",
    [
        "m.role", "m['role']", "m.name", "m['name']", "m.name is defined", "m['name'] is none",
        "m.get('role')", "m['get'] is defined", "m.items() | list", "m['items']",
        "m.keys is defined",
        "m['keys'] is defined", "m.__class__ is defined", "m['__class__'] is defined", "m[0]",
        "m.inner.deep", "m['inner']['none'] is defined", "m.inner.none", "'a'.upper()", "x[1]",
        "x.append is defined", "m.update({})", "m.clear is defined", "m[['role']]",
    ],
)  # fmt: skip
def test_fields_are_found_as_in_the_sandbox(expression: str) -> None:
    message = {"role": "user", "items": ["own"], "inner": {"deep": 1}}

    def found(environment: jinja2.Environment) -> str:
        token = CURRENT.set(Budget())
        try:
            template = environment.from_string("{{ " + expression + " }}")
            return template.render(m=dict(message), x=[1, 2])
        except (jinja2.TemplateError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            CURRENT.reset(token)

    assert found(BudgetedEnvironment()) == found(ImmutableSandboxedEnvironment())

"""JSON schemas as clients write them, made into schemas that llguidance can enforce.

Annotations are removed. Keywords with an equal form are translated. Those that cannot be enforced
are weakened or dropped, and reported by their place; a strict schema is refused instead. A changed
schema accepts at least every value that the schema accepts, so dropping one constraint affects no
other. Only the objects of a strict schema are closed to properties that it does not list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from llguidance import LLMatcher

from gateway.grammars.closed_schemas import closed, has_intersections
from gateway.grammars.finite_schemas import can_end
from gateway.grammars.grammar import json_schema_grammar, with_integers
from gateway.grammars.grammar_checker import too_hard
from gateway.grammars.patterns import (
    BUILT_IN,
    NOT_ENFORCED,
    can_follow,
    enforceable_pattern,
    format_schemas,
)
from gateway.grammars.schema_numbers import (
    MAX_COUNT,
    place_of_huge_number,
    without_idle_limits,
    wrong_count,
)
from protocol.errors import InvalidRequest

Schema = dict[str, Any] | bool

MAX_REPORTED = 64
MAX_COMPARED = 32
"""The most lists of alternatives that are compiled to see whether they can be told apart."""
MAX_DEPENDENCIES = 4
"""The most dependent properties of an object: each doubles its alternatives."""
_IN_SCHEMA = frozenset(
    (
        "additionalProperties", "items", "additionalItems", "propertyNames", "unevaluatedItems",
        "unevaluatedProperties",
    )
)  # fmt: skip
_IN_OBJECT = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_IN_LIST = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_APPLICATORS = frozenset(
    ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas", "not")
)
_TYPES = ("null", "boolean", "string", "number", "array", "object")
_ANNOTATIONS = frozenset(("title", "description", "$comment", "examples", "deprecated"))
_UNREADABLE = ("regex parse error", "nvalid regex", "lookarounds not supported")
"""What llguidance says of a pattern that it cannot follow."""
_COUNTED = "min/maxProperties only supported"
"""What llguidance says of a count of properties, some of which are optional."""
_RANGES = ("regex for float range", "regex for integer range", "nested parentheses")
"""What llguidance says of a bound with too many digits."""
_UNIMPLEMENTED = re.compile(r'"([^"]+)"')


class SchemaReader:
    """Reads one schema. `grammar` allows exactly one JSON value, by the parts of the schema that
    can be enforced. `dropped` names the other parts: the field `param`, then the place in the
    schema as a JSON pointer. Reading is slow: not for the event loop."""

    def __init__(self, schema: Schema, param: str, strict: bool) -> None:
        """Raises InvalidRequest for a schema that nests too deeply or that no finite value follows,
        for numbers out of range, or for a strict schema that cannot be enforced."""
        self._param = param
        self._strict = strict
        self._dropped: dict[str, None] = {}
        self._without: set[str] = set()
        self._num_compared = 0
        self._doubts_patterns = False  # llguidance has refused one of them
        trouble = too_hard(schema)
        if trouble:
            raise InvalidRequest(f"'{param}' {trouble}", param)
        huge = place_of_huge_number(schema)
        if huge is not None:
            raise InvalidRequest(
                f"'{param}': the number at '#{huge}' is out of range: larger than 1.7e308", param
            )
        self._closes = strict and not has_intersections(schema)
        self._source: Schema = with_integers(schema)  # with its definitions
        self.schema = self._read(self._source)
        self.grammar = json_schema_grammar(self.schema)

    def _read(self, schema: Schema) -> Schema:
        try:
            adapted: Schema = self._adapted(schema, "")
            is_finite = can_end(adapted)
        except RecursionError as error:
            raise InvalidRequest(f"'{self._param}' nests too deeply", self._param) from error
        if not is_finite:
            raise InvalidRequest(
                f"'{self._param}': this schema requires itself, so no finite value satisfies it",
                self._param,
            )
        return adapted

    @property
    def dropped(self) -> list[str]:
        """The parts of the schema that are not enforced."""
        return [f"{self._param}{place}" for place in self._dropped]

    def try_weaken(self, trouble: str) -> bool:
        """Drop the part that llguidance says it cannot enforce; False if there is none."""
        before = len(self._without), self._doubts_patterns
        if "Unimplemented keys" in trouble:
            listed = trouble.partition("Unimplemented keys")[2].partition("]")[0]
            self._without.update(_UNIMPLEMENTED.findall(listed))
            self._without -= {"$dynamicRef", "$recursiveRef"}
        elif "are not disjoint" in trouble:
            self._without.add("patternProperties")
        elif not self._doubts_patterns and any(each in trouble for each in _UNREADABLE):
            self._doubts_patterns = True
        elif "oneOf constraints" in trouble:
            self._without.add("oneOf")
        elif _COUNTED in trouble:
            self._without.update(("minProperties", "maxProperties"))
        elif "determine if regex is empty" in trouble:
            self._without.update(("minLength", "maxLength"))
        elif "too many digits" in trouble:
            self._without.add("multipleOf")
        elif any(each in trouble for each in _RANGES):
            self._without.update(_BOUNDS)
        if (len(self._without), self._doubts_patterns) == before:
            return False
        self.schema = self._read(self._source)
        self.grammar = json_schema_grammar(self.schema)
        return True

    # -- one schema -----------------------------------------------------------------------------

    def _adapted(self, schema: Any, path: str) -> Any:
        """A subschema, adapted. A value that is not a schema stays: llguidance explains what is
        wrong with it."""
        if not isinstance(schema, dict):
            return schema
        own = without_idle_limits(schema)
        self._check_counts(own, path)
        made = {key: self._inner(key, value, path) for key, value in own.items()}
        for key in self._without & made.keys():
            self._weaken(made, key, path)
        names = made.get("patternProperties")
        if isinstance(names, dict) and not all(map(self._can_follow, names)):
            self._weaken(made, "patternProperties", path)
        for adapt in _STEPS:
            adapt(self, made, path)
        return _with_null(closed(made) if self._closes else made)

    def _check_counts(self, schema: dict[str, Any], path: str) -> None:
        key = wrong_count(schema)
        if key is not None:
            raise InvalidRequest(
                f"'{self._param}': '{key}' at '#{path}' must be an integer from 0 to {MAX_COUNT}",
                self._param,
            )

    def _inner(self, key: str, value: Any, path: str) -> Any:
        here = f"{path}/{key}"
        if key in _IN_LIST and isinstance(value, list):
            return [self._adapted(each, f"{here}/{place}") for place, each in enumerate(value)]
        if key in _IN_SCHEMA:
            return self._adapted(value, here)
        if key in _IN_OBJECT and isinstance(value, dict):
            return {name: self._adapted(each, f"{here}/{name}") for name, each in value.items()}
        if key in ("dependentSchemas", "dependencies") and isinstance(value, dict):
            return {
                name: each if isinstance(each, list) else self._adapted(each, f"{here}/{name}")
                for name, each in value.items()
            }
        return value

    def _weaken(self, schema: dict[str, Any], key: str, path: str) -> None:
        value = schema.pop(key)
        if key == "oneOf" and isinstance(value, list):
            _and_any_of(schema, value)
        if key == "patternProperties" and schema.get("additionalProperties", True) is not True:
            schema["additionalProperties"] = True
            self._drop("additionalProperties", path)
        self._drop(key, path)

    def _drop(self, key: str, path: str) -> None:
        """Report a part that is not enforced. Raises InvalidRequest for a strict schema."""
        if self._strict:
            raise InvalidRequest(
                f"'{self._param}': '{key}' at '#{path}' cannot be enforced; without 'strict' it "
                "is left out",
                self._param,
            )
        if len(self._dropped) < MAX_REPORTED:
            self._dropped[f"{path}/{key}"] = None

    # -- keywords, in the order in which they are adapted -----------------------------------------

    def _format(self, schema: dict[str, Any], path: str) -> None:
        name = schema.get("format")
        if isinstance(name, str) and name in BUILT_IN:
            return
        schema.pop("format", None)
        if not isinstance(name, str) or not _may_be_text(schema):
            return
        if name in NOT_ENFORCED:
            self._drop("format", path)
        _and_all_of(schema, format_schemas(name))

    def _pattern(self, schema: dict[str, Any], path: str) -> None:
        pattern = schema.get("pattern")
        if not isinstance(pattern, str):
            return
        wanted, is_equal = enforceable_pattern(pattern)
        patterns = list(filter(self._can_follow, wanted))
        if not is_equal or patterns != wanted:
            self._drop("pattern", path)
        schema.pop("pattern")
        if patterns:
            schema["pattern"] = patterns[0]
            _and_all_of(schema, [{"pattern": each} for each in patterns[1:]])

    def _can_follow(self, pattern: str) -> bool:
        """Whether llguidance can follow a pattern; not asked until it has refused one, because most
        schemas have none of that kind."""
        return not self._doubts_patterns or can_follow(pattern)

    def _unique_items(self, schema: dict[str, Any], path: str) -> None:
        if schema.pop("uniqueItems", False) and schema.get("maxItems", 2) not in (0, 1):
            self._drop("uniqueItems", path)

    def _property_names(self, schema: dict[str, Any], path: str) -> None:
        if "propertyNames" not in schema:
            return
        names = schema.pop("propertyNames")
        if names is False:
            _and_all_of(schema, [{"maxProperties": 0}])
            return
        asked = names.keys() - _ANNOTATIONS if isinstance(names, dict) else set()
        if names is True or not asked or (asked == {"type"} and names["type"] == "string"):
            return
        pattern = names.get("pattern") if asked <= {"type", "pattern"} else None
        if asked <= {"type", "enum"} and isinstance(names.get("enum"), list):
            texts = [re.escape(each) for each in names["enum"] if isinstance(each, str)]
            pattern = f"^({'|'.join(texts)})$" if texts else None
        if pattern is None or "properties" in schema or "patternProperties" in schema:
            self._drop("propertyNames", path)
            return
        patterns, is_equal = enforceable_pattern(pattern)
        if len(patterns) != 1 or not is_equal:
            self._drop("propertyNames", path)
            return
        schema["patternProperties"] = {patterns[0]: schema.get("additionalProperties", True)}
        schema["additionalProperties"] = False

    def _contains(self, schema: dict[str, Any], path: str) -> None:
        least, most = schema.pop("minContains", 1), schema.pop("maxContains", None)
        if schema.pop("contains", None) is not None and (least != 0 or most is not None):
            self._drop("contains", path)

    def _unevaluated(self, schema: dict[str, Any], path: str) -> None:
        for key, plain in (
            ("unevaluatedProperties", "additionalProperties"),
            ("unevaluatedItems", "items"),
        ):
            if key not in schema:
                continue
            value = schema.pop(key)
            if value is True or plain in schema:
                continue  # the other keyword covers this, or everything is evaluated
            if _APPLICATORS & schema.keys() or "contains" in schema:
                self._drop(key, path)
            else:
                schema[plain] = value

    def _conditions(self, schema: dict[str, Any], path: str) -> None:
        has_branch = "then" in schema or "else" in schema
        if "if" in schema and has_branch:
            self._drop("if", path)
        for key in ("if", "then", "else"):
            schema.pop(key, None)

    def _not(self, schema: dict[str, Any], path: str) -> None:
        if "not" not in schema:
            return
        denied = schema.pop("not")
        if denied is False:
            return
        if denied is True or denied == {}:
            _and_all_of(schema, [False])
            return
        types = denied.get("type") if isinstance(denied, dict) else None
        types = [types] if isinstance(types, str) else types
        if (
            isinstance(types, list)
            and denied.keys() - _ANNOTATIONS == {"type"}
            and all(each in _TYPES for each in types)
        ):
            _and_all_of(schema, [{"type": [each for each in _TYPES if each not in types]}])
        else:
            self._drop("not", path)

    def _dependencies(self, schema: dict[str, Any], path: str) -> None:
        """A property that needs others: either it is absent or they are present."""
        alternatives: list[Any] = []
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            needs = schema.pop(key, None)
            if not isinstance(needs, dict):
                continue
            if len(needs) > MAX_DEPENDENCIES:
                self._drop(key, path)
                continue
            for name, needed in needs.items():
                met = {"required": needed} if isinstance(needed, list) else needed
                if met not in (True, {}, {"required": []}):
                    alternatives.append({"anyOf": [{"properties": {name: False}}, met]})
        _and_all_of(schema, alternatives)

    def _one_of(self, schema: dict[str, Any], path: str) -> None:
        """Alternatives that llguidance cannot tell apart may be followed together."""
        branches = schema.get("oneOf")
        if not isinstance(branches, list):
            return
        self._num_compared += 1
        if self._num_compared <= MAX_COMPARED and _are_apart(branches, self._source):
            return
        del schema["oneOf"]
        _and_any_of(schema, branches)
        self._drop("oneOf", path)


_STEPS: tuple[Callable[[SchemaReader, dict[str, Any], str], None], ...] = (
    SchemaReader._format,
    SchemaReader._pattern,
    SchemaReader._unique_items,
    SchemaReader._property_names,
    SchemaReader._unevaluated,
    SchemaReader._contains,
    SchemaReader._conditions,
    SchemaReader._not,
    SchemaReader._dependencies,
    SchemaReader._one_of,
)


def _may_be_text(schema: dict[str, Any]) -> bool:
    """Whether the schema's types, if it names any, include texts."""
    types = schema.get("type", "string")
    return types == "string" or (isinstance(types, list) and "string" in types)


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI's `nullable` in the standard's terms."""
    if schema.pop("nullable", False) is not True:
        return schema
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    plain = not _APPLICATORS & schema.keys() and "const" not in schema
    if isinstance(types, list) and plain:
        enum = schema.get("enum")
        wider = {"enum": [*enum, None]} if isinstance(enum, list) and None not in enum else {}
        return schema | {"type": [*types, *({"null"} - set(types))]} | wider
    if types is None and plain and "enum" not in schema:
        return schema  # null is allowed already
    kept = {key: schema.pop(key) for key in ("$defs", "definitions", "$id") if key in schema}
    return kept | {"anyOf": [schema, {"type": "null"}]}


def _and_all_of(schema: dict[str, Any], more: Iterable[Any]) -> None:
    """The schema and all of these."""
    added = list(more)
    if added:
        earlier = schema.get("allOf", [])
        schema["allOf"] = [*(earlier if isinstance(earlier, list) else [earlier]), *added]


def _and_any_of(schema: dict[str, Any], branches: list[Any]) -> None:
    """The schema and one of these."""
    if "anyOf" in schema:
        _and_all_of(schema, [{"anyOf": branches}])
    else:
        schema["anyOf"] = branches


def _are_apart(branches: list[Any], root: Schema) -> bool:
    """Whether llguidance knows that no value follows two of the branches."""
    shared = {}
    if isinstance(root, dict):
        shared = {key: root[key] for key in ("$defs", "definitions", "$id") if key in root}
    trouble = LLMatcher.validate_grammar(json_schema_grammar(shared | {"oneOf": branches}))
    return not trouble

"""The text that the bundled demo model learns from.

Owns the reading of Python's own help topics (`pydoc_data.topics`), their cutting into blocks and
answers, and the chats made from them. It knows neither tokens nor tensors.
Invariants: everything random comes from the generator passed in; an answer is an excerpt of the
(unwrapped) help text without headings and grammar, or one of the few fixed sentences below.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pydoc_data.topics import topics as PYDOC_TOPICS

Message = dict[str, str]

_FILLED_CHARS = 62  # Sphinx fills lines to 70; a reference it will not break may leave a gap
_PAGE_CHARS = 420  # an answer takes whole blocks until it is at least this long
_UNDERLINE = re.compile(r"\s*([*=~^\"'-])\1{2,}\s*$")
_NOT_AN_ANSWER = re.compile(r"\s*(New in|Changed in|\*\*Source code|-\[)")

# What people call each topic. Backticks mark Python words; a chat quotes them in several ways.
TOPIC_NAMES: Mapping[str, str] = {
    "assert": "the `assert` statement|`assert`|assertions|assert statements",
    "assignment": "assignment statements|assignment|assignments|the assignment statement",
    "async": "coroutines|`async`|`async def`|async functions|asynchronous programming",
    "atom-identifiers": "private names|name mangling|identifiers as atoms",
    "atom-literals": "literals|literal values|literals as atoms",
    "attribute-access": "attribute access|customizing attribute access|`__getattr__`|descriptors",
    "attribute-references": "attribute references|an attribute reference",
    "augassign": "augmented assignment|augmented assignment statements|`+=`",
    "await": "`await`|the await expression|await expressions",
    "binary": "binary arithmetic operations|arithmetic operators|multiplication|`*`",
    "bitwise": "bitwise operations|bitwise operators|`&`|binary bitwise operations",
    "bltin-code-objects": "code objects|a code object",
    "bltin-ellipsis-object": "the ellipsis object|`Ellipsis`|the ellipsis",
    "bltin-null-object": "the null object|`None`|the None object",
    "bltin-type-objects": "type objects|the `type()` function",
    "booleans": "boolean operations|booleans|`and`|`or`|`not`|boolean operators",
    "break": "the `break` statement|`break`|break statements",
    "callable-types": "callable objects|`__call__`|emulating callable objects|callables",
    "calls": "calls|function calls|calling a function|a call",
    "class": "class definitions|classes|the `class` statement|a class|`class`",
    "comparisons": "comparisons|comparison operators|`==`|comparing values",
    "compound": "compound statements|a compound statement",
    "context-managers": "context managers|a context manager|`__enter__` and `__exit__`",
    "continue": "the `continue` statement|`continue`|continue statements",
    "conversions": "arithmetic conversions|conversions|numeric conversions",
    "customization": "basic customization|`__init__`|`__new__`|object creation",
    "debugger": "the debugger|`pdb`|the Python debugger|debugging",
    "del": "the `del` statement|`del`|del statements|deleting a name",
    "dict": "dictionary displays|dict comprehensions|a dict display",
    "dynamic-features": "dynamic features|free variables|interaction with dynamic features",
    "else": "the `else` clause|`else`|`elif`",
    "exceptions": "exceptions|an exception|error handling|exception handling",
    "execmodel": "the execution model|the structure of a program|code blocks",
    "exprlists": "expression lists|an expression list",
    "floating": "floating point literals|floating point numbers|floats|a float",
    "for": "the `for` statement|`for`|for loops|a for loop|the for loop",
    "formatstrings": "format strings|`str.format()`|string formatting|format string syntax",
    "function": "function definitions|functions|`def`|a function|defining a function",
    "global": "the `global` statement|`global`|global variables",
    "id-classes": "reserved identifiers|reserved classes of identifiers|underscore names",
    "identifiers": "identifiers|identifiers and keywords|keywords|variable names",
    "if": "the `if` statement|`if`|if statements|conditions",
    "imaginary": "imaginary literals|imaginary numbers|complex literals",
    "import": "the `import` statement|`import`|imports|import statements|importing modules",
    "in": "membership tests|`in`|the `in` operator|membership test operations",
    "integers": "integer literals|integers|an integer literal|hexadecimal numbers",
    "lambda": "lambdas|`lambda`|a lambda|lambda expressions|lambda functions|a lambda expression",
    "lists": "list displays|lists|list comprehensions|a list",
    "naming": "naming and binding|scopes|name binding|namespaces|name resolution",
    "nonlocal": "the `nonlocal` statement|`nonlocal`|nonlocal variables",
    "numbers": "numeric literals|numbers|number literals",
    "numeric-types": "numeric types|emulating numeric types|`__add__`|operator overloading",
    "objects": "objects|objects, values and types|values and types|object identity",
    "operator-summary": "operator precedence|operators|the operator summary",
    "pass": "the `pass` statement|`pass`|pass statements",
    "power": "the power operator|`**`|exponentiation|powers",
    "raise": "the `raise` statement|`raise`|raising an exception|raising exceptions",
    "return": "the `return` statement|`return`|return values|return statements",
    "sequence-types": "emulating container types|`__getitem__`|container types|`__len__`",
    "shifting": "shifting operations|shifts|`<<`|the shift operators",
    "slicings": "slicings|slicing|slices|list slicing|a slice",
    "specialattrs": "special attributes|`__dict__`|`__name__`",
    "specialnames": "special method names|special methods|magic methods|dunder methods",
    "string-methods": "string methods|`str.split()`|methods of strings",
    "strings": "string literals|strings|bytes literals|a string|f-strings",
    "subscriptions": "subscriptions|subscription|indexing|a subscription",
    "truth": "truth value testing|truth values|truthiness|`bool`",
    "try": "the `try` statement|`try`|`except`|`finally`|try and except",
    "types": "the standard type hierarchy|types|built-in types|the type hierarchy",
    "typesfunctions": "function objects|a function object",
    "typesmapping": "dictionaries|`dict`|mapping types|a dictionary|dicts",
    "typesmethods": "methods|method objects|bound methods|a method",
    "typesmodules": "modules|module objects|a module",
    "typesseq": "sequence types|sequences|tuples|ranges|`range`|a tuple",
    "typesseq-mutable": "mutable sequence types|mutable sequences|`append`|list methods",
    "unary": "unary operations|unary arithmetic|the unary operators|negation",
    "while": "the `while` statement|`while`|while loops|a while loop|the while loop",
    "with": "the `with` statement|`with`|with statements|a with statement",
    "yield": "the `yield` statement|`yield`|generators|yield expressions|a generator",
}

_QUESTIONS = (
    "Explain {}.", "Explain {}.", "What is {}?", "What is {}?", "What are {}?",
    "Tell me about {}.", "How does {} work?", "How do {} work?", "Help me with {}.",
    "Can you explain {}?", "Describe {}.", "How do I use {}?", "Please explain {}.",
    "I want to learn about {}.", "What can you tell me about {}?", "{}", "help({})",
    "What does {} do?", "Give me an introduction to {}.", "When should I use {}?",
)  # fmt: skip
_MORE = ("Tell me more.", "Tell me more", "Go on.", "Continue.", "More, please.", "And then?",
         "What else?", "Please go on.")  # fmt: skip
_SYSTEMS = ("You are a helpful assistant.", "You are a helpful assistant.",
            "You are Baton's demo assistant.", "Answer questions about Python.",
            "You are a patient Python teacher. Answer briefly.")  # fmt: skip

_ABOUT_ME = (
    "I am Baton's demo model, a very small language model that has read nothing but Python's own "
    "help topics. Ask me about one of them: the with statement, lambdas, exceptions, comparisons, "
    "string literals, or the execution model."
)
_OFF_TOPIC = (
    "I am only a small demo model and know nothing but Python's help topics. Ask me about one of "
    "them: the with statement, lambdas, exceptions, comparisons, string literals, or the "
    "execution model."
)
_THE_END = "That is all I know about it."
_SMALL_TALK: Mapping[str, str] = {
    "Hello": _ABOUT_ME, "Hello!": _ABOUT_ME, "Hi": _ABOUT_ME, "Hi!": _ABOUT_ME,
    "Hi there": _ABOUT_ME, "Hello, how are you?": _ABOUT_ME, "Who are you?": _ABOUT_ME,
    "What are you?": _ABOUT_ME, "What can you do?": _ABOUT_ME, "Help": _ABOUT_ME,
    "What do you know?": _ABOUT_ME, "What is Baton?": _ABOUT_ME, "Introduce yourself.": _ABOUT_ME,
    "Thanks!": "You are welcome.", "Thank you.": "You are welcome.", "Bye": "Goodbye.",
    "What is the capital of France?": _OFF_TOPIC, "Tell me a joke.": _OFF_TOPIC,
    "Write a poem about the sea.": _OFF_TOPIC, "Who won the world cup?": _OFF_TOPIC,
    "What is the weather like today?": _OFF_TOPIC, "Translate this into German.": _OFF_TOPIC,
    "How do I bake bread?": _OFF_TOPIC, "Who was Albert Einstein?": _OFF_TOPIC,
    "What is 2 + 2?": _OFF_TOPIC, "Tell me a story.": _OFF_TOPIC,
}  # fmt: skip


@dataclass(frozen=True)
class Topic:
    """One help topic: its whole text, its names, and its prose cut into answers."""

    key: str
    text: str
    names: tuple[str, ...]
    answers: tuple[str, ...]


def load_topics() -> list[Topic]:
    """Every help topic of the running Python, in the order of their keys."""
    loaded = []
    for key, raw in sorted(PYDOC_TOPICS.items()):
        blocks = [unwrap(block) for block in re.split(r"\n\s*\n", raw.strip("\n"))]
        names = tuple(TOPIC_NAMES.get(key, f"`{key}`").split("|"))
        loaded.append(Topic(key, "\n\n".join(blocks) + "\n", names, tuple(_answers(blocks))))
    return loaded


def chats(topics: list[Topic], rng: random.Random) -> Iterator[list[Message]]:
    """Chats without end: mostly one topic over one to three turns, some small talk."""
    while True:
        messages: list[Message] = []
        if rng.random() < 0.4:
            messages.append(_message("system", _system(topics, rng)))
        if rng.random() < 0.12:
            question, answer = rng.choice(list(_SMALL_TALK.items()))
            messages += [_message("user", question), _message("assistant", answer)]
        if len(messages) < 2 or rng.random() < 0.3:
            messages += _topic_turns(rng.choice(topics), rng)
        yield messages


def unwrap(block: str) -> str:
    """Join the lines of a filled paragraph; leave code, tables, grammar and headings alone.

    A block is a filled paragraph if no line could have taken the first word of the next one.
    """
    lines = block.split("\n")
    if "::=" in block or any(map(_UNDERLINE.match, lines)):
        return block
    joined = lines[0]
    for line, following in pairwise(lines):
        word = re.match(r"\s*([^\s-]*-*)", following)
        assert word is not None  # the pattern matches the empty string
        glue = "" if re.search(r"\w-$", line) else " "
        if len(line + glue + word.group(1)) <= _FILLED_CHARS:
            return block
        joined += glue + following.strip()
    return joined


def _answers(blocks: list[str]) -> list[str]:
    """Cut a topic's blocks into answers of a few paragraphs, without headings and grammar."""
    answers: list[str] = []
    page: list[str] = []
    for block in blocks:
        is_heading = any(map(_UNDERLINE.match, block.split("\n")))
        if is_heading or "::=" in block or _NOT_AN_ANSWER.match(block):
            if page:  # the paragraph introduced something that is not shown
                page[-1] = re.sub(r":$", ".", page[-1])
            continue
        page.append(block if page else block.lstrip())
        if sum(map(len, page)) >= _PAGE_CHARS and not block.endswith(":"):
            answers.append("\n\n".join(page))
            page = []
    if page:
        answers.append("\n\n".join(page))
    return answers


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _system(topics: list[Topic], rng: random.Random) -> str:
    """A system prompt: a sentence, now and then followed by a long excerpt of the help text."""
    sentence = rng.choice(_SYSTEMS)
    if rng.random() > 0.08:
        return sentence
    text = rng.choice(topics).text
    return f"{sentence}\n\n{text[: rng.randint(500, 5000)]}"


def _topic_turns(topic: Topic, rng: random.Random) -> list[Message]:
    """A question about the topic, its first answer, and up to two times "tell me more"."""
    turns = [_message("user", _question(topic, rng)), _message("assistant", topic.answers[0])]
    for page in range(1, rng.choice((1, 1, 2, 3))):
        turns.append(_message("user", rng.choice(_MORE)))
        known = page < len(topic.answers)
        turns.append(_message("assistant", topic.answers[page] if known else _THE_END))
        if not known:
            break
    return turns


def _question(topic: Topic, rng: random.Random) -> str:
    quote = rng.choice(("`", "`", "", "", '"', "'"))
    name = rng.choice(topic.names).replace("`", quote)
    if rng.random() < 0.15:
        name += " in Python"
    question = rng.choice(_QUESTIONS).format(name)
    if rng.random() < 0.15:
        question = question.rstrip(".?")
    return question.lower() if rng.random() < 0.1 else question

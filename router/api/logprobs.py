"""Log-probabilities of reported tokens in the two shapes of OpenAI's API.

A token that is not whole characters by itself is written `bytes:\\xe2\\x80`, as OpenAI does.
JSON has no infinity: what a filter made impossible is reported as -9999.
"""

from __future__ import annotations

from router.api.responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from router.output import OutputToken
from router.tokenizer import Tokenizer

LOWEST = -9999.0


def completion_logprobs(tokens: list[OutputToken], tokenizer: Tokenizer) -> CompletionLogprobs:
    """Lists by position; the alternatives always include the chosen token."""
    return CompletionLogprobs(
        tokens=[_token_text(tokenizer.token_bytes(token.token_id)) for token in tokens],
        token_logprobs=[max(LOWEST, token.logprobs.logprob) for token in tokens],
        top_logprobs=[_alternatives(token, tokenizer) for token in tokens],
        text_offset=[token.start for token in tokens],
    )


def chat_logprobs(tokens: list[OutputToken], tokenizer: Tokenizer) -> ChatLogprobs:
    """One entry a token, each with as many alternatives as were asked for."""
    entries: list[ChatTokenLogprob] = []
    for token in tokens:
        chosen = _top_logprob(token.token_id, token.logprobs.logprob, tokenizer)
        top = [_top_logprob(each, value, tokenizer) for each, value in token.logprobs.top]
        entries.append(ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(entries)


def _alternatives(token: OutputToken, tokenizer: Tokenizer) -> dict[str, float]:
    pairs = [*token.logprobs.top, (token.token_id, token.logprobs.logprob)]
    return {_token_text(tokenizer.token_bytes(each)): max(LOWEST, value) for each, value in pairs}


def _top_logprob(token_id: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    data = tokenizer.token_bytes(token_id)
    return TopLogprob(_token_text(data), max(LOWEST, logprob), list(data))


def _token_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, cast

from pydantic import Discriminator, Field, Tag

from gateway.api.generation_fields import MAX_CHOICES, GenerationFields, LogprobsCount
from gateway.api.strict_model import MAX_TOKEN_IDS, MAX_VALUES_WITH_IDS
from protocol.errors import InvalidRequest

Prompt = str | list[int]


def _prompt_shape(value: Any) -> str:
    if isinstance(value, str):
        return "<text>"
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, str):
        return "<texts>"
    return "<lists of tokens>" if isinstance(first, list) else "<tokens>"


_TokenId = Annotated[int, Field(ge=0)]
_token_ids = Field(max_length=MAX_TOKEN_IDS, fail_fast=True)
_prompts = Field(max_length=MAX_CHOICES, fail_fast=True)


class CompletionRequest(GenerationFields):
    """Prompts as text or token ids, one or several; every prompt gets `n` choices."""

    max_values: ClassVar[int] = MAX_VALUES_WITH_IDS

    prompt: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[str], _prompts, Tag("<texts>")]
        | Annotated[list[_TokenId], _token_ids, Tag("<tokens>")]
        | Annotated[
            list[Annotated[list[_TokenId], _token_ids]], _prompts, Tag("<lists of tokens>")
        ],
        Discriminator(_prompt_shape),
    ]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    echo: bool | None = None
    logprobs: LogprobsCount | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts as a list. All elements have the type of the first one."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt or isinstance(prompt[0], int):
            return [cast(list[int], prompt)]
        return cast(list[Prompt], prompt)

    @property
    def num_candidates(self) -> int:
        """How many sequences to generate for each prompt."""
        return max(self.n or 1, self.best_of or 1)

    @property
    def has_spare_choices(self) -> bool:
        """Whether more sequences are generated than returned."""
        return self.num_candidates > (self.n or 1)

    @property
    def output_logprobs(self) -> int | None:
        """Number of alternatives to compute per output token. Ranking for `best_of` needs at
        least 0, that is, each token's own log-probability."""
        if self.logprobs is None and self.has_spare_choices:
            return 0
        return self.logprobs

    @property
    def scored_alternatives(self) -> int | None:
        """Number of alternatives to compute per prompt token, for `prompt_logprobs` or for the
        echo; None if neither is requested."""
        echoed = self.logprobs if self.echo else None
        counts = [each for each in (self.prompt_logprobs, echoed) if each is not None]
        return max(counts, default=None)

    def check_together(self) -> None:
        """See the base class. Also limits the number of sequences that one request may start."""
        super().check_together()
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise InvalidRequest("'best_of' must be at least 'n'", "best_of")
        if self.stream and self.has_spare_choices:
            raise InvalidRequest("'best_of' greater than 'n' needs 'stream' to be false", "best_of")
        if self.suffix and (self.echo or not isinstance(self.prompt, str)):
            raise InvalidRequest("'suffix' needs one text as 'prompt', and no 'echo'", "suffix")
        if self.suffix and self.add_special_tokens:
            raise InvalidRequest(
                "'suffix' and 'add_special_tokens' exclude each other", "add_special_tokens"
            )
        if self.echo and self.truncate_prompt_tokens is not None:
            raise InvalidRequest(
                "'echo' and 'truncate_prompt_tokens' exclude each other", "truncate_prompt_tokens"
            )
        if self.output_limit == 0 and not self.echo:
            raise InvalidRequest(
                "'max_tokens' must be at least 1, or 0 together with 'echo'", "max_tokens"
            )
        if len(self.prompts) * self.num_candidates > MAX_CHOICES:
            raise InvalidRequest(
                f"{len(self.prompts)} prompts with {self.num_candidates} choices each exceed the "
                f"limit of {MAX_CHOICES}",
                "prompt",
            )
        for place, prompt in enumerate(self.prompts):
            if len(prompt) == 0:
                param = f"prompt[{place}]" if len(self.prompts) > 1 else "prompt"
                raise InvalidRequest(f"'{param}' must not be empty", param)

"""llama.cpp by llama-cpp-python's low-level interface."""

from __future__ import annotations

from typing import Any

import llama_cpp
from answer import Needs, answer
from gguf_engine import GgufEngine


class LlamaCpp(GgufEngine):
    """See GgufEngine."""

    def __init__(self, needs: Needs) -> None:
        super().__init__(llama_cpp, needs)
        self.version = f"llama-cpp-python {llama_cpp.__version__}"

    def _model_params(self) -> Any:
        return llama_cpp.llama_model_default_params()

    def _use_flash_attention(self, params: Any) -> None:
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED

    def _empty(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)


if __name__ == "__main__":
    answer(LlamaCpp)

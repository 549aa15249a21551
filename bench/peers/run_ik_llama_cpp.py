"""ik_llama.cpp, a fork of llama.cpp with faster products on CPUs, by ik-llama-cpp-python's
low-level interface. Tensors are repacked at load, as its `-rtr` does."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from answer import Needs, answer
from gguf_engine import GgufEngine
from ik_llama_cpp import _ctypes_api as api


class IkLlamaCpp(GgufEngine):
    """See GgufEngine."""

    def __init__(self, needs: Needs) -> None:
        super().__init__(api, needs)
        self.version = f"ik-llama-cpp-python {version('ik-llama-cpp-python')}"

    def _model_params(self) -> Any:
        params = api.llama_model_default_params()
        params.repack_tensors = True
        return params

    def _use_flash_attention(self, params: Any) -> None:
        params.flash_attn = True

    def _empty(self) -> None:
        api.llama_kv_cache_clear(self._context)


if __name__ == "__main__":
    answer(IkLlamaCpp)

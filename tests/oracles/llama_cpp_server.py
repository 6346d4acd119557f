"""llama.cpp's own server, to test what it computes with a GGUF file."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xllamacpp


class LlamaCpp:
    """A server of llama.cpp in this process, on a free port, with an f32 cache and without flash attention."""

    def __init__(self, file: Path) -> None:
        settings = xllamacpp.CommonParams()
        settings.model.path = str(file)
        settings.n_gpu_layers, settings.n_ctx, settings.n_parallel = 0, 256, 1
        settings.cpuparams.n_threads = 1
        settings.warmup = False
        settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        self.server = xllamacpp.Server(settings)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        address, headers = self.server.listening_address + path, {"Content-Type": "application/json"}
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            content: dict[str, Any] = json.loads(answer.read())
            return content

    def tokenize(self, text: str, add_special: bool = False) -> list[int]:
        tokens: list[int] = self.post("/tokenize", content=text, add_special=add_special)["tokens"]
        return tokens

    def complete(self, tokens: list[int], count: int, probabilities: int) -> dict[str, Any]:
        options = {"temperature": 0, "n_probs": probabilities, "return_tokens": True, "cache_prompt": False}
        return self.post("/completion", prompt=tokens, n_predict=count, ignore_eos=True, **options)

    def loss(self, tokens: list[int], vocab_size: int) -> float:
        """Return the mean loss of the tokens after the first, from log-probabilities over the whole vocabulary."""
        total = 0.0
        for end in range(1, len(tokens)):
            (answer,) = self.complete(tokens[:end], 1, vocab_size)["completion_probabilities"]
            total -= next(entry["logprob"] for entry in answer["top_logprobs"] if entry["id"] == tokens[end])
        return total / (len(tokens) - 1)


@contextmanager
def llama_cpp(file: Path) -> Iterator[LlamaCpp]:
    server = LlamaCpp(file)
    try:
        yield server
    finally:
        del server.server

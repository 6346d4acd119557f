"""Generation in transformers: prints one JSON line per type of weights.

The models have a config's sizes and random weights. Those of a folder that does not exist are written first, for
transformers and for us.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
END, PROMPT = "<|endoftext|>", "1"
"""The end-of-text token and the prompt. Every other token is its own number as a word."""


def write(folder: Path, model: dict[str, int]) -> None:
    """Save one random model in every type, each with a tokenizer, by `save_pretrained`."""
    vocabulary = {END: 0, **{str(number): number for number in range(1, model["vocab_size"])}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"num_layers": "num_hidden_layers", "tie_embeddings": "tie_word_embeddings"}
    sizes = {names.get(name, name): value for name, value in model.items()}
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=0, eos_token_id=0))
    for name, dtype in DTYPES.items():
        llama.to(dtype).save_pretrained(folder / name)
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END).save_pretrained(folder / name)


def measure(folder: Path, dtype: torch.dtype, tokens: int) -> dict[str, float]:
    llama = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    prompt = PreTrainedTokenizerFast.from_pretrained(folder)(PROMPT, return_tensors="pt")
    llama.generate(**prompt, max_new_tokens=2, do_sample=False)
    begin = time.perf_counter()
    generated_tokens = (
        llama.generate(**prompt, max_new_tokens=tokens, do_sample=False).shape[1] - prompt["input_ids"].shape[1]
    )
    seconds = time.perf_counter() - begin
    read = sum(weight.nbytes for weight in llama.parameters()) - llama.get_input_embeddings().weight.nbytes
    return {"generated_per_second": generated_tokens / seconds, "weight_bytes_per_token": read}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="of the models")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, required=True, help="that are generated")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not arguments.folder.exists():
        write(arguments.folder, yaml.safe_load(arguments.config.read_text())["model"])
    for name, dtype in DTYPES.items():
        print(json.dumps({"dtype": name, **measure(arguments.folder / name, dtype, arguments.tokens)}), flush=True)


if __name__ == "__main__":
    main()

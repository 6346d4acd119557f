"""The error of bf16 logits, ours and PyTorch's, each against its own f32, for prompts and for cached decoding.

`python tests/oracles/bf16_logits_error.py --folder FOLDER` prints it for SmolLM2-135M-Instruct and for wide random
models of several seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orchestrator
import tiny_tokenizers
import torch
from fake_hub.fineweb import documents
from real_model import smollm2
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

TEXTS = [
    "The river bends because water on the outside of a curve moves faster and carries more sediment than",
    "In 1969 two astronauts walked on the Moon while Michael Collins, the third of the crew, stayed in orbit",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
    "Preheat the oven to 180 degrees. Mix the flour, the sugar and a pinch of salt in a large bowl, then add",
    "Dear Ms. Alvarez,\n\nThank you for your letter of 3 March. We are sorry that the second parcel arrived",
    "Photosynthesis converts light energy into chemical energy: chlorophyll absorbs photons, and water is split",
]
QUESTIONS = [
    "What is the capital of France?",
    "How many legs has a spider?",
    "Name a colour of the sky.",
    "Why does ice float on water?",
    "Who wrote Hamlet?",
]
WIDE = {
    "vocab_size": 512, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 3,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": True,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
# Channels of the residual stream that are some dozen times as large as the others, as those of trained models.
OUTLIER_CHANNELS = 8


@dataclass(frozen=True)
class Error:
    """Root mean square of bf16 logits less f32 logits, and how often both rank the same token first."""

    rms: float
    agreement: float

    @classmethod
    def between(cls, rounded: list[np.ndarray], exact: list[np.ndarray]) -> Error:
        ours, theirs = np.concatenate(rounded), np.concatenate(exact)
        squares = np.square(ours - theirs, dtype=np.float64)
        return cls(float(np.sqrt(squares.mean())), float((ours.argmax(1) == theirs.argmax(1)).mean()))


@dataclass(frozen=True)
class Comparison:
    """Our error and PyTorch's over the same positions."""

    positions: int
    ours: Error
    theirs: Error

    @property
    def ratio(self) -> float:
        return self.ours.rms / self.theirs.rms

    def __str__(self) -> str:
        rms = f"rms {self.ours.rms:.4f} against {self.theirs.rms:.4f}, ratio {self.ratio:.3f}"
        agreement = f"first tokens as in f32 {self.ours.agreement:.3f} against {self.theirs.agreement:.3f}"
        return f"{rms}; {agreement}; {self.positions} positions"


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="sdpa").eval()


def in_both_precisions(model: Path, folder: Path) -> tuple[Path, Path]:
    """Write the model in bf16, and the same rounded weights in f32; return both folders."""
    rounded, exact = folder / "bf16", folder / "f32"
    weights, tokenizer = load(model).bfloat16(), AutoTokenizer.from_pretrained(model)
    for place, precision in ((rounded, torch.bfloat16), (exact, torch.float32)):
        weights.to(precision).save_pretrained(place)
        tokenizer.save_pretrained(place)
    return rounded, exact


def wide_model(folder: Path, seed: int) -> Path:
    """Write a wide random model whose residual stream has outlier channels, as trained models have."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**WIDE, initializer_range=0.02))
    channels = torch.randperm(WIDE["hidden_size"])[:OUTLIER_CHANNELS]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter[channels] *= 32.0
            elif parameter.dim() == 1:
                parameter.copy_(1.0 + 0.2 * torch.randn_like(parameter))
                parameter[channels] = 0.05
    model.save_pretrained(folder)
    tiny_tokenizers.write(
        tiny_tokenizers.train("smollm_2", list(documents())[:20], WIDE["vocab_size"]), "smollm_2", folder
    )
    return folder


def prefilled(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([ids])).logits[0].float().numpy()
    return logits


def decoded(model: Any, ids: list[int]) -> np.ndarray:
    """Return the logits after each of `ids`, which pass through the model one by one, behind cached keys and values."""
    cache, rows = None, []
    with torch.no_grad():
        for token in ids:
            output = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            rows.append(output.logits[0, 0].float().numpy())
    return np.stack(rows)


def compare(rounded: Path, exact: Path, sequences: list[list[int]]) -> dict[str, Comparison]:
    """Compare the errors over `sequences`, as prompts and decoded one by one."""

    def ours(folder: Path, prompt_tokens: int) -> list[np.ndarray]:
        return [orchestrator.logits(folder, ids, prompt_tokens=prompt_tokens, device="cpu") for ids in sequences]

    def theirs(folder: Path, run: Callable[[Any, list[int]], np.ndarray]) -> list[np.ndarray]:
        model = load(folder)
        return [run(model, ids) for ids in sequences]

    our_exact, their_exact = ours(exact, max(map(len, sequences))), theirs(exact, prefilled)
    for one, other in zip(our_exact, their_exact, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-4)
    positions = sum(map(len, sequences))
    return {
        name: Comparison(
            positions,
            Error.between(ours(rounded, len(max(sequences, key=len)) if run is prefilled else 0), our_exact),
            Error.between(theirs(rounded, run), their_exact),
        )
        for name, run in (("prefill", prefilled), ("decoding", decoded))
    }


def sequences_of(tokenizer: Any, texts: list[str], questions: list[str], length: int) -> list[list[int]]:
    turns = [[{"role": "user", "content": question}] for question in questions]
    chats = [tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"] for turn in turns]
    return [ids[:length] for ids in [*(tokenizer(text).input_ids for text in texts), *chats]]


def compare_smollm2(folder: Path, texts: list[str], questions: list[str], length: int) -> dict[str, Comparison]:
    """Compare the errors on SmolLM2, which is written below `folder`."""
    model = smollm2(folder)
    rounded, exact = in_both_precisions(model, folder / "smollm2")
    return compare(rounded, exact, sequences_of(AutoTokenizer.from_pretrained(model), texts, questions, length))


def compare_wide(folder: Path, seed: int, sequences: int, length: int) -> dict[str, Comparison]:
    """Compare the errors on a wide random model, which is written below `folder`, over random tokens."""
    rounded, exact = in_both_precisions(wide_model(folder / f"random-{seed}", seed), folder / f"wide-{seed}")
    tokens = torch.randint(WIDE["vocab_size"], (sequences, length), generator=torch.Generator().manual_seed(seed))
    return compare(rounded, exact, tokens.tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the models are written")
    parser.add_argument("--seeds", type=int, default=3, help="wide random models")
    arguments = parser.parse_args()
    settings = {"SmolLM2": compare_smollm2(arguments.folder, TEXTS, QUESTIONS, 64)}
    for seed in range(arguments.seeds):
        settings[f"wide, seed {seed}"] = compare_wide(arguments.folder, seed, 4, 64)
    for model, comparisons in settings.items():
        for name, comparison in comparisons.items():
            print(f"{model}, {name}: {comparison}")


if __name__ == "__main__":
    main()

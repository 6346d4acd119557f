"""Trains one row of the quality bench in PyTorch: same initial weights, batches, schedule and held-out text.

    PYTHONPATH=benches/gpu .venv-oracle/bin/python benches/quality/peer.py --root DIR ROW [--fp8]

The model is that of benches/gpu/torch_llama.py, with bf16 weights and f32 master weights. The result is named
ROW-pytorch. With --fp8 it is named ROW-pytorch-fp8: the GEMMs of the blocks get operands rounded to fp8 with one scale
per tensor, e4m3 for activations and weights, e5m2 for gradients. It can be killed and started again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from llama_shape import shape_of
from orchestrator import RunConfig, TokenStream
from orchestrator import Trainer as OurTrainer
from rows import Row
from run import BUILT, RESULTS, Bench, Curve, quiet_time
from safetensors.torch import load_file
from torch import Tensor, nn
from torch_llama import IGNORED, Trainer
from transformers import PreTrainedTokenizerFast

FOLLOWED = {
    "model.architecture": "llama", "model.base_hidden_size": None, "optimizer.algorithm": "adamw",
    "optimizer.embedding_learning_rate_scale": 1.0, "optimizer.z_loss": 0.0, "scheduler.strategy": "wsd",
    "scheduler.batch_warmup_steps": 0,
}  # fmt: skip
"""Keys that change a run of ours, with the only values that are trained in PyTorch."""
MAX_VALUE = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def load_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a Hugging Face Llama directory by the names of `Llama`'s parameters."""
    tensors = load_file(folder / "model.safetensors")
    joined = {
        "qkv": [f"self_attn.{name}_proj" for name in "qkv"],
        "out": ["self_attn.o_proj"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
        "norms.0": ["input_layernorm"],
        "norms.1": ["post_attention_layernorm"],
    }
    whole = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    weights = {
        f"{ours}.weight": tensors[f"{name}.weight"] for ours, name in whole.items() if f"{name}.weight" in tensors
    }
    for layer in {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}:
        for ours, names in joined.items():
            parts = [tensors[f"model.layers.{layer}.{name}.weight"] for name in names]
            weights[f"blocks.{layer}.{ours}.weight"] = torch.cat(parts)
    return weights


class Fp8Linear(torch.autograd.Function):
    """`x @ weight.T` with fp8 operands, in the forward pass and in both GEMMs of the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return fp8_matmul(x, weight.T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows = gradients[0].flatten(0, -2)
        to_weight = fp8_matmul(rows.T, x.flatten(0, -2), torch.float8_e5m2)
        return fp8_matmul(gradients[0], weight, torch.float8_e5m2), to_weight


def fp8_matmul(left: Tensor, right: Tensor, left_dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Return `left @ right` of operands rounded to fp8, `right` to e4m3. Every fp8 number is exact in bf16."""
    left_values, left_scale = to_fp8(left, left_dtype)
    right_values, right_scale = to_fp8(right, torch.float8_e4m3fn)
    return ((left_values @ right_values) * (left_scale * right_scale)).to(left.dtype)


def to_fp8(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round to fp8 with one scale for the tensor; return the values in the tensor's own dtype, and the scale."""
    scale = values.abs().amax().float().clamp(min=1e-30) / MAX_VALUE[dtype]
    return (values.float() / scale).to(dtype).to(values.dtype), scale


def use_fp8(blocks: nn.Module) -> None:
    """Let the linear layers compute with fp8 operands."""
    for layer in blocks.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = lambda x, weight=layer.weight: Fp8Linear.apply(x, weight)


class Peer:
    """A row's run in PyTorch. Its state is saved at every evaluation."""

    def __init__(self, bench: Bench, row: Row, fp8: bool = False) -> None:
        self.bench, self.row, self.device = bench, row, torch.device(bench.device)
        self.name = f"{row.name}-pytorch" + "-fp8" * fp8
        folder = bench.root / "runs" / self.name
        # Only the weights and batches are ours.
        overrides = [*bench.overrides(row), "runtime.device=cpu"]
        config = RunConfig.load(bench.write_config(row, folder), overrides=overrides)
        values = config.to_dict()
        self.settings, self.data, self.runtime = values["optimizer"], values["data"], values["runtime"]
        self.scheduler = values["scheduler"]
        for key, followed in FOLLOWED.items():
            section, name = key.split(".")
            if values[section][name] != followed:
                sys.exit(f"{row.name}: {key} is {values[section][name]}; rows in PyTorch have {followed}")
        dtype = torch.bfloat16 if self.runtime["precision"] == "bf16" else torch.float32
        shape = shape_of(values["model"], self.data)
        self.trainer = Trainer(shape, self.device, False, False, "flash", dtype)
        for group in self.trainer.optimizer.param_groups:
            group["betas"] = (self.settings["beta1"], self.settings["beta2"])
            group["eps"] = self.settings["epsilon"]
            group["weight_decay"] = self.settings["weight_decay"] if group["weight_decay"] else 0.0
        self.held_out = self.read_held_out()
        self.saved = folder / "state.pt"
        self.step, self.tokens, self.losses = 0, 0, list[tuple[int, int, float]]()
        self.step_seconds = list[float]()
        if self.saved.exists():
            self.restore(config)
        else:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            ours = OurTrainer(config)
            evaluation = ours.evaluate()
            assert evaluation
            assert evaluation.bits_per_byte
            self.bits_per_nat = evaluation.bits_per_byte / evaluation.loss
            self.trainer.load(load_checkpoint(Path(ours.save())))
            self.stream = TokenStream(config)
        if fp8:
            use_fp8(self.trainer.module.blocks)

    def read_held_out(self) -> Tensor:
        """Return tokens [2, sequences, length] of the evaluation: inputs and targets, packed as by the trainer."""
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(self.bench.tokenizer))
        end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        count = self.runtime["evaluation"]["max_batches"] * self.data["sequences_per_step"]
        length = self.data["sequence_length"]
        tokens = [end]
        for text in self.bench.held_out_texts():
            tokens += [*tokenizer(text).input_ids, end]
            if len(tokens) > count * length:
                break
        count = min(count, (len(tokens) - 1) // length)
        ids = torch.tensor(tokens[: count * length + 1])
        return torch.stack([ids[:-1], ids[1:]]).view(2, count, length).to(self.device)

    def learning_rate(self, step: int) -> float:
        """Return the rate of a step, with warm-up, stable and decay phases; steps count from 1."""
        peak, total = self.settings["learning_rate"], self.scheduler["total_steps"]
        decay = round(self.scheduler["decay_fraction"] * total)
        into_decay = max(0, step - (total - decay)) / decay
        return (
            peak * min(1.0, step / max(self.scheduler["warmup_steps"], 1))
            + (self.scheduler["min_lr"] - peak) * into_decay
        )

    def train(self, max_steps: int | None = None) -> None:
        """Train to the end, or for `max_steps` steps, and write the result so far at every evaluation."""
        every, total = self.runtime["evaluation"]["every_n_steps"], self.scheduler["total_steps"]
        end = min(total, self.step + (max_steps or total))
        for inputs, targets in self.stream:
            start = time.perf_counter()
            self.step += 1
            tokens = torch.stack([torch.from_numpy(inputs), torch.from_numpy(targets)])
            self.trainer.tokens = tokens.long().to(self.device)
            for group in self.trainer.optimizer.param_groups:
                group["lr"] = self.learning_rate(self.step)
            loss, _ = self.trainer.step(self.data["batch_size"])
            self.tokens += int((targets != IGNORED).sum())
            self.step_seconds.append(time.perf_counter() - start)
            if self.step % every == 0 or self.step == end:
                self.losses.append((self.step, self.tokens, self.evaluate()))
                print(f"{self.name} step {self.step} loss {loss:.4f} held out {self.losses[-1][2]:.4f}", flush=True)
                self.save()
                bits = self.losses[-1][2] * self.bits_per_nat
                self.bench.write_result(self.row, self.name, self.curve(), bits, complete=self.step == total)
            if self.step == end:
                break

    def curve(self) -> Curve:
        """Return the held-out loss so far."""
        seconds = quiet_time(self.step_seconds)
        return [(step, tokens, step * seconds, loss) for step, tokens, loss in self.losses]

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the held-out text, in nats per token."""
        inputs, targets = self.held_out
        size = self.data["batch_size"]
        batches = zip(inputs.split(size), targets.split(size), strict=True)
        return sum(self.trainer.module(*batch).item() for batch in batches) / targets.numel()

    def save(self) -> None:
        """Replace the saved state atomically."""
        state = {
            "masters": self.trainer.masters, "optimizer": self.trainer.optimizer.state_dict(), "step": self.step,
            "step_seconds": self.step_seconds, "losses": self.losses, "tokens": self.tokens,
            "stream": self.stream.state(), "bits_per_nat": self.bits_per_nat,
        }  # fmt: skip
        staging = self.saved.with_suffix(".staging")
        torch.save(state, staging)
        staging.replace(self.saved)

    def restore(self, config: RunConfig) -> None:
        """Continue from the saved state."""
        state = torch.load(self.saved, map_location=self.device)
        self.trainer.load(dict(zip(self.trainer.names, state["masters"], strict=True)))
        self.trainer.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens = state["step"], state["tokens"]
        self.step_seconds, self.losses = state["step_seconds"], state["losses"]
        self.bits_per_nat = state["bits_per_nat"]
        self.stream = TokenStream(config, state["stream"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", metavar="ROW")
    parser.add_argument("--fp8", action="store_true", help="round the operands of the blocks' GEMMs to fp8")
    parser.add_argument("--root", type=Path, required=True, help="the folder of the bench, kept from run to run")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the results")
    parser.add_argument("--program", type=Path, default=BUILT, help="the trainer, which plans the row")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    folders = arguments.root.resolve(), arguments.program.resolve(), arguments.results.resolve()
    bench = Bench(*folders, arguments.device)
    torch.set_num_threads(arguments.threads)
    Peer(bench, bench.row(arguments.row), arguments.fp8).train()


if __name__ == "__main__":
    main()

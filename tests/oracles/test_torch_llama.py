"""The PyTorch contender of the measurements on a GPU, in small on the CPU: it trains the model it is said to train."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orchestrator
import pytest
import torch
import torch_llama
import yaml
from llama_shape import Shape, plain_yaml, read_shape, shape_of
from peer import load_checkpoint
from torch_fp8 import Fp8Linear, to_fp8
from torch_llama import Trainer, contender
from workspace import REPOSITORY, TINY_MODEL, TRAINER, Workspace

PRESETS = sorted((REPOSITORY / "configs").glob("*.yaml"))
TINY = Shape(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_layers=2, num_attention_heads=4, num_key_value_heads=2,
    tie_embeddings=True, rope_theta=1e4, norm_epsilon=1e-5, sequence_length=32, sequences_per_step=8,
)  # fmt: skip


# What torch_llama.py trains with, and initial weights so large that decay shows, whose gradients are about as long as
# they may be before they are clipped.
PEER_SETTINGS = (
    "--launch=none --steps=4 --learning-rate=3e-4 --weight-decay=0.1 --schedule=constant --warmup-steps=0 "
    "--override=optimizer.algorithm=adamw --override=optimizer.beta1=0.9 --override=optimizer.beta2=0.95 "
    "--override=optimizer.epsilon=1e-8 --override=optimizer.max_grad_norm=1.0 --override=model.init_std=0.05 "
    "--override=model.architecture=llama"
).split()


def trainer(
    shape: Shape = TINY, recompute: bool = False, dtype: torch.dtype = torch.bfloat16, fp8: bool = False
) -> Trainer:
    cpu = torch.device("cpu")
    return Trainer(shape, cpu, compiled=False, recompute=recompute, attention="flash", dtype=dtype, fp8=fp8)


@pytest.mark.parametrize("config", [path for path in PRESETS if "rtx5090" in path.stem], ids=lambda path: path.stem)
def test_it_counts_the_flops_that_the_trainer_counts(config: Path) -> None:
    plan = subprocess.run([TRAINER, "plan", "--config", config, "--json"], capture_output=True, check=True)
    assert read_shape(config).flops_per_token() == json.loads(plan.stdout)["flops_per_token"]


@pytest.mark.parametrize("config", PRESETS, ids=lambda path: path.stem)
def test_without_pyyaml_it_reads_the_same_from_every_preset(config: Path) -> None:
    assert plain_yaml(config.read_text()) == yaml.safe_load(config.read_text())


def test_micro_batch_and_recompute_change_only_rounding() -> None:
    whole = trainer().step(8)
    assert whole[0] == pytest.approx(math.log(TINY.vocab_size), rel=0.02)
    for other in (trainer().step(1), trainer(recompute=True).step(4)):
        assert other == pytest.approx(whole, rel=2e-3)


@pytest.mark.parametrize("tied", [True, False])
def test_in_fp32_it_takes_the_very_steps_that_the_trainer_takes(workspace: Workspace, tied: bool) -> None:
    flags = [*TINY_MODEL, *PEER_SETTINGS, f"--override=model.tie_embeddings={str(tied).lower()}"]
    workspace.orchestrate(*flags, "--input", workspace.write_text(), "--experiment=same").succeeded()
    config = orchestrator.RunConfig.load(workspace.run_folder("same") / "training.yaml")
    ours = orchestrator.Trainer(config)
    start = load_checkpoint(Path(ours.save()))

    values = config.to_dict()
    theirs = trainer(shape_of(values["model"], values["data"]), dtype=torch.float32)
    theirs.load(start)
    norms = []
    for report, (inputs, targets) in zip(ours, orchestrator.TokenStream(config), strict=False):
        theirs.tokens = torch.stack([torch.from_numpy(inputs), torch.from_numpy(targets)]).long()
        assert (report.loss, report.grad_norm) == pytest.approx(theirs.step(2), rel=1e-5)
        norms.append(report.grad_norm)
    assert len(norms) == 4
    assert min(norms) < 1.0 < max(norms), "clipping takes part, and changes what AdamW does"

    end = load_checkpoint(Path(ours.save()))
    assert sorted(theirs.names) == sorted(end)
    for name, master in zip(theirs.names, theirs.masters, strict=True):
        assert (master - end[name]).norm() < 2e-3 * (end[name] - start[name]).norm(), name


def test_it_learns_one_batch_by_heart() -> None:
    contender = trainer()
    losses = [contender.step(4)[0] for _ in range(60)]
    assert losses[-1] < 0.9 * losses[0]
    for weight, master in zip(contender.weights, contender.masters, strict=True):
        assert torch.equal(weight, master.bfloat16())


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def linear_and_gradients(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Return the output of a linear layer and the gradients of its input and its weight, in f32."""
    x = x.clone().requires_grad_()
    layer.weight.grad = None
    y = layer(x)
    y.backward(dy)
    return [tensor.detach().float() for tensor in (y, x.grad, layer.weight.grad)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_an_fp8_linear_is_a_linear_within_the_rounding_of_fp8(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    layer = Fp8Linear(64, 96, bias=False).to(dtype)
    x, dy = (3.0 * torch.randn(4, 32, 64)).to(dtype), (1e-4 * torch.randn(4, 32, 96)).to(dtype)
    y, dx, dw = linear_and_gradients(layer, x, dy)
    assert y.shape == (4, 32, 96)

    # The numbers that the operands stand for, multiplied in f32: what is left is the rounding of the result.
    x8, w8, dy8 = (
        values.float() * scale
        for values, scale in (
            to_fp8(x.flatten(0, 1), torch.float8_e4m3fn),
            to_fp8(layer.weight.detach(), torch.float8_e4m3fn),
            to_fp8(dy.flatten(0, 1), torch.float8_e5m2),
        )
    )
    rounding = 1e-5 if dtype == torch.float32 else 2**-8
    assert relative_error(y.flatten(0, 1), x8 @ w8.T) < rounding
    assert relative_error(dx.flatten(0, 1), dy8 @ w8) < rounding
    assert relative_error(dw, dy8.T @ x8) < rounding

    # e4m3 keeps 4 significant bits, an error of 2.6 % (root mean square) per operand, and e5m2 twice that.
    plain = torch.nn.Linear(64, 96, bias=False).to(dtype)
    plain.load_state_dict(layer.state_dict())
    exact = linear_and_gradients(plain, x, dy)
    errors = [relative_error(actual, expected) for actual, expected in zip((y, dx, dw), exact, strict=True)]
    assert 0.02 < errors[0] < 0.045
    assert all(0.03 < error < 0.07 for error in errors[1:])


def test_fp8_scales_by_the_largest_magnitude_and_shows_what_is_not_finite() -> None:
    values, scale = to_fp8(torch.tensor([0.5, -3.0, 0.0]), torch.float8_e4m3fn)
    assert values.float().tolist() == [72.0, -448.0, 0.0]  # 0.5 / 3 * 448 = 74.7, between 72 and 80
    assert scale.item() == pytest.approx(3 / 448)
    assert to_fp8(torch.zeros(4), torch.float8_e5m2)[0].float().tolist() == [0.0] * 4
    for amax in torch.logspace(-20, 20, 1000, base=2.0):
        values, _ = to_fp8(amax.view(1), torch.float8_e5m2)
        assert values.float().item() == 57344.0, "rounding never ends in infinity"
    assert to_fp8(torch.tensor([1.0, math.inf]), torch.float8_e4m3fn)[0].float().isnan().any()
    assert to_fp8(torch.tensor([1.0, math.nan]), torch.float8_e4m3fn)[0].float().isnan().all()


def test_an_fp8_linear_compiles_as_one_graph() -> None:
    torch.manual_seed(5)
    layer = Fp8Linear(32, 48, bias=False).bfloat16()
    x, dy = torch.randn(2, 16, 32).bfloat16(), torch.randn(2, 16, 48).bfloat16()
    eager = linear_and_gradients(layer, x, dy)
    layer.compile(fullgraph=True, backend="aot_eager")
    for compiled, expected in zip(linear_and_gradients(layer, x, dy), eager, strict=True):
        torch.testing.assert_close(compiled, expected)


def test_with_fp8_the_blocks_multiply_in_fp8_and_the_head_does_not() -> None:
    module = trainer(fp8=True).module
    kinds = {
        name.split(".")[-1]: type(layer) for name, layer in module.named_modules() if hasattr(layer, "in_features")
    }
    linear = torch.nn.Linear
    assert kinds == {**dict.fromkeys(("qkv", "out", "gate_up", "down"), Fp8Linear), "head": linear}


def test_with_fp8_it_learns_as_in_bf16() -> None:
    contenders = [trainer(fp8=fp8) for fp8 in (False, True)]
    losses = [[contender.step(4)[0] for _ in range(60)] for contender in contenders]
    assert losses[1] != losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1][-1] < 0.9 * losses[1][0]


def test_compiled_blocks_share_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trainer().step(4)
    compiled = trainer()
    # Without a C++ compiler, but with everything before it.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled.compile_blocks()
    assert compiled.step(4) == pytest.approx(expected, rel=2e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "a block, and the loss"


def tiny_config(folder: Path) -> Path:
    """Write the config of the tiny model."""
    config = folder / "tiny.json"
    model = {name: value for name, value in vars(TINY).items() if name not in ("sequence_length", "sequences_per_step")}
    data = {"sequence_length": TINY.sequence_length, "sequences_per_step": TINY.sequences_per_step}
    config.write_text(json.dumps({"model": model, "data": data}))
    return config


def command(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run torch_llama.py on the CPU."""
    config = tiny_config(folder)
    words = [sys.executable, REPOSITORY / "benches/gpu/torch_llama.py", "--config", config, "--mode", "eager", *options]
    # Hides a GPU, so that the test is the same everywhere.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment, timeout=300)


def test_the_command_ends_with_its_result(tmp_path: Path) -> None:
    process = command(tmp_path, "--steps", "1")
    assert process.returncode == 0, process.stderr
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    assert [line["micro_batch"] for line in lines[:-1]] == [1, 2, 4, 8]
    assert lines[-1]["contender"] == "torch-eager"
    assert lines[-1]["tokens_per_step"] == 256
    assert lines[-1]["mfu"] is None


def test_both_attentions_are_timed_in_turn(tmp_path: Path) -> None:
    process = command(tmp_path, "--steps", "1", "--micro-batch", "8", "--attention", "both", "--fp8")
    assert process.returncode == 0, process.stderr
    rows = [row for row in map(json.loads, process.stdout.splitlines()) if "contender" in row]
    assert [(row["attention"], row["fp8"]) for row in rows] == [("cudnn", True), ("flash", True)]
    assert rows[0]["first_step"] == rows[1]["first_step"], "each begins with the same weights"


def test_an_attention_that_does_not_run_leaves_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutCudnn(Trainer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            if "cudnn" in arguments:
                raise RuntimeError("No available kernel. Aborting execution.\nA second line")
            super().__init__(*arguments, **options)

    monkeypatch.setattr(torch_llama, "Trainer", WithoutCudnn)
    options = argparse.Namespace(
        config=tiny_config(tmp_path), mode="eager", recompute="none", fp8=False, micro_batch="8", steps=1, peak=None,
        memory_limit="none",
    )  # fmt: skip
    cpu = torch.device("cpu")
    failed, measured = (contender(options, cpu, attention, math.inf) for attention in ("cudnn", "flash"))
    assert failed["failure"] == "No available kernel. Aborting execution."
    assert "tokens_per_second" not in failed
    assert measured["tokens_per_second"] > 0
    assert "failure" not in measured


def test_no_micro_batch_that_fits_is_an_error(tmp_path: Path) -> None:
    process = command(tmp_path, "--micro-batch", "3")
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1] == "no micro-batch of 3 that divides 8 sequences fits in the memory limit"


def test_a_budget_bounds_the_steps_and_the_peak_is_given(tmp_path: Path) -> None:
    process = command(tmp_path, "--micro-batch", "8", "--steps", "100000000", "--seconds", "1", "--peak", "1e12")
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert 1 <= result["steps"] < 100_000_000
    assert result["mfu"] == result["model_flops_per_second"] / 1e12


def test_a_gpu_that_is_asked_for_and_missing_is_refused(tmp_path: Path) -> None:
    process = command(tmp_path, "--device", "cuda")
    assert process.returncode == 2
    assert "finds no CUDA device" in process.stderr

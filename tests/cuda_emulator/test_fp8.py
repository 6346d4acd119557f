"""`precision: fp8` on emulated GPUs of three generations: as on a CPU, resumed, refused where matmuls are missing."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
from cuda_emulator.runs import Runs, Tiny
from cuda_emulator.test_training import errors

FP8 = Tiny(precision="fp8", hidden=64, intermediate=128, sequence=48, steps=3, checkpoint_every=1)


@dataclass(frozen=True)
class Generation:
    """A GPU, and the recipe that it trains with."""

    gpu: str
    capability: str
    recipe: str
    # What kernels call its squares of one scale; empty without.
    squares: str

    def of(self, runs: Runs) -> Runs:
        return runs.having(gpu=self.gpu, capability=self.capability)


ADA = Generation("NVIDIA GeForce RTX 4090", "8.9", "tensorwise", "")
HOPPER = Generation("NVIDIA H100 80GB HBM3", "9.0", "blockwise", "blocks")
BLACKWELL = Generation("NVIDIA GeForce RTX 5090", "12.0", "mxfp8", "mx")


def recipe(name: str) -> str:
    return f"--override=runtime.fp8_recipe={name}"


@pytest.mark.parametrize("generation", [ADA, HOPPER, BLACKWELL], ids=lambda generation: generation.recipe)
def test_each_generation_learns_what_a_cpu_learns_in_its_recipe(runs: Runs, generation: Generation) -> None:
    report = runs.workspace.root / "report.json"
    for name, words in (("cpu", (recipe(generation.recipe),)), ("cuda", ())):
        runs.write(name, FP8)
        generation.of(runs).having(report=report).train(name, *words, device=name).succeeded()
    launched = json.loads(report.read_text())["kernels"]
    # With one scale for all of a matrix nothing is rounded where it is computed.
    fused = {name.removesuffix(f"_{generation.squares}") for name in launched if name.startswith(("fp8_n", "fp8_s"))}
    assert fused == ({"fp8_normalize", "fp8_swiglu", "fp8_swiglu_backward"} if generation.squares else {"fp8_scale"})
    worst = errors(runs, "cuda", "cpu")
    # 0.5 % at most in bf16; an operand that this moves to the next fp8 number moves by 6 %. GEMMs of equal operands,
    # which gpu-check compares, agree as those of bf16 do.
    assert max(worst.values()) < 5e-2, worst
    for (_, loss, norm), (_, expected_loss, expected_norm) in zip(runs.steps("cuda"), runs.steps("cpu"), strict=True):
        assert loss == pytest.approx(expected_loss, rel=2e-3)
        assert norm == pytest.approx(expected_norm, rel=2e-2)
    held_out = [runs.metrics(name, "evaluation")[-1]["loss"] for name in ("cpu", "cuda")]
    assert held_out[1] == pytest.approx(held_out[0], rel=2e-3)
    assert runs.trainer_state("cuda", 3)["identity"]["runtime.fp8_recipe"] == generation.recipe


def test_adapters_train_beside_frozen_weights_in_fp8(runs: Runs) -> None:
    base = runs.checkpoint(runs.trained("base", replace(FP8, precision="bf16"), "cpu"), 3)
    tiny = replace(FP8, init_from=base, lora={"rank": 4, "alpha": 8})
    on_cpu, on_gpu = (runs.steps(runs.trained(device, tiny, device)) for device in ("cpu", "cuda"))
    for (_, loss, norm), (_, expected_loss, expected_norm) in zip(on_gpu, on_cpu, strict=True):
        assert loss == pytest.approx(expected_loss, rel=2e-3)
        assert norm == pytest.approx(expected_norm, rel=2e-2)


def test_a_gpu_without_fp8_matmuls_trains_beside_a_base_in_fp8(runs: Runs) -> None:
    base = runs.checkpoint(runs.trained("base", replace(FP8, precision="bf16"), "cpu"), 3)
    tiny = replace(FP8, precision="bf16", init_from=base, lora={"rank": 4, "alpha": 8, "base_precision": "fp8"})
    ampere = runs.having(gpu="NVIDIA A100-SXM4-80GB", capability="8.0")
    prompt = "--override=runtime.evaluation.prompts=[The]"
    for device in ("cuda", "cpu"):
        runs.write(device, tiny)
        ampere.train(device, prompt, device=device).succeeded()
    # Beside a B of zeros A has no gradient.
    worst = {name: error for name, error in errors(runs, "cuda", "cpu").items() if "lora_B" in name}
    assert len(worst) == 7
    assert max(worst.values()) < 2e-2, worst
    for (_, loss, norm), (_, expected_loss, expected_norm) in zip(runs.steps("cuda"), runs.steps("cpu"), strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-3)
        assert norm == pytest.approx(expected_norm, rel=1e-2)
    # A sample's later tokens are close calls, which roundings decide.
    texts = [[row["text"] for row in runs.metrics(device, "sample")] for device in ("cuda", "cpu")]
    assert [text[0] for text in texts[0]] == [text[0] for text in texts[1]]
    assert len(texts[0]) == 4


def test_another_generation_resumes_in_a_recipe_that_both_have(runs: Runs) -> None:
    runs.write("run", FP8)
    HOPPER.of(runs).train("run", "--max-steps", "1").succeeded()
    runs.train("run", "--resume").refused(2, "runtime.fp8_recipe", "blockwise", "mxfp8")
    runs.write("both", FP8)
    HOPPER.of(runs).train("both", recipe("tensorwise"), "--max-steps", "1").succeeded()
    runs.train("both", recipe("tensorwise"), "--resume").succeeded()
    assert [row[0] for row in runs.steps("both")] == [1, 2, 3]


def test_a_gpu_without_the_matmuls_is_refused_with_the_way_out(runs: Runs) -> None:
    ampere = runs.having(gpu="NVIDIA A100-SXM4-80GB", capability="8.0")
    runs.write("run", FP8)
    for device in ("cuda", "auto"):
        ampere.train("run", device=device).refused(2, "no fp8 matmuls", "--precision bf16", "--device cpu")
    HOPPER.of(runs).train("run", recipe("mxfp8")).refused(2, "blockwise or tensorwise", "runtime.fp8_recipe=auto")
    old = HOPPER.of(runs).having(cublas=120800)
    old.train("run", recipe("blockwise")).refused(2, "cuBLAS 12.8", "tensorwise")
    runs.write("odd", replace(FP8, sequence=24))
    runs.train("odd").refused(2, "multiples of 16", "data.sequence_length is 24")


def test_bench_and_plan_know_fp8(runs: Runs) -> None:
    config = runs.write("run", FP8) / "training.json"
    report = json.loads(runs.program("bench", "--json", "--config", config, "--steps", "1").succeeded().out)
    assert abs(report["memory_used_bytes"] / report["memory_bytes"] - 1) < 0.03
    plan = json.loads(runs.program("plan", "--json", "--config", config, "--gpu", "rtx4090").succeeded().out)
    assert plan["device"]["gpu"]["fp8_tensorwise"]["nominal"] == 2.0

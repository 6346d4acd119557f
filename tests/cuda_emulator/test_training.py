"""Training on an emulated GPU: as on a CPU, repeatable, and resumed where it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_emulator.runs import Runs, Tiny

BF16 = Tiny(precision="bf16")
FP32 = Tiny(precision="fp32")
LARGER = Tiny(hidden=128, heads=4, kv_heads=2, layers=2, sequence=24, batch=2, steps=3, checkpoint_every=1)
# Head size 40 is padded to 64; 3 sequences of 23 tokens fill no tile; multi-head attention without grouping.
RAGGED = Tiny(80, 2, 2, intermediate=112, sequence=23, batch=3, accumulation=1, steps=3, checkpoint_every=1)
DOCUMENTS = replace(LARGER, packing="documents")
MUON = replace(LARGER, algorithm="muon")
QWEN_2 = replace(LARGER, architecture="qwen2")
QWEN_3 = replace(LARGER, architecture="qwen3", head_dim=64)
TINIES = {
    "larger": LARGER, "ragged": RAGGED, "documents": DOCUMENTS, "muon": MUON, "qwen_2": QWEN_2, "qwen_3": QWEN_3,
}  # fmt: skip
# Relative errors of a loss and of a matrix of gradients. F32 sums differ by their order, bf16 values by a rounding here
# and there, which training then carries on.
TOLERANCE = {"fp32": (2e-5, 1e-5), "bf16": (4e-3, 3e-2)}


def errors(runs: Runs, one: str, other: str) -> dict[str, float]:
    """Return the relative error between the gradients of two runs, matrix by matrix."""
    ours, theirs = runs.gradients(one), runs.gradients(other)
    assert ours.keys() == theirs.keys()
    return {name: float(np.linalg.norm(ours[name] - theirs[name]) / np.linalg.norm(theirs[name])) for name in ours}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tiny", TINIES.values(), ids=TINIES)
def test_the_gpu_learns_what_the_cpu_learns(runs: Runs, tiny: Tiny, precision: str) -> None:
    tiny = replace(tiny, precision=precision)
    of_a_loss, of_gradients = TOLERANCE[precision]
    on_cpu, on_gpu = (runs.steps(runs.trained(device, tiny, device)) for device in ("cpu", "cuda"))
    worst = errors(runs, "cuda", "cpu")
    assert max(worst.values()) < of_gradients, worst
    assert [row[0] for row in on_gpu] == list(range(1, tiny.steps + 1))
    for (_, loss, norm), (_, expected_loss, expected_norm) in zip(on_gpu, on_cpu, strict=True):
        assert loss == pytest.approx(expected_loss, rel=of_a_loss)
        assert norm == pytest.approx(expected_norm, rel=10 * of_a_loss)
    held_out = [runs.metrics(name, "evaluation")[-1]["loss"] for name in ("cpu", "cuda")]
    assert held_out[1] == pytest.approx(held_out[0], rel=of_a_loss)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_gpu_trains_adapters_as_the_cpu_does(runs: Runs, precision: str, dropout: float) -> None:
    of_a_loss, of_gradients = TOLERANCE[precision]
    base = runs.checkpoint(runs.trained("base", replace(LARGER, precision="fp32"), "cpu"), 3)
    first = replace(LARGER, precision=precision, init_from=base, lora={"rank": 4, "alpha": 8})
    # Adapters that add something: beside a B of zeros A has no gradient.
    adapters = runs.checkpoint(runs.trained("first", first, "cpu"), 3)
    tiny = replace(first, lora={"init_from": str(adapters), "dropout": dropout})
    on_cpu, on_gpu = (runs.steps(runs.trained(device, tiny, device)) for device in ("cpu", "cuda"))
    worst = errors(runs, "cuda", "cpu")
    assert len(worst) == 2 * 7 * tiny.layers
    assert max(worst.values()) < of_gradients, worst
    for (_, loss, norm), (_, expected_loss, expected_norm) in zip(on_gpu, on_cpu, strict=True):
        assert loss == pytest.approx(expected_loss, rel=of_a_loss)
        assert norm == pytest.approx(expected_norm, rel=10 * of_a_loss)
    held_out = [runs.metrics(name, "evaluation")[-1]["loss"] for name in ("cpu", "cuda")]
    assert held_out[1] == pytest.approx(held_out[0], rel=of_a_loss)


def test_a_mask_depends_on_the_step_and_not_on_the_micro_batch(runs: Runs) -> None:
    """It does not depend on the schedule either: a key that came too early or late would be another micro-batch's."""
    base = runs.checkpoint(runs.trained("base", replace(LARGER, precision="fp32"), "cpu"), 3)
    tiny = replace(LARGER, precision="fp32", init_from=base, lora={"rank": 4, "dropout": 0.25}, batch=1, accumulation=4)
    expected = runs.steps(runs.trained("cut", tiny))
    runs.having(order="reversed", schedule="others-early").trained("early", tiny)
    assert runs.steps("early") == expected
    runs.trained("whole", replace(tiny, batch=4, accumulation=1))
    runs.trained("none", replace(tiny, lora={"rank": 4}))
    for (_, loss, norm), (_, of_whole, norm_of_whole) in zip(expected, runs.steps("whole"), strict=True):
        assert (of_whole, norm_of_whole) == pytest.approx((loss, norm), rel=2e-5)
    assert runs.steps("none")[-1][1] != pytest.approx(expected[-1][1], rel=2e-5)


def test_a_run_with_dropout_resumes_bit_for_bit(runs: Runs) -> None:
    base = runs.checkpoint(runs.trained("base", replace(LARGER, precision="fp32"), "cpu"), 3)
    tiny = replace(LARGER, init_from=base, lora={"rank": 4, "dropout": 0.25}, steps=4, checkpoint_every=2)
    runs.trained("straight", tiny)
    runs.write("halves", tiny)
    runs.train("halves", "--max-steps", "2").succeeded()
    runs.train("halves", "--resume").succeeded()
    assert runs.steps("halves") == runs.steps("straight")
    halves, straight = (runs.checkpoint(name, 4) / "optimizer.safetensors" for name in ("halves", "straight"))
    assert halves.read_bytes() == straight.read_bytes()


@pytest.mark.parametrize(
    "mistake", [{"break": "rope_rotate.bf16.e32"}, {"break": "add_partial_sums.f32"}, {"forget_waits": 1}], ids=str
)
def test_a_mistake_would_show_in_that_comparison(runs: Runs, mistake: dict[str, Any]) -> None:
    """A kernel that is wrong, or a stream that does not wait for the other one's copy."""
    tiny = Tiny(steps=2, checkpoint_every=1)
    runs.trained("right", tiny, "cpu")
    runs.having(**mistake).trained("wrong", tiny)
    assert max(errors(runs, "wrong", "right").values()) > 1.5 * TOLERANCE["bf16"][1]


def test_a_run_is_the_same_whatever_order_the_gpu_runs_in(runs: Runs) -> None:
    """Programs of a grid from last to first, and copies that come as early as they may, change no bit."""
    runs.trained("once", BF16)
    runs.having(order="reversed", schedule="others-early").trained("again", BF16)
    runs.having(schedule="early").trained("early", BF16)
    for other in ("again", "early"):
        assert runs.steps(other) == runs.steps("once")
        assert runs.state(other, 4) == runs.state("once", 4)


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_a_killed_run_resumes_bit_for_bit(runs: Runs, algorithm: str) -> None:
    """Also where other GEMM algorithms would be the fastest: the checkpoint has those of the first run."""
    tiny = Tiny(steps=6, checkpoint_every=2, algorithm=algorithm)
    runs.trained("straight", tiny)
    folder = runs.write("killed", tiny)
    process = runs.start("train", "--config", folder / "training.json", "--device", "cuda")
    assert process.stdout
    for line in process.stdout:
        if line.startswith("step 5/"):
            break
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    runs.having(timing=3).train("killed", "--resume").succeeded()
    assert runs.steps("killed") == runs.steps("straight")
    assert runs.state("killed", 6) == runs.state("straight", 6)


def test_a_resumed_run_writes_the_samples_of_a_straight_one(runs: Runs) -> None:
    """GEMMs of generation have algorithms of their own, which the first checkpoint already stores."""
    tiny = Tiny(steps=4, checkpoint_every=1)
    prompts = ("--override", 'runtime.evaluation.prompts=["def", "import os"]')
    tokens = ("--override", "runtime.evaluation.prompt_tokens=6")
    for name in ("straight", "resumed"):
        runs.write(name, tiny)
    runs.train("straight", *prompts, *tokens).succeeded()
    runs.train("resumed", *prompts, *tokens, "--max-steps", "2").succeeded()
    runs.having(timing=3).train("resumed", *prompts, *tokens, "--resume").succeeded()
    samples = runs.metrics("straight", "sample")
    assert [(row["step"], row["prompt"]) for row in samples] == [
        (n, p) for n in range(1, 5) for p in ("def", "import os")
    ]
    assert runs.metrics("resumed", "sample") == samples
    assert runs.state("resumed", 4) == runs.state("straight", 4)
    runs.trained("without", tiny)
    assert runs.steps("without") == runs.steps("straight"), "writing changes no step"


def test_a_run_records_what_its_gpu_does(runs: Runs, tmp_path: Path) -> None:
    """Also where the management library is missing, or does not know the GPU."""
    library = tmp_path / "nvml" / "libnvidia-ml.so.1"
    library.parent.mkdir()
    source = Path(__file__).parents[1] / "nvml_stand_in.c"
    command = ["cc", "-std=gnu11", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    path = f"{library.parent}{os.pathsep}{runs.emulator.environment()['LD_LIBRARY_PATH']}"
    state = "utilization=97,memory=34190917632,memory_used=30000000000,power=412500,power_limit=575000,"
    state += "celsius=71,sm_mhz=2400,slowed_by=64"
    own = "uuid=GPU-00000000-0000-0000-0000-000000000000"

    def gpu_rows(name: str, settings: str, path: str) -> list[dict[str, Any]]:
        runs.write(name, Tiny(steps=400, checkpoint_every=1000))
        every = ("--override", "runtime.utilization_every=1s", "--override", "runtime.evaluation.every_n_steps=null")
        environment = {"NVML_STAND_IN": settings, "LD_LIBRARY_PATH": path}
        process = runs.start(
            "train", "--config", runs.workspace.run_folder(name) / "training.json", "--device", "cuda", *every,
            environment=environment,
        )  # fmt: skip
        assert process.stdout
        for line in process.stdout:
            if line.startswith("step ") and len(runs.metrics(name, "utilization")) >= 3:
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
        return [{key: row[key] for key in row if key.startswith("gpu_")} for row in runs.metrics(name, "utilization")]

    known_values = {
        "gpu_utilization": 0.97, "gpu_memory_bytes": 30_000_000_000, "gpu_memory_total_bytes": 34_190_917_632,
        "gpu_power_watts": 412.5, "gpu_power_limit_watts": 575.0, "gpu_temperature_celsius": 71, "gpu_clock_mhz": 2400,
        "gpu_throttle": "thermal",
    }  # fmt: skip
    assert gpu_rows("known", f"{own},{state}", path)[0] == known_values
    advice = "the GPU is throttled (thermal) at 71 °C, its clock is 2400 MHz: improve its cooling"
    assert advice in runs.metrics("known", "advice")[0]["text"]
    assert gpu_rows("another", f"uuid=GPU-1,{state}", path)[0] == {}
    assert gpu_rows("unloaded", f"{own},{state},unloaded=1", path)[0] == {}


def test_another_fastest_algorithm_changes_bits(runs: Runs) -> None:
    """Fresh runs on days with other fastest GEMM algorithms differ; otherwise the test above would prove nothing."""
    runs.trained("one day", BF16)
    runs.having(timing=3).trained("another day", BF16)
    assert runs.state("one day", 4) != runs.state("another day", 4)


def test_deterministic_runs_have_equal_bits_whatever_is_fastest(runs: Runs) -> None:
    for name, timing in (("one day", 0), ("another day", 3)):
        runs.write(name, BF16)
        runs.having(timing=timing).train(name, "--override", "runtime.deterministic=true").succeeded()
    assert runs.state("one day", 4) == runs.state("another day", 4)


def test_variants_of_kernels_are_timed_and_kept(runs: Runs) -> None:
    """The emulated GPU takes longer the more blocks it is given: twice the keys per block are faster."""
    tiny = Tiny(hidden=128, sequence=128, steps=2, checkpoint_every=1)
    positions = ("--override", "model.max_position_embeddings=128")
    deterministic = ("--override", "runtime.deterministic=true")
    hopper = runs.having(gpu="NVIDIA H200", capability="9.0")

    def variants(name: str, step: int) -> dict[str, str]:
        choices = runs.trainer_state(name, step)["products"]["choices"]
        chosen_variants = {
            shape.split()[0]: text.split()[0] for shape, text in choices.items() if shape.startswith("attention")
        }
        return {kernel.removesuffix(".bf16.e64"): variant for kernel, variant in chosen_variants.items()}

    for name, expected, options in (("timed", "m64l128w8s2", ()), ("declared", "declared", deterministic)):
        runs.write(name, tiny)
        hopper.train(name, *positions, *options, "--max-steps", "1").succeeded()
        assert variants(name, 1) == {
            "attention_forward": "declared",
            "attention_backward_queries": "declared",
            "attention_backward_keys": expected,
        }
    hopper.train("timed", *positions, *deterministic, "--resume").succeeded()
    assert variants("timed", 2)["attention_backward_keys"] == "m64l128w8s2", "the checkpoint's, not the declared one"


def test_resuming_on_another_gpu_is_reported(runs: Runs) -> None:
    tiny = Tiny(steps=4, checkpoint_every=2)
    runs.write("moved", tiny)
    runs.train("moved", "--max-steps", "2").succeeded()
    other = runs.having(gpu="NVIDIA H200", capability="9.0")
    process = other.train("moved", "--resume").succeeded()
    assert "NVIDIA GeForce RTX 5090" in process.out + process.err
    assert "NVIDIA H200" in process.out + process.err
    assert [row[0] for row in runs.steps("moved")] == [1, 2, 3, 4]


def test_a_checkpoint_moves_between_gpu_and_cpu(runs: Runs) -> None:
    tiny = Tiny(steps=4, checkpoint_every=2, precision="fp32")
    straight = runs.steps(runs.trained("straight", tiny))
    for name, first, then in (("to cpu", "cuda", "cpu"), ("to GPU", "cpu", "cuda")):
        runs.write(name, tiny)
        runs.train(name, "--max-steps", "2", device=first).succeeded()
        runs.train(name, "--resume", device=then).succeeded()
        for (_, loss, _), (_, expected, _) in zip(runs.steps(name), straight, strict=True):
            assert loss == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("recompute", ["none", "selective", "block"])
def test_recomputing_changes_no_bit(runs: Runs, recompute: str) -> None:
    tiny = Tiny(steps=2, checkpoint_every=2)
    runs.write(recompute, tiny)
    override = ("--override", f"runtime.activation_recompute={recompute}")
    runs.train(recompute, *override).succeeded()
    runs.trained("usual", tiny)
    assert runs.steps(recompute) == runs.steps("usual")
    assert runs.state(recompute, 2) == runs.state("usual", 2)

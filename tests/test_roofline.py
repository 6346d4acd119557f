"""The roofline script: its counts against the trainer's, and docs/decisions/012 against its output."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import roofline
from orchestrator import _native
from roofline import GPUS, Model
from workspace import REPOSITORY

DOCUMENT = REPOSITORY / "docs" / "decisions" / "012-roofline-of-a-32-gb-gpu.md"
MODEL = Model()


def flops(*parts: str) -> float:
    launches = roofline.step(MODEL, 4, 2048)
    return sum(launch.count * launch.flops for launch in launches if launch.part in parts)


def test_the_model_matches_the_preset() -> None:
    text = (REPOSITORY / "configs" / "rtx5090_1b.yaml").read_text()
    config = {key: int(value) for key, value in re.findall(r"^  (\w+): (\d+)\b(?!\.)", text, re.MULTILINE)}
    assert MODEL.layers == config["num_layers"]
    assert (MODEL.hidden, MODEL.intermediate) == (config["hidden_size"], config["intermediate_size"])
    assert (MODEL.heads, MODEL.kv_heads) == (config["num_attention_heads"], config["num_key_value_heads"])
    assert (MODEL.vocab_size, MODEL.sequence) == (config["vocab_size"], config["sequence_length"])
    assert MODEL.sequences_per_step == config["sequences_per_step"]


def test_the_counts_match_the_trainer() -> None:
    padding = (MODEL.vocabulary - MODEL.vocab_size) * MODEL.hidden
    assert MODEL.parameters - padding == 1_318_832_128
    assert MODEL.flops_per_token == pytest.approx(8.416e9, rel=1e-4)


def test_launches_sum_to_mfu_plus_recomputed_scores() -> None:
    tokens = 4 * MODEL.sequence
    attention = 6 * MODEL.layers * MODEL.hidden * MODEL.sequence
    padded = 6 * MODEL.vocabulary * MODEL.hidden - 6 * MODEL.vocab_size * MODEL.hidden
    gemms = MODEL.flops_per_token - attention + padded
    assert flops("GEMMs", "head and loss") == pytest.approx(tokens * gemms, rel=1e-12)
    assert flops("attention") == pytest.approx(tokens * attention * 7 / 6, rel=1e-12)


def test_muon_takes_at_most_6_percent_of_a_step() -> None:
    muon = replace(MODEL, optimizer="muon")
    launches = [launch for launch in roofline.step(muon, 4, 2048) if launch.part == "optimizer"]
    tokens = MODEL.sequences_per_step * MODEL.sequence
    share = sum(launch.count * launch.flops for launch in launches) / (tokens * MODEL.flops_per_token)
    assert share == pytest.approx(0.049 / (1 - 0.049), rel=0.02), "as `plan` counts"
    gpu = GPUS["rtx5090"]
    adamw, ours = (roofline.total(model, gpu, 4, 2048).seconds for model in (MODEL, muon))
    assert 0.04 < ours / adamw - 1 < 0.06


def test_no_launch_exceeds_compute_or_bandwidth_peak() -> None:
    for gpu in GPUS.values():
        for launch in roofline.step(MODEL, 4, 2048):
            seconds = roofline.seconds(launch, gpu)
            assert seconds >= launch.count * launch.flops / gpu.flops
            assert seconds >= launch.count * launch.bytes / gpu.bytes_per_second


def test_slower_gemms_and_smaller_chunks_lower_mfu() -> None:
    for gpu in GPUS.values():
        best = roofline.total(MODEL, gpu, 4, 2048)
        assert best.mfu < 1
        assert roofline.total(MODEL, replace(gpu, gemm=gpu.gemm / 2), 4, 2048).mfu < best.mfu
        assert roofline.total(MODEL, gpu, 4, 64).mfu < best.mfu
        assert roofline.total(MODEL, gpu, 4, 2048, overlapped=False).mfu < best.mfu


def test_wave_efficiency_counts_the_last_wave() -> None:
    assert roofline.wave_efficiency((1280, 128), (128, 128), 10) == 1
    assert roofline.wave_efficiency((1408, 128), (128, 128), 10) == pytest.approx(11 / 20)
    assert roofline.wave_efficiency((64, 128), (128, 128), 1) == pytest.approx(0.5)
    assert roofline.best_wave_efficiency((1408, 128), 11) == 1


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_plan_predicts_the_same_step(optimizer: str) -> None:
    path = REPOSITORY / "configs" / "rtx5090_1b.yaml"
    words = ["plan", f"--config={path}", "--override=data.batch_size=4", "--gpu=rtx5090", "--json"]
    printed: list[str] = []
    assert _native.run_command([*words, f"--override=optimizer.algorithm={optimizer}"], printed.append, False) == 0
    plan = json.loads("".join(printed))
    expected = roofline.total(replace(MODEL, optimizer=optimizer), GPUS["rtx5090"], 4, 2048)
    assert plan["speed"]["step_seconds"][1] == pytest.approx(expected.seconds, rel=0.01)
    assert plan["speed"]["mfu"][1] == pytest.approx(expected.mfu, rel=0.01)


@pytest.mark.parametrize("gpu", ["rtx5090", "h200"])
def test_the_document_quotes_the_printed_tables(gpu: str) -> None:
    document = DOCUMENT.read_text()
    for name, section in roofline.SECTIONS.items():
        if (gpu, name) != ("h200", "tiles"):
            assert section(MODEL, GPUS[gpu], 4, 2048) in document, f"{name}: run benches/gpu/roofline.py --gpu {gpu}"

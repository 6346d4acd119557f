"""The roofline script: its counts against the model's, and the decision document against its output."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
from workspace import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benches" / "gpu"))

import roofline
from roofline import CARDS, Model

DOCUMENT = REPOSITORY / "docs" / "decisions" / "012-roofline-of-a-32-gb-gpu.md"
MODEL = Model()


def flops(*parts: str) -> float:
    launches = roofline.step(MODEL, 4, 2048)
    return sum(launch.count * launch.flops for launch in launches if launch.part in parts)


def test_the_model_is_the_preset_s() -> None:
    text = (REPOSITORY / "configs" / "rtx5090_1b.yaml").read_text()
    config = {key: int(value) for key, value in re.findall(r"^  (\w+): (\d+)\b(?!\.)", text, re.MULTILINE)}
    assert MODEL.layers == config["num_layers"]
    assert (MODEL.hidden, MODEL.intermediate) == (config["hidden_size"], config["intermediate_size"])
    assert (MODEL.heads, MODEL.kv_heads) == (config["num_attention_heads"], config["num_key_value_heads"])
    assert (MODEL.vocab_size, MODEL.sequence) == (config["vocab_size"], config["sequence_length"])
    assert MODEL.sequences_per_step == config["sequences_per_step"]


def test_the_counts_are_the_trainer_s() -> None:
    padding = (MODEL.vocabulary - MODEL.vocab_size) * MODEL.hidden
    assert MODEL.parameters - padding == 1_318_832_128
    assert MODEL.flops_per_token == pytest.approx(8.416e9, rel=1e-4)


def test_the_launches_compute_what_mfu_counts_and_attention_s_scores_again() -> None:
    tokens = 4 * MODEL.sequence
    attention = 6 * MODEL.layers * MODEL.hidden * MODEL.sequence
    padded = 6 * MODEL.vocabulary * MODEL.hidden - 6 * MODEL.vocab_size * MODEL.hidden
    products = MODEL.flops_per_token - attention + padded
    assert flops("GEMMs", "head and loss") == pytest.approx(tokens * products, rel=1e-12)
    assert flops("attention") == pytest.approx(tokens * attention * 7 / 6, rel=1e-12)


def test_no_launch_is_faster_than_its_arithmetic_or_its_bytes() -> None:
    for card in CARDS.values():
        for launch in roofline.step(MODEL, 4, 2048):
            seconds = roofline.seconds(launch, card)
            assert seconds >= launch.count * launch.flops / card.flops
            assert seconds >= launch.count * launch.bytes / card.bytes_per_second


def test_a_slower_part_costs_and_a_larger_chunk_does_not() -> None:
    for card in CARDS.values():
        best = roofline.total(MODEL, card, 4, 2048)
        assert best.mfu < 1
        assert roofline.total(MODEL, replace(card, product=card.product / 2), 4, 2048).mfu < best.mfu
        assert roofline.total(MODEL, card, 4, 64).mfu < best.mfu
        assert roofline.total(MODEL, card, 4, 2048, overlapped=False).mfu < best.mfu


def test_waves_count_the_tiles_of_the_last_one() -> None:
    assert roofline.waves((1280, 128), (128, 128), 10) == 1
    assert roofline.waves((1408, 128), (128, 128), 10) == pytest.approx(11 / 20)
    assert roofline.waves((64, 128), (128, 128), 1) == pytest.approx(0.5)
    assert roofline.best_waves((1408, 128), 11) == 1


@pytest.mark.parametrize("card", CARDS)
def test_the_document_quotes_what_the_script_prints(card: str) -> None:
    document = DOCUMENT.read_text()
    for name, section in roofline.SECTIONS.items():
        if (card, name) != ("h200", "tiles"):
            assert section(MODEL, CARDS[card], 4, 2048) in document, (
                f"{name}: run benches/gpu/roofline.py --card {card}"
            )

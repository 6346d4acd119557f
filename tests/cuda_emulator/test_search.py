"""Which GEMM algorithms a run chooses by timing them on the emulated GPU."""

from __future__ import annotations

from cuda_emulator.runs import Runs, Tiny

TINY = Tiny(steps=2, checkpoint_every=2)
# The number of the emulated library's first algorithm in the third word of those that a checkpoint keeps.
WORD_DIGITS, FIRST_ALGORITHM = 16, 67


def choices(runs: Runs, name: str) -> dict[str, str]:
    """Train a run; return the algorithm of each GEMM, as its checkpoint keeps it."""
    state = runs.trainer_state(runs.trained(name, TINY), 2)
    kept: dict[str, str] = state["products"]["choices"]
    return {shape: text for shape, text in kept.items() if not shape.startswith("attention")}


def numbers(chosen: dict[str, str]) -> set[int]:
    """Return the numbers of the algorithms."""
    words = [text[2 * WORD_DIGITS : 3 * WORD_DIGITS] for text in chosen.values()]
    return {int(word, 16) & 0xFFFFFFFF for word in words}


def test_settled_clocks_decide_between_algorithms(runs: Runs) -> None:
    steady = choices(runs, "steady")
    assert len(set(steady.values())) > 1
    assert choices(runs.having(boost=3), "boosted at first") == steady
    assert choices(runs.having(boost=1 << 30), "boosted") != steady


def test_an_algorithm_that_fails_in_the_second_round_is_dropped(runs: Runs) -> None:
    assert FIRST_ALGORITHM in numbers(choices(runs, "accepted"))
    # It runs twice briefly and four times in each round.
    assert FIRST_ALGORITHM not in numbers(choices(runs.having(refused=2 + 4 + 2), "refused"))

"""The sweep of attention's tiles knows what the trainer chooses among, and times PyTorch's kernels beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import sweep
import torch
import triton.testing

PROBLEM = sweep.Problem(1, 64, 4, 2, 64)


def do_bench(call: Callable[[], Any], **_options: Any) -> float:
    call()
    return 2.0


@pytest.mark.parametrize("operation", sweep.SOURCES)
@pytest.mark.parametrize("family", ["sm_80", "sm_80_small", "sm_90a"])
def test_the_declared_tile_comes_first(operation: str, family: str) -> None:
    chosen = sweep.choices(PROBLEM, operation, [family, "sm_80"])
    assert chosen[0] is sweep.declared(PROBLEM, operation, [family, "sm_80"])
    assert [one.candidate is None for one in chosen] == [True] + [False] * (len(chosen) - 1)
    assert len({sweep.Variant.of(one) for one in chosen}) == len(chosen)
    assert {one.name for one in chosen} == {f"{operation}.bf16.e64"}


def test_pytorch_is_timed_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    # The kernels themselves are for GPUs: here PyTorch chooses one.
    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    rows = list(sweep.pytorch_rows(torch, PROBLEM, "cpu"))
    names = [f"pytorch {kernel} {direction}" for kernel in ("cudnn", "flash") for direction in ("forward", "backward")]
    assert [row["kernel"] for row in rows] == names
    assert all(row["milliseconds"] == 2.0 and row["head_size"] == 64 for row in rows)
    matmul = 2 * 64 * 64 / 2 * 64 * 4  # the half of the scores that a causal mask leaves, times 4 heads
    assert [row["tflops"] * 2e9 for row in rows] == [pytest.approx(count * matmul) for count in (2, 5, 2, 5)]


def test_a_kernel_that_pytorch_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    rows = list(sweep.pytorch_rows(torch, PROBLEM, "cpu"))
    cudnn = [row for row in rows if "cudnn" in row["kernel"]]
    assert [row["milliseconds"] for row in cudnn] == [None, None]
    assert all(row["problem"] for row in cudnn)

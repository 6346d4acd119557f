"""The quality bench's rows in PyTorch: the same run as ours, resumable, and with fp8 operands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import peer
import pytest
import run
import torch
from peer import Peer
from quality import TINY, small_bench

ADAMW = replace(TINY, overrides=(*TINY.overrides, "optimizer.algorithm=adamw", "optimizer.learning_rate=1e-2"))
# With windows of one document, data ends in the middle: a target is missing.
FP32 = ADAMW.changed("fp32", "runtime.precision=fp32", "data.shuffle_buffer_size=1")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> run.Bench:
    return small_bench(tmp_path, monkeypatch)


@pytest.mark.parametrize(("row", "tolerance"), [(FP32, 1e-5), (ADAMW, 2e-4)], ids=["fp32", "bf16"])
def test_a_row_in_pytorch_is_the_same_run(bench: run.Bench, row: run.Row, tolerance: float) -> None:
    bench.train(row)
    Peer(bench, row).train()
    ours, theirs = bench.result(row.name), bench.result(f"{row.name}-pytorch")
    assert ours
    assert theirs
    assert [point[:2] for point in ours["curve"]] == [point[:2] for point in theirs["curve"]]
    for (*_, our_loss), (*_, their_loss) in zip(ours["curve"], theirs["curve"], strict=True):
        assert their_loss == pytest.approx(our_loss, rel=tolerance)
    assert ours["curve"][0][3] > 1.01 * ours["loss"], "the run learns"
    assert theirs["bits_per_byte"] == pytest.approx(ours["bits_per_byte"], rel=tolerance)
    assert theirs["flops"] == ours["flops"]
    assert theirs["complete"]
    assert (theirs["tokens"] < 6 * 4 * 32) or row is ADAMW


@pytest.mark.parametrize("key", peer.FOLLOWED)
def test_a_row_that_pytorch_would_not_follow_is_refused(bench: run.Bench, key: str) -> None:
    other = {
        "model.architecture": "qwen3", "model.base_hidden_size": 16, "optimizer.algorithm": "muon",
        "optimizer.embedding_learning_rate_scale": 10.0, "optimizer.z_loss": 1e-4, "scheduler.strategy": "cosine",
        "scheduler.batch_warmup_steps": 2,
    }  # fmt: skip
    row = ADAMW.changed("other", f"{key}={other[key]}")
    with pytest.raises(SystemExit, match=f"tiny-other: {key} is {other[key]}; rows in PyTorch have "):
        Peer(bench, row)


def test_a_stopped_peer_resumes_bit_for_bit(bench: run.Bench) -> None:
    whole = Peer(bench, FP32)
    whole.train()
    whole.saved.unlink()
    Peer(bench, FP32).train(max_steps=2)
    partial = bench.result(whole.name)
    assert partial
    assert not partial["complete"]
    second_peer = Peer(bench, FP32)
    assert second_peer.step == 2
    second_peer.train()
    assert second_peer.losses == whole.losses
    for one, other in zip(second_peer.trainer.masters, whole.trainer.masters, strict=True):
        assert torch.equal(one, other)


def test_fp8_gemms_round_their_operands() -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight, gradient = (torch.randn(shape, generator=generator) for shape in ((2, 5, 16), (8, 16), (2, 5, 8)))
    x.requires_grad_()
    weight.requires_grad_()
    product = peer.Fp8Linear.apply(x, weight)
    product.backward(gradient)

    def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scale = values.abs().max() / torch.finfo(dtype).max
        return (values / scale).to(dtype).double() * scale.double()

    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    x_fp8, weight_fp8, gradient_fp8 = rounded(x.data, e4m3), rounded(weight.data, e4m3), rounded(gradient, e5m2)
    assert x.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(product.data.double(), x_fp8 @ weight_fp8.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), gradient_fp8 @ weight_fp8, rtol=1e-5, atol=1e-5)
    expected = torch.einsum("btn,btk->nk", gradient_fp8, x_fp8)
    torch.testing.assert_close(weight.grad.double(), expected, rtol=1e-5, atol=1e-5)
    exact = x.data @ weight.data.T
    assert 1e-3 < ((product - exact).norm() / exact.norm()).item() < 0.1


def test_an_fp8_row_learns_about_as_much(bench: run.Bench) -> None:
    plain, fp8 = Peer(bench, ADAMW), Peer(bench, ADAMW, fp8=True)
    plain.train()
    fp8.train()
    assert fp8.name == "tiny-pytorch-fp8"
    assert plain.losses[-1] != fp8.losses[-1]
    assert fp8.losses[-1][2] == pytest.approx(plain.losses[-1][2], rel=0.01)

"""Losses and gradients of a chunk of logits against PyTorch in f64."""

import re
from pathlib import Path

import pytest
import torch
from head_cross_entropy import IGNORED, KERNELS
from interpreter import launch
from oracle import DTYPES, assert_near, by_name, exact, numbers, workspace

CASES = [(1, 10, 16), (6, 64, 64), (5, 4096, 4096), (7, 9001, 9024)]
"""Numbers of rows, vocabulary sizes, padded vocabulary sizes."""


def chunk(rows, vocab_size, width):
    logits = 3 * numbers(1, rows, width)
    logits[:, vocab_size:] = 1e6
    targets = torch.randint(0, vocab_size, (rows,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    targets[0], targets[-1] = 0, vocab_size - 1
    if rows > 2:
        targets[2] = IGNORED.value
    return logits, targets


def losses_of(logits, targets):
    return torch.nn.functional.cross_entropy(logits, targets.long(), reduction="none")


def gradients(logits, targets, scale, vocab_size, dtype, z_loss=0.0):
    """Return the kernel's losses, and its gradients written over the logits."""
    kernel = by_name(KERNELS, f"head_cross_entropy_gradients.{dtype}")
    rows, width = logits.shape
    losses, dlogits = workspace(rows), logits.view(DTYPES[dtype])
    launch(kernel, [rows], logits, targets, torch.tensor([scale]), z_loss, losses, dlogits, vocab_size, width)
    return losses, dlogits[:, :width]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab_size", "width"), CASES)
def test_losses_and_gradients_match_pytorch(rows, vocab_size, width, dtype):
    logits, targets = chunk(rows, vocab_size, width)
    leaf = exact(logits[:, :vocab_size])
    expected = losses_of(leaf, targets)
    (0.25 * expected.sum()).backward()
    alone = workspace(rows)
    launch(by_name(KERNELS, "head_cross_entropy_losses.f32"), [rows], logits, targets, alone, vocab_size, width)
    losses, dlogits = gradients(logits, targets, 0.25, vocab_size, dtype)
    assert_near(alone, expected, 1e-6)
    assert torch.equal(losses, alone)
    assert_near(dlogits[:, :vocab_size], leaf.grad)
    assert not dlogits[:, vocab_size:].any()
    assert rows <= 2 or not dlogits[2].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_z_loss_changes_gradients_only(dtype):
    logits, targets = chunk(7, 9001, 9024)
    leaf = exact(logits[:, :9001])
    expected = losses_of(leaf, targets)
    counted = targets != IGNORED.value
    (0.25 * (expected + 0.01 * leaf.logsumexp(1) ** 2)[counted].sum()).backward()
    losses, dlogits = gradients(logits, targets, 0.25, 9001, dtype, z_loss=0.01)
    assert_near(losses, expected, 1e-6)
    assert_near(dlogits[:, :9001], leaf.grad)


def test_extreme_logits_stay_finite():
    logits, targets = torch.zeros(3, 16), torch.tensor([0, 1, 2], dtype=torch.int32)
    logits[0, 0], logits[1, 0], logits[2] = 1e30, 200.0, -3e38
    expected = losses_of(logits.double(), targets)
    losses, dlogits = gradients(logits, targets, 1.0, 16, "f32")
    assert_near(losses, expected, 1e-6)
    assert dlogits.isfinite().all()


@pytest.mark.parametrize("target", [-1, 10, 15, -101])
def test_a_target_outside_the_vocabulary_gives_nan(target):
    logits, _ = chunk(2, 10, 16)
    losses, dlogits = gradients(logits, torch.tensor([target, 3], dtype=torch.int32), 1.0, 10, "bf16")
    assert losses.isnan().tolist() == [True, False]
    assert dlogits[:, :10].isnan().all(1).tolist() == [True, False]


def test_a_nan_or_infinite_logit_gives_a_nan_loss():
    for bad in (float("nan"), float("inf")):
        logits, targets = chunk(2, 10, 16)
        logits[0, 7] = bad
        losses, _ = gradients(logits, targets, 1.0, 10, "f32")
        assert losses.isnan().tolist() == [True, False]


def test_chunk_losses_add_up_and_round_once():
    kernel = by_name(KERNELS, "head_cross_entropy_total.f32")
    losses, scale = 1 + numbers(1, 3000).abs(), torch.tensor([1 / 3])
    total, loss = workspace(4), torch.tensor([0.7])
    expected = (loss.double() + scale.double() * losses.double().sum()).float()
    chunks = losses.split(1024)
    for index, part in enumerate(chunks):
        launch(kernel, [1], part, len(part), total, scale, loss, int(index == 0), int(index == len(chunks) - 1))
    assert torch.equal(loss, expected)


def test_compiled_kernel_writes_a_block_after_the_barrier():
    ptx = (Path(__file__).parent.parent / "ptx/sm_80/head_cross_entropy_gradients.bf16.ptx").read_text()
    order = re.findall(r"ld\.global\.v4|bar\.sync|st\.global\.v4", ptx)
    last_barrier = len(order) - 1 - order[::-1].index("bar.sync")
    assert set(order[last_barrier + 1 :]) == {"st.global.v4"}
    assert "st.global.v4" not in order[:last_barrier]

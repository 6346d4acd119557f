"""Write `tests/golden/<operation>.safetensors`: what PyTorch computes, in float64, for every operation.

Run `python tests/oracles/make_operations.py` in an environment with torch and safetensors. The inputs are drawn so
that float32 represents them exactly; ids and targets are int64, everything else but fp8 is float64. Axes: N tokens, B
sequences, T positions, D hidden, H query heads, K key/value heads, E head size, P = (H + 2K) * E packed QKV, I
intermediate, V padded vocabulary. `d<name>` is the gradient of a scalar with respect to <name>.

    embedding           table_VD ids_N out_ND dout_ND dtable_VD
    add_rms_norm        x_ND branch_ND weight_D epsilon sum_ND normed_ND inv_rms_N; dnormed_ND dresidual_ND (gradient
                        that reaches the sum past the norm) dsum_ND (total) dweight_D; plain_normed_ND
                        plain_inv_rms_N (the norm of x_ND alone)
    bias                y_NO bias_O sum_NO dy_NO dbias_O
    qk_norm             heads_3 = [H, K, E], epsilon; projected_NP weight_2E (queries', then keys') qkv_NP dqkv_NP (the
                        gradient of qkv_NP) dprojected_NP dweight_2E
    rope                heads_3 = [H, K, E], sequence_length, theta, first_position; qkv_NP rotated_NP drotated_NP
                        dqkv_NP; later_rotated_NP starts at first_position
    attention           heads_3, batch, sequence_length; qkv_NP out_NHE lse_BHT dout_NHE dqkv_NP (no RoPE inside)
    attention_documents the same and documents_N: a query sees the keys from this position on
    swiglu              gate_up_N2I out_NI dout_NI dgate_up_N2I
    linear              x_NI w_OI y_NO dy_NO dx_NI dw_OI dw_start_OI (value before accumulation) dw_total_OI
    head_cross_entropy  hidden_ND weight_VD targets_N (-100 = ignored) vocab_size scale losses_N loss_1 (= scale * sum)
                        dhidden_ND dweight_VD; columns from vocab_size on are padding
    grad_norm           grads norm_1 max_norm clip_scale
    adamw               hyper_4 = [beta1, beta2, epsilon, weight_decay], learning_rates_S, weight_start, grads_SX,
                        weights_SX (after every step), first_moments_SX, second_moments_SX
    muon                hyper_2 = [momentum, weight_decay], learning_rates_S; of a wide, a tall and a square matrix:
                        *_start_MN, *_grads_SMN, *_weights_SMN (after every step), *_momentum_MN (after the last), and
                        bf16.*_weights_MN (after the last) with the iteration in bfloat16, as PyTorch ships it
    fp8                 x_RC with zero blocks, subnormals and large rows; x_tensor_RC, x_128_RC, x_32_RC: rounded to
                        e4m3 with one scale, or one for each square of 128 or 32; every_32, every_128: the same of all
                        65,536 bfloat16 numbers as [2048, 32]. All bfloat16
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import FunctionType, SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import save_file

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
Tensors = dict[str, torch.Tensor]


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Return normal values that float32 holds exactly, as float64."""
    return (torch.randn(*shape, dtype=torch.float32) * scale).double()


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_(True)


def number(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def embedding() -> Tensors:
    table, dout = leaf(draw(29, 12)), draw(37, 12)
    ids = torch.randint(0, 29, (37,))
    out = F.embedding(ids, table)
    out.backward(dout)
    return {"table_VD": table, "ids_N": ids, "out_ND": out, "dout_ND": dout, "dtable_VD": gradient(table)}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    inv_rms = torch.rsqrt(x.pow(2).mean(-1) + epsilon)
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon), inv_rms


def add_rms_norm() -> Tensors:
    epsilon = 1e-5
    x, branch, weight = draw(23, 18), draw(23, 18), leaf((1 + draw(18, scale=0.1)).float().double())
    total = leaf(x + branch)
    normed, inv_rms = rms_norm(total, weight, epsilon)
    dnormed, dresidual = draw(23, 18), draw(23, 18)
    normed.backward(dnormed)
    plain_normed, plain_inv_rms = rms_norm(x, weight.detach(), epsilon)
    return {
        "x_ND": x, "branch_ND": branch, "weight_D": weight, "epsilon": number(epsilon), "sum_ND": total,
        "normed_ND": normed, "inv_rms_N": inv_rms, "dnormed_ND": dnormed, "dresidual_ND": dresidual,
        "dsum_ND": gradient(total) + dresidual, "dweight_D": gradient(weight),
        "plain_normed_ND": plain_normed, "plain_inv_rms_N": plain_inv_rms,
    }  # fmt: skip


def bias() -> Tensors:
    y, weight, dy = draw(23, 18), leaf(draw(18)), draw(23, 18)
    total = y + weight
    total.backward(dy)
    return {"y_NO": y, "bias_O": weight, "sum_NO": total, "dy_NO": dy, "dbias_O": gradient(weight)}


def qk_norm() -> Tensors:
    (h, k, e), epsilon = (6, 2, 10), 1e-5
    projected, weight = leaf(draw(21, (h + 2 * k) * e)), leaf((1 + draw(2 * e, scale=0.1)).float().double())
    query, key, values = projected.view(21, -1, e).split((h, k, k), 1)
    normed = [F.rms_norm(x, (e,), w, epsilon) for x, w in zip((query, key), weight.split(e), strict=True)]
    qkv, dqkv = torch.cat((*normed, values), 1).view(projected.shape), draw(*projected.shape)
    qkv.backward(dqkv)
    return {
        "heads_3": torch.tensor((h, k, e)), "epsilon": number(epsilon), "projected_NP": projected,
        "weight_2E": weight, "qkv_NP": qkv, "dqkv_NP": dqkv, "dprojected_NP": gradient(projected),
        "dweight_2E": gradient(weight),
    }  # fmt: skip


def rotate(qkv: torch.Tensor, heads: tuple[int, int, int], length: int, theta: float, first: int) -> torch.Tensor:
    h, k, e = heads
    rows = qkv.view(-1, length, h + 2 * k, e)
    inverse = theta ** (-torch.arange(0, e, 2, dtype=torch.float64) / e)
    angle = torch.outer(torch.arange(first, first + length, dtype=torch.float64), inverse)
    cos, sin = (torch.cat([f, f], -1)[None, :, None] for f in (angle.cos(), angle.sin()))
    q_and_k, v = rows[:, :, : h + k], rows[:, :, h + k :]
    left, right = q_and_k.chunk(2, -1)
    turned = q_and_k * cos + torch.cat([-right, left], -1) * sin
    return torch.cat([turned, v], 2).reshape(qkv.shape)


def rope() -> Tensors:
    heads, length, theta, first = (6, 2, 10), 7, 10_000.0, 5
    qkv, drotated = leaf(draw(3 * length, (6 + 4) * 10)), draw(3 * length, (6 + 4) * 10)
    rotated = rotate(qkv, heads, length, theta, 0)
    rotated.backward(drotated)
    return {
        "heads_3": torch.tensor(heads), "sequence_length": torch.tensor([length]), "theta": number(theta),
        "first_position": torch.tensor([first]), "qkv_NP": qkv, "rotated_NP": rotated, "drotated_NP": drotated,
        "dqkv_NP": gradient(qkv), "later_rotated_NP": rotate(qkv.detach(), heads, length, theta, first),
    }  # fmt: skip


def attention() -> Tensors:
    return attention_of((6, 2, 8), 2, 19, None)


def attention_documents() -> Tensors:
    lengths = ([5, 1, 70, 4], [80])
    begins = [
        torch.repeat_interleave(torch.tensor(one).cumsum(0) - torch.tensor(one), torch.tensor(one)) for one in lengths
    ]
    return attention_of((2, 1, 8), 2, 80, torch.stack(begins)) | {"documents_N": torch.cat(begins)}


def attention_of(heads: tuple[int, int, int], batch: int, length: int, begins_bt: torch.Tensor | None) -> Tensors:
    h, k, e = heads
    qkv = leaf(draw(batch * length, (h + 2 * k) * e))
    rows = qkv.view(batch, length, h + 2 * k, e).transpose(1, 2)
    q, keys, values = rows[:, :h], rows[:, h : h + k], rows[:, h + k :]
    hidden = torch.ones(length, length).triu(1).bool().expand(batch, 1, length, length)
    if begins_bt is not None:
        hidden = hidden | (torch.arange(length) < begins_bt[:, None, :, None])
    mask = None if begins_bt is None else ~hidden
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    out_nhe = out.transpose(1, 2).reshape(batch * length, h * e)
    scores = q @ keys.repeat_interleave(h // k, 1).transpose(-1, -2) / e**0.5
    scores = scores.masked_fill(hidden, float("-inf"))
    dout = draw(batch * length, h * e)
    out_nhe.backward(dout)
    return {
        "heads_3": torch.tensor([h, k, e]), "batch": torch.tensor([batch]), "sequence_length": torch.tensor([length]),
        "qkv_NP": qkv, "out_NHE": out_nhe, "lse_BHT": scores.logsumexp(-1), "dout_NHE": dout, "dqkv_NP": gradient(qkv),
    }  # fmt: skip


def swiglu() -> Tensors:
    gate_up, dout = leaf(draw(17, 2 * 21, scale=3.0)), draw(17, 21)
    gate, up = gate_up.chunk(2, -1)
    out = F.silu(gate) * up
    out.backward(dout)
    return {"gate_up_N2I": gate_up, "out_NI": out, "dout_NI": dout, "dgate_up_N2I": gradient(gate_up)}


def linear() -> Tensors:
    x, w, dy, start = leaf(draw(31, 22)), leaf(draw(18, 22)), draw(31, 18), draw(18, 22)
    y = F.linear(x, w)
    y.backward(dy)
    return {
        "x_NI": x, "w_OI": w, "y_NO": y, "dy_NO": dy, "dx_NI": gradient(x), "dw_OI": gradient(w),
        "dw_start_OI": start, "dw_total_OI": start + gradient(w),
    }  # fmt: skip


def head_cross_entropy() -> Tensors:
    vocab_size, padded = 37, 64
    hidden, weight = leaf(draw(26, 14)), leaf(draw(padded, 14))
    targets = torch.randint(0, vocab_size, (26,))
    targets[[0, 5, 6, 25]] = -100
    scale = 1.0 / 40
    losses = F.cross_entropy(hidden @ weight[:vocab_size].T, targets, ignore_index=-100, reduction="none")
    loss = losses.sum() * scale
    loss.backward()
    return {
        "hidden_ND": hidden, "weight_VD": weight, "targets_N": targets, "vocab_size": torch.tensor([vocab_size]),
        "scale": number(scale), "losses_N": losses, "loss_1": loss.reshape(1), "dhidden_ND": gradient(hidden),
        "dweight_VD": gradient(weight),
    }  # fmt: skip


def grad_norm() -> Tensors:
    parameter = leaf(draw(5003))
    parameter.grad = draw(5003, scale=0.3)
    grads = parameter.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_([parameter], 1.5)
    clip_scale = parameter.grad[0] / grads[0]
    return {"grads": grads, "norm_1": norm.reshape(1), "max_norm": number(1.5), "clip_scale": clip_scale.reshape(1)}


def adamw() -> Tensors:
    beta1, beta2, epsilon, decay, steps, size = 0.9, 0.95, 1e-8, 0.1, 6, 259
    rates, start, grads = torch.linspace(1e-3, 6e-3, steps).double(), draw(size), draw(steps, size)
    weight = leaf(start)
    optimizer = torch.optim.AdamW([weight], lr=1.0, betas=(beta1, beta2), eps=epsilon, weight_decay=decay)
    history: dict[str, list[torch.Tensor]] = {"weights_SX": [], "first_moments_SX": [], "second_moments_SX": []}
    for rate, grad in zip(rates, grads, strict=True):
        optimizer.param_groups[0]["lr"] = rate.item()
        weight.grad = grad.clone()
        optimizer.step()
        state = optimizer.state[weight]
        for name, value in zip(history, (weight, state["exp_avg"], state["exp_avg_sq"]), strict=True):
            history[name].append(value.detach().clone())
    return {
        "hyper_4": torch.tensor([beta1, beta2, epsilon, decay], dtype=torch.float64), "learning_rates_S": rates,
        "weight_start": start, "grads_SX": grads, **{name: torch.stack(values) for name, values in history.items()},
    }  # fmt: skip


@contextmanager
def newton_schulz_in(dtype: torch.dtype) -> Iterator[None]:
    """Let `torch.optim.Muon` run its own Newton-Schulz code in this precision instead of bfloat16."""
    module = torch.optim._muon
    shipped = module._zeropower_via_newtonschulz
    torch_of_dtype = SimpleNamespace(bfloat16=dtype, addmm=torch.addmm)
    module._zeropower_via_newtonschulz = FunctionType(shipped.__code__, {"torch": torch_of_dtype, "len": len})
    try:
        yield
    finally:
        module._zeropower_via_newtonschulz = shipped


def muon() -> Tensors:
    momentum, decay, steps = 0.95, 0.1, 20
    rates = torch.linspace(2e-2, 1e-3, steps).double()
    tensors = {"hyper_2": torch.tensor([momentum, decay], dtype=torch.float64), "learning_rates_S": rates}
    for name, shape in {"wide": (8, 24), "tall": (24, 8), "square": (12, 12)}.items():
        start, grads = draw(*shape), draw(steps, *shape)

        def run(start: torch.Tensor = start, grads: torch.Tensor = grads) -> tuple[torch.Tensor, torch.Tensor]:
            weight, history = leaf(start), []
            optimizer = torch.optim.Muon(
                [weight], weight_decay=decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
            )
            for rate, grad in zip(rates, grads, strict=True):
                optimizer.param_groups[0]["lr"] = rate.item()
                weight.grad = grad.clone()
                optimizer.step()
                history.append(weight.detach().clone())
            return torch.stack(history), optimizer.state[weight]["momentum_buffer"]

        with newton_schulz_in(torch.float64):
            weights, buffer = run()
        tensors |= {f"{name}_start_MN": start, f"{name}_grads_SMN": grads, f"{name}_weights_SMN": weights}
        tensors |= {f"{name}_momentum_MN": buffer, f"bf16.{name}_weights_MN": run()[0][-1]}
    return tensors


def e4m3(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round finite numbers to e4m3 by its definition, and check PyTorch's own conversion."""
    exponents = np.maximum(np.frexp(values)[1] - 1, -6)
    spacing = np.ldexp(1.0, exponents - 3)
    rounded = np.copysign(np.rint(np.abs(values) / spacing) * spacing, values)
    assert np.array_equal(rounded, torch.from_numpy(values).to(torch.float8_e4m3fn).double().numpy())
    return rounded


def in_fp8(x: torch.Tensor, edge: int) -> torch.Tensor:
    """Round each square of so many rows and columns to e4m3 times a power of two, in float64."""
    values = x.double().numpy()
    out = np.full_like(values, np.nan)
    for row, column in product(range(0, values.shape[0], edge), range(0, values.shape[1], edge)):
        block = (slice(row, row + edge), slice(column, column + edge))
        if np.isfinite(values[block]).all():
            largest = np.abs(values[block]).max()
            exponent = -120 if largest == 0 else np.ceil(np.log2(largest / 448)).clip(-120, 120)
            scale = np.ldexp(1.0, int(exponent))
            assert largest <= 448 * scale
            out[block] = e4m3(values[block] / scale) * scale
    rounded = torch.from_numpy(out).bfloat16()
    assert torch.equal(rounded.double().nan_to_num(), torch.from_numpy(out).nan_to_num())
    return rounded


def fp8() -> Tensors:
    x = torch.randn(200, 270)
    x[:32, 64:96] = 0  # a block of zeros
    x[100:132] *= 1e-38  # among them subnormal numbers
    x[7], x[180] = x[7] * 1e4, x[180] * 1e30
    x = x.bfloat16()
    every = torch.arange(65_536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).reshape(2048, 32)
    rounded = {f"x_{name}_RC": in_fp8(x, edge) for name, edge in {"tensor": 1000, "128": 128, "32": 32}.items()}
    return {"x_RC": x, **rounded, "every_32": in_fp8(every, 32), "every_128": in_fp8(every, 128)}


OPERATIONS = (
    embedding, add_rms_norm, bias, qk_norm, rope, attention, attention_documents, swiglu, linear, head_cross_entropy,
    grad_norm, adamw, muon, fp8,
)  # fmt: skip


def fixture(operation: Callable[[], Tensors]) -> Tensors:
    """Return the tensors of one operation, from the same seed whatever ran before."""
    torch.manual_seed(20_261_121)
    return {name: tensor.detach().contiguous().clone() for name, tensor in operation().items()}


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for operation in OPERATIONS:
        path = GOLDEN / f"{operation.__name__}.safetensors"
        save_file(fixture(operation), path)
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()

"""Attention against PyTorch in f64. The error is at most 1.5 times that of PyTorch in the same type."""

from dataclasses import dataclass
from itertools import product, zip_longest

import attention
import attention_backward
import attention_decode
import pytest
import torch
from interpreter import launch

BF16, F32 = torch.bfloat16, torch.float32
FAMILIES = {"sm_80": ["sm_80"], "sm_80_small": ["sm_80_small", "sm_80"], "sm_90a": ["sm_90a", "sm_80"]}
DECLARED = [*attention.KERNELS, *attention_backward.KERNELS, *attention_decode.KERNELS]
KERNELS = {(one.name, one.family, one.candidate): one for one in DECLARED}


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    size: int

    @property
    def packed_width(self):
        return (self.heads + 2 * self.kv_heads) * self.size

    @property
    def query_width(self):
        return self.heads * self.size

    @property
    def arguments(self):
        return self.heads, self.kv_heads, self.size // 8


def kernel(operation, dtype, heads, family="sm_80", documents=False):
    """Return the kernel that a GPU of this family runs without timing."""
    columns = max(32, 1 << (heads.size - 1).bit_length())
    exact = columns == 32 or (columns == heads.size and dtype == BF16 and not operation.startswith("attention_decode"))
    name = (
        f"{operation}.{'bf16' if dtype == BF16 else 'f32'}.e{columns}{'' if exact and heads.size == columns else 'm'}"
    )
    name += ".documents" if documents else ""
    return next(KERNELS[name, one, None] for one in FAMILIES[family] if (name, one, None) in KERNELS)


def tiles(length, rows):
    return -(-length // rows)


def run(qkv, dout, heads, batch, documents=None, family="sm_80", candidates=()):
    """Return out, lse, dqkv; what no kernel writes stays NaN. `candidates` replace the kernels of their name."""
    tokens, dtype = len(qkv), qkv.dtype
    length = tokens // batch
    out = torch.full((tokens, heads.query_width), torch.nan, dtype=dtype)
    lse, statistics = (torch.full((batch, heads.heads, rows, length), torch.nan) for rows in (1, 2))
    lse = lse.squeeze(2)
    dqkv = torch.full_like(qkv, torch.nan)
    begins = torch.zeros(tokens, dtype=torch.int32) if documents is None else documents
    sizes = (length, *heads.arguments, heads.size**-0.5)
    candidates_by_name = {one.name: one for one in candidates}
    forward, queries, keys = (
        candidates_by_name.get(one.name, one)
        for direction in ("forward", "backward_queries", "backward_keys")
        for one in [kernel(f"attention_{direction}", dtype, heads, family, documents is not None)]
    )

    def grid(heads, kernel, rows):
        return [batch * heads, tiles(length, kernel.constants[rows])]

    launch(forward, grid(heads.heads, forward, "BLOCK_M"), qkv, begins, out, lse, *sizes)
    launch(queries, grid(heads.heads, queries, "BLOCK_M"), qkv, begins, out, lse, dout, dqkv, statistics, *sizes)
    launch(keys, grid(heads.kv_heads, keys, "BLOCK_L"), qkv, begins, dout, dqkv, statistics, *sizes)
    return out, lse, dqkv


def pytorch(qkv, dout, heads, batch, dtype, documents=None):
    """Return out, lse, dqkv by scaled_dot_product_attention and autograd."""
    leaf = qkv.to(dtype, copy=True).requires_grad_()
    length = len(qkv) // batch
    parts = leaf.view(batch, length, -1, heads.size).transpose(1, 2)
    q, k, v = parts.split([heads.heads, heads.kv_heads, heads.kv_heads], 1)
    k, v = (x.repeat_interleave(heads.heads // heads.kv_heads, 1) for x in (k, v))
    position = torch.arange(length)
    visible = (position[None, :] <= position[:, None]).expand(batch, 1, length, length)
    if documents is not None:
        visible = visible & (position >= documents.view(batch, 1, length, 1))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    out = out.transpose(1, 2).reshape(len(qkv), -1)
    out.backward(dout.to(dtype))
    scores = (q @ k.mT * heads.size**-0.5).masked_fill(~visible, -torch.inf)
    return out.detach(), scores.logsumexp(-1).detach(), leaf.grad


def inputs(heads, tokens, dtype, spread=1.0):
    generator = torch.Generator().manual_seed(0)
    qkv = spread * torch.randn(tokens, heads.packed_width, generator=generator)
    return qkv.to(dtype), torch.randn(tokens, heads.query_width, generator=generator).to(dtype)


def error(value, exact):
    """Return the relative error in norm; the absolute one where the exact norm is below 1."""
    return ((value.double() - exact).norm() / exact.norm().clamp(min=1.0)).item()


def split(dqkv, heads):
    """Return dq, dk, dv apart: an error in the smaller ones must not hide behind the larger."""
    return dqkv.split([heads.query_width, *2 * [heads.kv_heads * heads.size]], 1)


def check(heads, batch, length, dtype, documents=None, family="sm_80", spread=1.0, candidates=()):
    qkv, dout = inputs(heads, batch * length, dtype, spread)
    out, lse, dqkv = run(qkv, dout, heads, batch, documents, family, candidates)
    exact_out, exact_lse, exact_dqkv = pytorch(qkv, dout, heads, batch, torch.float64, documents)
    assert ((lse - exact_lse).abs() < 5e-7 * (1 + exact_lse.abs())).all()
    same_out, _, same_dqkv = pytorch(qkv, dout, heads, batch, dtype, documents)
    for name, ours, theirs, exact in zip(
        ("out", "dq", "dk", "dv"),
        (out, *split(dqkv, heads)),
        (same_out, *split(same_dqkv, heads)),
        (exact_out, *split(exact_dqkv, heads)),
        strict=True,
    ):
        bound = 1e-6 if dtype == F32 else max(1e-6, 1.5 * error(theirs, exact))
        assert error(ours, exact) <= bound, (name, error(ours, exact), error(theirs, exact))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("size", [32, 40, 64, 96, 128])
def test_every_head_size_matches_pytorch(size, dtype):
    check(Heads(4, 2, size), 2, 77 if dtype == BF16 else 37, dtype)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [64, 128])
def test_every_family_matches_pytorch(family, size):
    check(Heads(2, 1, size), 1, 275, BF16, family=family)


def candidates_together():
    """Return each family's candidates of the same head size in sets that run together, each in one set at least."""
    by_case = {}
    for one in DECLARED:
        if one.candidate:
            case = one.family, one.constants["BLOCK_E"], one.constants["DOCUMENTS"]
            by_case.setdefault(case, {}).setdefault(one.name, []).append(one)
    return [
        pytest.param(*case, together, id=f"{case[0]}-{case[1]}{'-documents' if case[2] else ''}-{index}")
        for case, by_name in by_case.items()
        for index, together in enumerate(zip_longest(*by_name.values()))
    ]


@pytest.mark.parametrize(("family", "size", "documents", "candidates"), candidates_together())
def test_candidates_match_pytorch(family, size, documents, candidates):
    begins = documents_of([5, 123, 1, 130, 16]) if documents else None
    check(Heads(2, 1, size), 1, 275, BF16, begins, family, candidates=[one for one in candidates if one])


def test_every_operation_has_candidates_on_every_gpu():
    for family, operation in product(FAMILIES, ("forward", "backward_queries", "backward_keys")):
        names = [kernel(f"attention_{operation}", BF16, Heads(2, 1, 128), family)]
        names += [kernel("attention_backward_queries", BF16, Heads(2, 1, 64), family)]
        for declared in names:
            assert any(one.candidate and (one.name, one.family) == (declared.name, declared.family) for one in DECLARED)


@pytest.mark.parametrize("size", [64, 128])
def test_packed_documents_match_pytorch_on_hopper(size):
    check(Heads(2, 1, size), 1, 275, BF16, documents_of([5, 123, 1, 130, 16]), "sm_90a")


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (6, 2)])
def test_groups_of_any_size_share_their_keys(heads, kv_heads):
    check(Heads(heads, kv_heads, 64), 2, 70, BF16)


@pytest.mark.parametrize("length", [1, 16, 63, 64, 65, 129])
def test_sequences_of_any_length_match_pytorch(length):
    check(Heads(1, 1, 64), 3, length, BF16)
    check(Heads(1, 1, 32), 2, min(length, 33), F32)


def test_scores_far_apart_match_pytorch():
    check(Heads(2, 1, 64), 1, 100, BF16, spread=6.0)


def documents_of(*sequences):
    """Return for every token where its document begins, from the documents' lengths."""
    rows = [
        torch.repeat_interleave(torch.tensor(lengths).cumsum(0) - torch.tensor(lengths), torch.tensor(lengths))
        for lengths in sequences
    ]
    return torch.cat(rows).to(torch.int32)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("size", [32, 64, 96])
def test_packed_documents_attend_to_themselves_only(size, dtype):
    # Some documents begin at the last key of a tile.
    documents = documents_of([5, 60, 1, 40, 34], [63, 77]) if dtype == BF16 else documents_of([5, 30, 1, 14], [31, 19])
    check(Heads(2, 1, size), 2, len(documents) // 2, dtype, documents)


def test_tiles_before_a_document_are_not_read():
    heads, documents = Heads(2, 1, 64), documents_of([128, 70])
    qkv, dout = inputs(heads, 198, BF16)
    clean = run(qkv, dout, heads, 1, documents)
    qkv[:128] = dout[:128] = torch.nan
    with_nan = run(qkv, dout, heads, 1, documents)
    for before, after in zip(clean, with_nan, strict=True):
        positions = 2 if before.dim() == 3 else 0
        assert torch.equal(*(result.narrow(positions, 128, 70) for result in (before, after)))


def test_one_document_equals_none_bitwise():
    heads = Heads(2, 1, 32)
    qkv, dout = inputs(heads, 100, BF16)
    none, one = run(qkv, dout, heads, 1), run(qkv, dout, heads, 1, documents_of([100]))
    assert all(torch.equal(a, b) for a, b in zip(none, one, strict=True))


def attend(rows, keys, values, past, heads, splits):
    """Return the output of rows whose keys and values are in the caches; `splits` = 0 is the kernel without splits."""
    new, sizes = len(rows), (past, *heads.arguments, heads.size**-0.5)
    out = torch.full((new, heads.query_width), torch.nan, dtype=rows.dtype)
    one = kernel(f"attention_decode{'_split' if splits else ''}", rows.dtype, heads)
    grid = [heads.kv_heads, tiles(new * heads.heads // heads.kv_heads, one.constants["BLOCK_M"])]
    if not splits:
        launch(one, grid, rows, keys, values, out, new, *sizes)
        return out
    partial = torch.full((splits, new, heads.heads, heads.size), torch.nan)
    row_max, row_sum = torch.full((2, splits, new, heads.heads), torch.nan)
    launch(one, [*grid, splits], rows, keys, values, partial, row_max, row_sum, new, *sizes)
    columns = max(32, 1 << (heads.size - 1).bit_length())
    reduce = KERNELS[f"attention_decode_reduce.{'bf16' if rows.dtype == BF16 else 'f32'}.e{columns}", "sm_80", None]
    launch(reduce, [new * heads.heads], partial, row_max, row_sum, out, splits, heads.size // 8)
    return out


def decode(qkv, heads, pieces, splits=0):
    """Return the output of a sequence decoded in pieces, with caches that held NaN before."""
    capacity, width = sum(pieces) + 3, heads.kv_heads * heads.size
    keys, values = torch.full((2, capacity, width), torch.nan, dtype=qkv.dtype)
    outputs, past = [], 0
    append = KERNELS[f"attention_append.{'bf16' if qkv.dtype == BF16 else 'f32'}", "sm_80", None]
    for new in pieces:
        rows = qkv[past : past + new].clone()
        launch(append, [new], rows, keys, values, past, *heads.arguments)
        outputs.append(attend(rows, keys, values, past, heads, splits))
        past += new
    assert keys[past:].isnan().all() and values[past:].isnan().all()
    return torch.cat(outputs)


def check_decoding(heads, pieces, dtype, splits=0, spread=1.0):
    qkv, dout = inputs(heads, sum(pieces), dtype, spread)
    exact, _, _ = pytorch(qkv, dout, heads, 1, torch.float64)
    same, _, _ = pytorch(qkv, dout, heads, 1, dtype)
    bound = 1e-6 if dtype == F32 else 1.5 * error(same, exact)
    assert error(decode(qkv, heads, pieces, splits), exact) <= bound


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("size", [32, 40, 64, 128])
def test_decoding_in_pieces_matches_pytorch(size, dtype):
    check_decoding(Heads(6, 2, size), [70, 1, 1, 13, 1], dtype)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("size", [32, 40, 64, 128])
def test_decoding_with_split_keys_matches_pytorch(size, dtype):
    # Splits of one tile, of two and of none, of which rows see no key, some or all.
    check_decoding(Heads(6, 2, size), [70, 1, 13, 1, 60, 1], dtype, splits=3)


@pytest.mark.parametrize("splits", [1, 64])
def test_any_number_of_splits_matches_pytorch(splits):
    check_decoding(Heads(4, 1, 64), [66, 1, 2], BF16, splits)


def test_splits_with_scores_far_apart_match_pytorch():
    check_decoding(Heads(2, 1, 64), [129, 1], BF16, 4, spread=6.0)

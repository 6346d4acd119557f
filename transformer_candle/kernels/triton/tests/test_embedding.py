"""Rows gathered by id, and gradients added in the order of the tokens."""

import pytest
import torch
from embedding import KERNELS
from interpreter import launch
from oracle import DTYPES, blocks, by_name, numbers

SIZES = [(1, 16), (7, 48), (300, 1040)]
ROWS = 50


def ids_of(tokens):
    ids = torch.randint(0, ROWS, (tokens,), generator=torch.Generator().manual_seed(tokens))
    ids[ids % 3 == 0] = 5
    return ids.to(torch.uint32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_forward_gathers_the_rows_of_the_ids(tokens, width, dtype):
    kernel = by_name(KERNELS, f"embedding_forward.{dtype}")
    table, ids = numbers(1, ROWS, width, dtype=DTYPES[dtype]), ids_of(tokens)
    out = torch.zeros(tokens, width, dtype=DTYPES[dtype])
    launch(kernel, [tokens, blocks(width, kernel.constants["BLOCK"])], table, ids, out, ROWS, width)
    assert torch.equal(out, table[ids.long()])


def backward(ids, dout, dtable, dtype):
    tokens, width = dout.shape
    chain, kernel = by_name(KERNELS, "embedding_chain.u32"), by_name(KERNELS, f"embedding_backward.{dtype}")
    first, following = torch.full((2, tokens), -7, dtype=torch.int32)
    launch(chain, [blocks(tokens, chain.constants["BLOCK"])], ids, first, following, tokens)
    grid = [tokens, blocks(width, kernel.constants["BLOCK"])]
    launch(kernel, grid, ids, dout, first, following, dtable, tokens, len(dtable), width)
    return first, following


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_backward_adds_in_token_order_bitwise(tokens, width, dtype):
    ids, dout = ids_of(tokens), numbers(2, tokens, width, dtype=DTYPES[dtype])
    dtable = numbers(3, ROWS, width)
    expected = dtable.clone()
    for id_, row in zip(ids.tolist(), dout.float(), strict=True):
        expected[id_] += row
    backward(ids, dout, dtable, dtype)
    assert torch.equal(dtable, expected)


def test_the_chain_links_each_token_to_the_next_of_its_id():
    ids = torch.tensor([4, 2, 4, 4, 9, 2], dtype=torch.uint32)
    first, following = backward(ids, torch.ones(6, 16), torch.zeros(10, 16), "f32")
    assert first.tolist() == [1, 1, 0, 0, 1, 0]
    assert following.tolist() == [2, 5, 3, 6, 6, 6]


def test_an_id_outside_the_table_gives_nan_and_no_gradient():
    kernel = by_name(KERNELS, "embedding_forward.f32")
    ids = torch.tensor([1, 4, 2**32 - 1, 3], dtype=torch.uint32)
    out = torch.zeros(4, 16)
    launch(kernel, [4, 1], torch.ones(4, 16), ids, out, 4, 16)
    assert out.isnan().all(1).tolist() == [False, True, True, False]
    guarded = torch.zeros(9, 16)
    backward(ids, torch.ones(4, 16), guarded[:4], "f32")
    assert guarded.sum(1).tolist() == [0, 16, 0, 16, 0, 0, 0, 0, 0]

"""Casts, bitwise, on every bf16 pattern."""

import numpy as np
import torch
from cast import KERNELS
from interpreter import launch
from oracle import blocks, by_name


def patterns():
    """Return every high half with the low halves around which rounding changes; not a multiple of a block."""
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    bits = (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | low).reshape(-1)[3:]
    return torch.from_numpy(bits.view(np.int32).copy()).view(torch.float32)


def run(name, *tensors):
    kernel, elements = by_name(KERNELS, name), len(tensors[0])
    launch(kernel, [blocks(elements, kernel.constants["BLOCK"])], *tensors, elements)


def test_narrowing_rounds_to_even_and_widening_is_exact():
    source = patterns()
    narrow, wide = torch.zeros(len(source), dtype=torch.bfloat16), torch.zeros(len(source))
    run("cast_narrow.bf16", source, narrow)
    numbers = ~source.isnan()
    assert torch.equal(narrow[numbers].view(torch.int16), source[numbers].bfloat16().view(torch.int16))
    assert narrow[~numbers].isnan().all()
    run("cast_widen.f32", narrow, wide)
    assert torch.equal(wide.view(torch.int32), narrow.view(torch.int16).int() << 16)


def test_split_master_weights_join_bitwise():
    master = patterns()
    weight, low_bits = torch.zeros(len(master), dtype=torch.bfloat16), torch.zeros(len(master), dtype=torch.int16)
    joined = torch.zeros(len(master))
    run("cast_split.bf16", master, weight, low_bits)
    bits = master.view(torch.int32).long() & 0xFFFFFFFF
    high = ((bits + 0x8000) >> 16) & 0xFFFF
    assert torch.equal(weight.view(torch.int16).long() & 0xFFFF, high)
    assert torch.equal(low_bits.long() & 0xFFFF, bits & 0xFFFF)
    run("cast_join.f32", weight, low_bits, joined)
    assert torch.equal(joined.view(torch.int32), master.view(torch.int32))

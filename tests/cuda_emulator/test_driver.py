"""The emulated driver keeps the order, the memory and the rules of a real one."""

from __future__ import annotations

import ctypes
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from cuda_emulator.direct import Cuda, Failed, Pinned, floats, run
from cuda_emulator.library import KERNELS, Emulator

INVALID_VALUE, OUT_OF_MEMORY, NOT_READY, ILLEGAL_ADDRESS, LAUNCH_FAILED = 1, 2, 600, 700, 719
NO_BINARY, INVALID_PTX, UNSUPPORTED_PTX_VERSION = 209, 218, 222
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 900, 901
KIB, MIB = 1 << 10, 1 << 20


def test_memory_is_poisoned_until_written_and_gone_when_freed(emulator: Emulator) -> None:
    def body(cuda: Cuda) -> None:
        address = cuda.allocate(1000)
        assert cuda.read(address, 1000) == b"\xff" * 1000
        cuda.write(address, bytes(range(250)) * 4)
        assert cuda.read(address, 1000) == bytes(range(250)) * 4
        cuda.free(address)
        assert cuda.synchronize() == 0
        with pytest.raises(Failed) as failed:
            cuda.read(address, 1000)
        assert failed.value.code == INVALID_VALUE
        with pytest.raises(Failed):
            cuda.free(address)

    run(emulator, body)


def test_free_memory_is_reported_and_not_exceeded(emulator: Emulator) -> None:
    def body(cuda: Cuda) -> None:
        def available() -> int:
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            cuda.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
            assert total.value == 1 << 30
            return free.value

        assert available() == (1 << 30) - (64 << 20) - (100 << 20)
        address = cuda.allocate(500 * MIB)
        assert available() <= (1 << 30) - (664 << 20)
        with pytest.raises(Failed) as failed:
            cuda.allocate(500 * MIB)
        assert failed.value.code == OUT_OF_MEMORY
        # What was freed on the stream can be had at once.
        cuda.free(address)
        cuda.allocate(600 * MIB)

    run(emulator.having(used=100 << 20), body)


def test_nothing_happens_before_it_is_waited_for(emulator: Emulator) -> None:
    def body(cuda: Cuda) -> None:
        source, staging = Pinned(cuda, 4), Pinned(cuda, 4)
        source.bytes.raw = b"old."
        address = cuda.allocate(4)
        cuda.call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), source.address, ctypes.c_size_t(4), cuda.stream)
        cuda.call("cuMemcpyDtoHAsync_v2", staging.address, ctypes.c_uint64(address), ctypes.c_size_t(4), cuda.stream)
        source.bytes.raw = b"new."
        assert staging.bytes.raw == b"\xff" * 4
        assert cuda.synchronize() == 0
        assert staging.bytes.raw == b"new."

    run(emulator, body)


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_sees_another_ones_work_only_after_its_event(emulator: Emulator, waits: bool) -> None:
    def body(cuda: Cuda) -> bytes:
        other = cuda.new_stream()
        source, target = cuda.upload(b"done"), cuda.allocate(4)
        cuda.call("cuMemsetD8Async", ctypes.c_uint64(target), 0, ctypes.c_size_t(4), cuda.stream)
        assert cuda.synchronize() == 0
        cuda.copy(target, source, 4, other)
        event = cuda.new_handle("cuEventCreate", 0)
        cuda.call("cuEventRecord", event, other)
        if waits:
            cuda.call("cuStreamWaitEvent", cuda.stream, event, 0)
        return cuda.read(target, 4)

    assert run(emulator, body) == (b"done" if waits else b"\0" * 4)
    # The other extreme: nothing is ever late.
    assert run(emulator.having(schedule="early"), body) == b"done"


def test_an_early_copy_overtakes_what_does_not_hold_it_back(emulator: Emulator) -> None:
    def body(cuda: Cuda) -> bytes:
        other = cuda.new_stream()
        staging, target, fresh = cuda.upload(b"old."), cuda.allocate(4), cuda.upload(b"new.")
        assert cuda.synchronize() == 0
        cuda.copy(target, staging, 4, cuda.stream)
        cuda.copy(staging, fresh, 4, other)
        return cuda.read(target, 4)

    assert run(emulator, body) == b"old."
    assert run(emulator.having(schedule="others-early"), body) == b"new."


def test_events_tell_the_gpus_own_time(emulator: Emulator) -> None:
    def body(cuda: Cuda) -> float:
        start, end = cuda.new_handle("cuEventCreate", 0), cuda.new_handle("cuEventCreate", 0)
        milliseconds = ctypes.c_float()
        cuda.call("cuEventRecord", start, cuda.stream)
        address = cuda.allocate(25 * MIB)
        cuda.call("cuMemsetD8Async", ctypes.c_uint64(address), 0, ctypes.c_size_t(25 * MIB), cuda.stream)
        cuda.call("cuEventRecord", end, cuda.stream)
        elapsed = ctypes.byref(milliseconds), start, end
        assert cuda.code("cuEventElapsedTime_v2", *elapsed) == NOT_READY
        assert cuda.code("cuEventQuery", end) == NOT_READY
        cuda.call("cuEventSynchronize", end)
        cuda.call("cuEventElapsedTime_v2", *elapsed)
        return milliseconds.value

    assert run(emulator, body) == pytest.approx(1.05, abs=0.01)


def test_a_graph_does_again_what_was_recorded(emulator: Emulator) -> None:
    def body(cuda: Cuda) -> None:
        source = Pinned(cuda, 4)
        source.bytes.raw = b"one."
        first, second = cuda.allocate(4), cuda.allocate(4)

        def record() -> None:
            cuda.call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(first), source.address, ctypes.c_size_t(4), cuda.stream)
            cuda.copy(second, first, 4, cuda.stream)

        graph = cuda.recorded(record)
        assert cuda.read(second, 4) == b"\xff" * 4
        for text in (b"one.", b"two."):
            source.bytes.raw = text
            cuda.call("cuGraphLaunch", graph, cuda.stream)
            assert cuda.read(second, 4) == text
        assert cuda.counters()["graph_launches"] == 2
        assert cuda.counters()["captures"] == 1

    run(emulator, body)


@pytest.mark.parametrize("call", ["allocate", "synchronize", "read", "write", "module", "context"])
def test_what_cannot_be_recorded_ends_the_recording(emulator: Emulator, kernels: Path, call: str) -> None:
    ptx = next(kernels.glob("sm_80/*.ptx")).read_text()

    def body(cuda: Cuda) -> None:
        address = cuda.allocate(4)
        calls: dict[str, Callable[[], object]] = {
            "allocate": lambda: cuda.allocate(4),
            "synchronize": lambda: cuda.call("cuStreamSynchronize", cuda.stream),
            "read": lambda: cuda.read(address, 4),
            "write": lambda: cuda.write(address, b"1234"),
            "module": lambda: cuda.new_handle("cuModuleLoadData", ptx.encode()),
            "context": lambda: cuda.call("cuCtxSynchronize"),
        }
        cuda.call("cuStreamBeginCapture_v2", cuda.stream, 1)
        with pytest.raises(Failed) as failed:
            calls[call]()
        assert failed.value.code == CAPTURE_UNSUPPORTED
        graph = ctypes.c_void_p()
        assert cuda.code("cuStreamEndCapture", cuda.stream, ctypes.byref(graph)) == CAPTURE_INVALIDATED
        # The context is valid, and so is the next capture.
        other = cuda.allocate(4)
        cuda.recorded(lambda: cuda.copy(address, other, 4, cuda.stream))
        assert cuda.synchronize() == 0

    run(emulator, body)


@pytest.mark.parametrize(
    ("version", "target", "settings", "answer"),
    [
        ("8.0", "sm_80", {}, 0),
        ("8.0", "sm_90a", {}, NO_BINARY),
        ("8.0", "sm_90a", {"capability": "9.0"}, 0),
        ("8.0", "sm_90", {"capability": "8.9"}, NO_BINARY),
        ("9.0", "sm_80", {"driver": 12080}, UNSUPPORTED_PTX_VERSION),
        ("9.0", "sm_80", {"driver": 13000}, 0),
    ],
)
def test_ptx_loads_where_the_driver_and_the_gpu_take_it(
    emulator: Emulator, version: str, target: str, settings: dict[str, str], answer: int
) -> None:
    text = f"//\n.version {version}\n.target {target}\n.address_size 64\n".encode()

    def body(cuda: Cuda) -> int:
        return cuda.code("cuModuleLoadData", ctypes.byref(ctypes.c_void_p()), text)

    assert run(emulator.having(**settings), body) == answer


def test_what_is_refused_is_explained_in_the_programs_buffer(emulator: Emulator) -> None:
    text = b"//\n.version 9.0\n.target sm_80\n.address_size 64\n"

    def body(cuda: Cuda) -> None:
        log = ctypes.create_string_buffer(b"stale", 64)
        options = (ctypes.c_int * 2)(5, 6)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        code = cuda.code("cuModuleLoadDataEx", ctypes.byref(ctypes.c_void_p()), text, 2, options, values)
        assert code == UNSUPPORTED_PTX_VERSION
        assert log.value.startswith(b"ptxas application ptx input, line 9; fatal   : Unsupported")
        assert values[1] == len(log.value) == 63

    run(emulator.having(driver=12080), body)


@pytest.mark.parametrize(("flags", "spins"), [(0, 1), (1, 0), (2, 1), (3, 0)])
def test_a_wait_spins_unless_its_event_blocks(emulator: Emulator, flags: int, spins: int) -> None:
    def body(cuda: Cuda) -> int:
        event = cuda.new_handle("cuEventCreate", flags)
        cuda.upload(b"1234")
        cuda.call("cuEventRecord", event, cuda.stream)
        cuda.call("cuEventSynchronize", event)
        cuda.call("cuEventSynchronize", event)
        return cuda.counters()["spins"]

    assert run(emulator, body) == spins


def test_an_empty_module_is_no_ptx(emulator: Emulator) -> None:
    def body(cuda: Cuda) -> int:
        return cuda.code("cuModuleLoadData", ctypes.byref(ctypes.c_void_p()), b"")

    assert run(emulator, body) == INVALID_PTX


def test_reading_past_a_buffer_loses_the_context(emulator: Emulator, tmp_path: Path) -> None:
    folder = write_kernels(tmp_path)

    def body(cuda: Cuda) -> None:
        function = cuda.function((folder / "ptx" / "copy.ptx").read_text(), "copy")
        source, target = cuda.upload(floats([1.0] * 1000)), cuda.allocate(8000)
        values = [source, target, ctypes.c_int32(1000), 0, 0]
        assert cuda.launch(function, [2, 1, 1], 128, values) == 0
        assert cuda.read(target, 4000) == floats([1.0] * 1000)
        values[2] = ctypes.c_int32(2000)
        assert cuda.launch(function, [2, 1, 1], 128, values) == 0
        assert cuda.synchronize() == ILLEGAL_ADDRESS
        with pytest.raises(Failed) as failed:
            cuda.allocate(4)
        assert failed.value.code == ILLEGAL_ADDRESS

    run(emulator_with(emulator, folder), body)


def test_writing_past_a_buffer_is_found_when_it_is_freed(emulator: Emulator, tmp_path: Path) -> None:
    folder = write_kernels(tmp_path)

    def body(cuda: Cuda) -> int:
        function = cuda.function((folder / "ptx" / "copy.ptx").read_text(), "copy")
        source, target = cuda.upload(floats([1.0] * 1001)), cuda.allocate(4000)
        assert cuda.launch(function, [1, 1, 1], 128, [source, target, ctypes.c_int32(1001), 0, 0]) == 0
        cuda.free(target)
        return cuda.synchronize()

    with pytest.raises(Failed) as failed:
        run(emulator_with(emulator, folder), body)
    assert failed.value.code == -signal.SIGABRT


@pytest.mark.parametrize(
    ("grid", "threads", "shared", "answer"),
    [
        ([1, 1, 1], 128, 0, 0),
        ([1, 1, 1], 64, 0, INVALID_VALUE),
        ([0, 1, 1], 128, 0, INVALID_VALUE),
        ([1, 65536, 1], 128, 0, INVALID_VALUE),
        ([1, 1, 1], 128, 49 * KIB, INVALID_VALUE),
    ],
)
def test_launches_are_held_to_the_gpus_limits(
    emulator: Emulator, tmp_path: Path, grid: list[int], threads: int, shared: int, answer: int
) -> None:
    folder = write_kernels(tmp_path)

    def body(cuda: Cuda) -> int:
        function = cuda.function((folder / "ptx" / "copy.ptx").read_text(), "copy")
        address, other = cuda.upload(floats([1.0] * 8)), cuda.allocate(32)
        return cuda.launch(function, grid, threads, [address, other, ctypes.c_int32(8), 0, 0], shared)

    assert run(emulator_with(emulator, folder), body) == answer


def test_shared_memory_is_allowed_up_to_the_gpus_own(emulator: Emulator, tmp_path: Path) -> None:
    folder = write_kernels(tmp_path)

    def body(cuda: Cuda) -> list[int]:
        function = cuda.function((folder / "ptx" / "copy.ptx").read_text(), "copy")
        return [cuda.code("cuFuncSetAttribute", function, 8, size * KIB) for size in (99, 100, 163, 164, 227, 228)]

    with_kernels = emulator_with(emulator, folder)
    assert run(with_kernels.having(capability="12.0"), body) == [0] + [INVALID_VALUE] * 5
    assert run(with_kernels.having(capability="8.0"), body) == [0] * 3 + [INVALID_VALUE] * 3
    assert run(with_kernels.having(capability="9.0"), body) == [0] * 5 + [INVALID_VALUE]


def test_a_broken_promise_is_a_failed_launch(emulator: Emulator, tmp_path: Path) -> None:
    folder = write_kernels(tmp_path)

    def body(cuda: Cuda) -> int:
        function = cuda.function((folder / "ptx" / "copy.ptx").read_text(), "copy")
        source, target = cuda.upload(floats([1.0] * 8)), cuda.allocate(32)
        assert cuda.launch(function, [1, 1, 1], 128, [source + 4, target, ctypes.c_int32(1), 0, 0]) == 0
        return cuda.synchronize()

    assert run(emulator_with(emulator, folder), body) == LAUNCH_FAILED


def test_a_lane_that_a_mask_leaves_out_is_not_zero(emulator: Emulator, tmp_path: Path) -> None:
    folder = write_kernels(tmp_path)

    def body(cuda: Cuda) -> bytes:
        function = cuda.function((folder / "ptx" / "careless.ptx").read_text(), "careless")
        source, target = cuda.upload(floats([1.0] * 8)), cuda.allocate(32)
        assert cuda.launch(function, [1, 1, 1], 128, [source, target, ctypes.c_int32(4), 0, 0]) == 0
        return cuda.read(target, 32)

    result = run(emulator_with(emulator, folder), body)
    assert result[:16] == floats([1.0] * 4)
    assert re.fullmatch(rb"(..\xc0\x7f){4}", result[16:], re.DOTALL)


def emulator_with(emulator: Emulator, folder: Path) -> Emulator:
    """Return the emulator with kernels of the test's own."""
    return emulator.having(kernels=folder)


def write_kernels(folder: Path) -> Path:
    """Make a folder like kernels/triton, with two kernels whose PTX holds only what the driver reads."""
    (folder / "ptx").mkdir()
    for name in ("interpreter.py", "declaration.py"):
        (folder / name).write_text((KERNELS / name).read_text())
    (folder / "kernels.py").write_text(SOURCE)
    entries = []
    for name in ("copy", "careless"):
        text = PTX.replace("NAME", name)
        (folder / "ptx" / f"{name}.ptx").write_text(text)
        pointers = [{"name": one, "type": "*fp32", "divisible_by_16": True} for one in ("x", "y")]
        entries.append(
            {
                "name": name, "file": f"{name}.ptx", "entry": name, "source": "kernels.py", "function": name,
                "arguments": [*pointers, {"name": "n", "type": "i32", "divisible_by_16": False}],
                "constants": {"BLOCK": 1024}, "num_warps": 4, "shared_bytes": 0,
            }
        )  # fmt: skip
    (folder / "ptx" / "manifest.json").write_text(json.dumps({"kernels": entries}))
    return folder


SOURCE = """
import triton
import triton.language as tl


@triton.jit
def copy(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n, other=0.0), mask=at < n)


@triton.jit
def careless(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < 8)
"""
PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry NAME(
	.param .u64 .ptr .global .align 1 NAME_param_0,
	.param .u64 .ptr .global .align 1 NAME_param_1,
	.param .u32 NAME_param_2,
	.param .u64 .ptr .global .align 1 NAME_param_3,
	.param .u64 .ptr .global .align 1 NAME_param_4
)
.reqntid 128
{
	ret;
}
"""

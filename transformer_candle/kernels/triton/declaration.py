"""Declaration of a kernel next to its function: every source file ends with `KERNELS = [Kernel(...), ...]`.

A declaration fixes everything that determines the PTX: the function, the types of its arguments, the values of its
compile-time constants, warps and pipeline stages, and the family of GPUs. An argument's type is written as in Triton's
signatures: `"*bf16"`, `"*fp32"`, `"*i32"`, `"*i16"`, `"i32"`, `"fp32"`. With the suffix `":16"` the launcher asserts
that an address or an integer is divisible by 16, without which the compiler emits no 16-byte loads. Every buffer of the
trainer begins at such an address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ARGUMENT_TYPES = ("*bf16", "*fp32", "*i32", "*u32", "*i16", "*u8", "i32", "fp32")


@dataclass(frozen=True)
class Family:
    """A set of GPUs that run the same PTX."""

    arch: int
    """Compute capability that Triton compiles for, times 10."""
    assembles_for: tuple[str, ...]
    """Targets that ptxas has to accept the PTX for."""
    shared_bytes: Mapping[str, int]
    """Shared memory available to a block, by target."""


KIB = 1024
SMALL = {"sm_86": 99 * KIB, "sm_89": 99 * KIB, "sm_120": 99 * KIB}
LARGE = {"sm_80": 163 * KIB, "sm_90": 227 * KIB, "sm_100": 227 * KIB}
FAMILIES = {
    "sm_80": Family(80, ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"), {**SMALL, **LARGE}),
    "sm_80_small": Family(80, ("sm_86", "sm_89", "sm_120"), SMALL),
    "sm_90a": Family(90, ("sm_90a",), {"sm_90a": 227 * KIB}),
}
"""Compute capability 9.0 (Hopper) runs a kernel of sm_90a, which alone has wgmma; GPUs with 99 KiB of shared memory run
one of sm_80_small. What these families do not declare, and every other GPU (10.x: B200), comes from sm_80."""


@dataclass(frozen=True)
class Kernel:
    """A function compiled with one set of types and constants: one PTX file."""

    name: str
    """`<operation>_<direction>.<dtype>[.<variant>]`, unique together with `family` and `candidate`."""
    function: Any
    """The `@triton.jit` function."""
    arguments: Mapping[str, str]
    """The types of the arguments by name, in the order of the function's parameters without the constants."""
    constants: Mapping[str, int | bool | str | None] = field(default_factory=dict)
    """The values of the parameters annotated `tl.constexpr`; None for a buffer that this variant does not use."""
    num_warps: int = 4
    num_stages: int = 1
    """Depth of software pipelining: iterations of a loop whose loads are in flight at once."""
    max_registers: int | None = None
    """Registers per thread at most (`maxnreg`), so that more blocks fit on a multiprocessor."""
    fused_multiply_add: bool = True
    """Whether `a * b + c` may be rounded once; if not, every operation is rounded, as on the CPU."""
    family: str = "sm_80"
    candidate: str | None = None
    """Name of an alternative that the trainer may choose by timing; None is the declared kernel, used without timing.

    Timing runs a kernel repeatedly on the same buffers: one with candidates must not read what it writes."""

    def __post_init__(self) -> None:
        """Reject a declaration that does not match its function."""
        parameters = list(self.function.arg_names)
        declared = [name for name in parameters if name not in self.constants]
        if list(self.arguments) != declared or not set(self.constants) <= set(parameters):
            declared_names = [*self.arguments, *self.constants]
            raise ValueError(f"{self.name}: the function takes {parameters}, the declaration has {declared_names}")
        for name, kind in self.arguments.items():
            if kind.removesuffix(":16") not in ARGUMENT_TYPES:
                raise ValueError(f"{self.name}: `{name}` has the type {kind!r}, not one of {ARGUMENT_TYPES}")
        if self.family not in FAMILIES:
            raise ValueError(f"{self.name}: unknown family {self.family!r}, not one of {list(FAMILIES)}")

    @property
    def source(self) -> str:
        """The file of the function."""
        return f"{self.function.fn.__module__}.py"

    @property
    def function_name(self) -> str:
        """The function's name in its file."""
        return str(self.function.fn.__name__)

"""What a source file says about each of its kernels, beside them: `KERNELS = [Kernel(...), ...]`.

A declaration fixes everything that decides the PTX: the function, the types of its arguments, the values of its
compile-time constants, warps and pipeline stages, and the family of cards. An argument's type is written as Triton
writes signatures: `"*bf16"`, `"*fp32"`, `"*i32"`, `"*i16"`, `"i32"`, `"fp32"`; with `":16"` behind it, the launcher
promises a multiple of 16 (bytes of an address, units of a number), which is what 16-byte loads need. Every buffer of
the trainer begins at such an address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ARGUMENT_TYPES = ("*bf16", "*fp32", "*i32", "*u32", "*i16", "i32", "fp32")


@dataclass(frozen=True)
class Family:
    """PTX for some cards: how it is compiled, what it has to assemble for, and where it runs."""

    arch: int
    """Compute capability that Triton compiles for, times ten."""
    assembles_for: tuple[str, ...]
    """Targets of ptxas."""
    shared_bytes: Mapping[str, int]
    """Shared memory that a block may have, by target."""


KIB = 1024
SMALL = {"sm_86": 99 * KIB, "sm_89": 99 * KIB, "sm_120": 99 * KIB}
LARGE = {"sm_80": 163 * KIB, "sm_90": 227 * KIB, "sm_100": 227 * KIB}
FAMILIES = {
    "sm_80": Family(80, ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"), {**SMALL, **LARGE}),
    "sm_80_small": Family(80, ("sm_86", "sm_89", "sm_120"), SMALL),
    "sm_90a": Family(90, ("sm_90a",), {"sm_90a": 227 * KIB}),
}
"""A GPU of 9.0 looks a name up in sm_90a, one with 99 KiB of shared memory in sm_80_small, then each in sm_80. Those of
10.x (B200) have no family of their own: they run sm_80."""


@dataclass(frozen=True)
class Kernel:
    """One function compiled in one way."""

    name: str
    """`<operation>_<direction>.<dtype>[.<variant>]`; the same name may be declared once in every family, and once more
    for each candidate."""
    function: Any
    """The `@triton.jit` function."""
    arguments: Mapping[str, str]
    """Types by name, in the order of the function's parameters without its constants."""
    constants: Mapping[str, int | bool | str | None] = field(default_factory=dict)
    """Values of the parameters annotated `tl.constexpr`; None for a buffer that this variant goes without."""
    num_warps: int = 4
    num_stages: int = 1
    """Iterations of a loop whose loads are in flight at once."""
    max_registers: int | None = None
    fused_multiply_add: bool = True
    """Whether `a * b + c` may be rounded once; without, every operation is rounded as on a CPU."""
    family: str = "sm_80"
    candidate: str | None = None
    """The name of an alternative to the kernel of this name and family; None is the one that is taken unmeasured.

    Timing runs a kernel again and again: one with candidates must not read what it writes."""

    def __post_init__(self) -> None:
        """Refuses a declaration that does not fit its function."""
        parameters = list(self.function.arg_names)
        declared = [name for name in parameters if name not in self.constants]
        if list(self.arguments) != declared or not set(self.constants) <= set(parameters):
            given = [*self.arguments, *self.constants]
            raise ValueError(f"{self.name}: the function takes {parameters}, declared are {given}")
        for name, kind in self.arguments.items():
            if kind.removesuffix(":16") not in ARGUMENT_TYPES:
                raise ValueError(f"{self.name}: `{name}` has the type {kind!r}, not one of {ARGUMENT_TYPES}")
        if self.family not in FAMILIES:
            raise ValueError(f"{self.name}: no family {self.family!r}")

    @property
    def source(self) -> str:
        """The file that holds the function."""
        return f"{self.function.fn.__module__}.py"

    @property
    def function_name(self) -> str:
        """The function's name in its file."""
        return str(self.function.fn.__name__)

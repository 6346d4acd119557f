"""The variants of an attention kernel: tile sizes by element type, head size and family of GPUs.

A variant is named `<operation>.<dtype>.e<columns>[m][.documents]`. Columns are BLOCK_E, the head size rounded up to 32,
64 or 128; with an `m` the variant masks the columns past the head size. Training, in bf16 with a head size that fills
the columns, has tiles of its own for every family; everything else has tiles that fit any GPU, so that the number of
variants stays small. With documents only Hopper has tiles of its own.

A family may also declare candidates: tiles compiled and tested like the declared ones, among which the trainer chooses
by measuring. Only Hopper has some with documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from declaration import Kernel


@dataclass(frozen=True)
class Tile:
    """Block sizes and compiler options of a kernel."""

    queries: int
    """BLOCK_M: query rows per tile."""
    keys: int
    """BLOCK_L: keys per tile."""
    num_warps: int
    num_stages: int
    """Tiles whose loads are in flight at once, each with its buffer in shared memory."""
    max_registers: int | None = None
    """Registers per thread at most, so that more blocks fit on a multiprocessor."""

    @property
    def candidate(self) -> str:
        """The name of a candidate with this tile: queries, keys, warps, stages and registers."""
        limit = f"r{self.max_registers}" if self.max_registers else ""
        return f"m{self.queries}l{self.keys}w{self.num_warps}s{self.num_stages}{limit}"


Candidates = Mapping[str, Mapping[int, Sequence[Tile]]]


@dataclass(frozen=True)
class Tiles:
    """The tiles of an operation by BLOCK_E: 32, 64 and 128."""

    any_gpu: Mapping[int, Tile]
    """Tiles of bf16 for every family that has none of its own."""
    f32: Mapping[int, Tile]
    by_family: Mapping[str, Mapping[int, Tile]]
    """Tiles of bf16 by family, for head sizes that equal BLOCK_E."""
    candidates: Candidates = field(default_factory=dict)
    """Tiles of bf16 by family for heads that equal BLOCK_E, without documents."""
    candidates_with_documents: Candidates = field(default_factory=dict)


ELEMENTS = {"bf16": "*bf16", "f32": "*fp32"}


def variants(operation: str, function: Any, arguments: Mapping[str, str], tiles: Tiles) -> list[Kernel]:
    """Return all kernels of an operation. In `arguments`, "element" stands for a pointer to the variant's type."""

    def kernel(
        name: str,
        tile: Tile,
        columns: int,
        constants: dict[str, bool],
        family: str = "sm_80",
        candidate: str | None = None,
    ) -> Kernel:
        element = ELEMENTS[name.split(".")[0]]
        sizes = {"BLOCK_M": tile.queries, "BLOCK_L": tile.keys, "BLOCK_E": columns}
        return Kernel(
            f"{operation}.{name}",
            function,
            {name: f"{element}:16" if kind == "element" else kind for name, kind in arguments.items()},
            {**constants, **sizes},
            tile.num_warps,
            tile.num_stages,
            tile.max_registers,
            family=family,
            candidate=candidate,
        )

    def declared() -> Iterator[Kernel]:
        has_documents = "documents_N" in arguments
        for documents in (False, True) if has_documents else (False,):
            suffix, constants = (".documents" if documents else ""), ({"DOCUMENTS": documents} if has_documents else {})
            for dtype, by_columns in (("f32", tiles.f32), ("bf16", tiles.any_gpu)):
                for columns, tile in by_columns.items():
                    # 32 is the smallest head size, so that its columns are never masked.
                    name = f"{dtype}.e{columns}{'m' if columns > 32 else ''}{suffix}"
                    yield kernel(name, tile, columns, {"EXACT": columns == 32} | constants)
            families, candidates = dict(tiles.by_family), tiles.candidates
            if documents:
                families = {"sm_80": tiles.any_gpu, "sm_90a": tiles.by_family.get("sm_90a", {})}
                candidates = tiles.candidates_with_documents
            for family, by_columns in families.items():
                for columns, tile in by_columns.items():
                    if columns > 32:
                        name, exact = f"bf16.e{columns}{suffix}", {"EXACT": True} | constants
                        yield kernel(name, tile, columns, exact, family)
                        for other in candidates.get(family, {}).get(columns, ()):
                            yield kernel(name, other, columns, exact, family, other.candidate)

    return list(declared())

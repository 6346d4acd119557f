"""How attention's kernels are compiled: the tiles of a program, by element type, head size and family of cards.

A variant is named after the columns of its tiles, with an `m` where it masks them for head sizes below. What trains,
bf16 with a head size that fills its columns, has tiles for every family; all else has tiles that fit any card.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from declaration import Kernel


@dataclass(frozen=True)
class Tile:
    """The rows that a program works on at a time, and with what."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


@dataclass(frozen=True)
class Tiles:
    """The tiles of an operation, by columns: 32, 64 and 128."""

    anywhere: Mapping[int, Tile]
    f32: Mapping[int, Tile]
    by_family: Mapping[str, Mapping[int, Tile]]


ELEMENTS = {"bf16": "*bf16", "f32": "*fp32"}


def variants(operation: str, function: Any, arguments: Mapping[str, str], tiles: Tiles) -> list[Kernel]:
    """Every kernel of an operation. In `arguments`, "element" stands for a pointer to either type."""

    def kernel(name: str, tile: Tile, columns: int, constants: dict[str, bool], family: str = "sm_80") -> Kernel:
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
        )

    def declared() -> Iterator[Kernel]:
        has_documents = "documents_N" in arguments
        for documents in (False, True) if has_documents else (False,):
            suffix, constants = (".documents" if documents else ""), ({"DOCUMENTS": documents} if has_documents else {})
            for dtype, fitting in (("f32", tiles.f32), ("bf16", tiles.anywhere)):
                for columns, tile in fitting.items():
                    name = f"{dtype}.e{columns}{'m' if columns > 32 else ''}{suffix}"
                    yield kernel(name, tile, columns, {"EXACT": columns == 32} | constants)
            families = {"sm_80": tiles.anywhere} if documents else tiles.by_family
            for family, fitting in families.items():
                for columns, tile in fitting.items():
                    if columns > 32:
                        yield kernel(f"bf16.e{columns}{suffix}", tile, columns, {"EXACT": True} | constants, family)

    return list(declared())

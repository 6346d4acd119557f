"""How attention's kernels are compiled: the tiles of a program, by element type, head size and family of cards.

A variant is named after the columns of its tiles, with an `m` where it masks them for head sizes below. What trains,
bf16 with a head size that fills its columns, has tiles for every family; all else has tiles that fit any GPU. With
documents there are tiles of their own for Hopper only. Beside the tiles that a family takes, candidates may be
declared: compiled and tested alike, to be chosen by measuring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

    @property
    def candidate(self) -> str:
        """What a candidate is called: queries, keys, warps, stages and registers."""
        limit = f"r{self.max_registers}" if self.max_registers else ""
        return f"m{self.queries}l{self.keys}w{self.num_warps}s{self.num_stages}{limit}"


@dataclass(frozen=True)
class Tiles:
    """The tiles of an operation, by columns: 32, 64 and 128."""

    anywhere: Mapping[int, Tile]
    f32: Mapping[int, Tile]
    by_family: Mapping[str, Mapping[int, Tile]]
    candidates: Mapping[str, Mapping[int, Sequence[Tile]]] = field(default_factory=dict)


ELEMENTS = {"bf16": "*bf16", "f32": "*fp32"}


def variants(operation: str, function: Any, arguments: Mapping[str, str], tiles: Tiles) -> list[Kernel]:
    """Every kernel of an operation. In `arguments`, "element" stands for a pointer to either type."""

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
            for dtype, fitting in (("f32", tiles.f32), ("bf16", tiles.anywhere)):
                for columns, tile in fitting.items():
                    name = f"{dtype}.e{columns}{'m' if columns > 32 else ''}{suffix}"
                    yield kernel(name, tile, columns, {"EXACT": columns == 32} | constants)
            families = dict(tiles.by_family)
            if documents:
                families = {"sm_80": tiles.anywhere, "sm_90a": tiles.by_family.get("sm_90a", {})}
            for family, fitting in families.items():
                for columns, tile in fitting.items():
                    if columns > 32:
                        name, exact = f"bf16.e{columns}{suffix}", {"EXACT": True} | constants
                        yield kernel(name, tile, columns, exact, family)
                        for other in tiles.candidates.get(family, {}).get(columns, ()):
                            yield kernel(name, other, columns, exact, family, other.candidate)

    return list(declared())

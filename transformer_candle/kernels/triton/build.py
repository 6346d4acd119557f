"""Compiles every declared kernel to PTX ahead of time, without a GPU, and writes the manifest that the launcher reads.

    build.py                     writes ptx/<family>/<name>.ptx and ptx/manifest.json
    build.py rope.py swiglu.py   compiles these sources only and keeps the manifest's other entries
    build.py --check             compiles to a temporary folder and compares byte for byte with ptx/

The same sources and the same Triton give the same bytes on any machine: there is no line information, so no paths, and
the PTX version is fixed at 8.0, which drivers of CUDA 12.0 and later compile for their GPU.
"""

from __future__ import annotations

import argparse
import filecmp
import importlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

# Before Triton is imported: the caller's environment must not change what is compiled.
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
os.environ.pop("TRITON_INTERPRET", None)
os.environ.pop("TRITON_DEFAULT_FP_FUSION", None)

import triton
from declaration import FAMILIES, Kernel
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

FOLDER = Path(__file__).resolve().parent
PTX = FOLDER / "ptx"
PTX_VERSION = 80
WARP = 32


def sources() -> list[str]:
    """Return the names of the files that declare kernels."""
    declaring = re.compile(r"^KERNELS\b", re.MULTILINE)
    return sorted(path.name for path in FOLDER.glob("*.py") if declaring.search(path.read_text()))


def kernels(source: str) -> list[Kernel]:
    """Return the kernels that a file declares."""
    declared_kernels: list[Kernel] = importlib.import_module(Path(source).stem).KERNELS
    return declared_kernels


def compile_kernel(kernel: Kernel) -> tuple[str, dict[str, Any]]:
    """Compile a kernel; return its PTX and Triton's metadata: name of the entry point, warps, shared memory."""
    target = GPUTarget("cuda", FAMILIES[kernel.family].arch, WARP)
    backend = make_backend(target)
    options = backend.parse_options(
        {
            "num_warps": kernel.num_warps,
            "num_stages": kernel.num_stages,
            "maxnreg": kernel.max_registers,
            "ptx_version": PTX_VERSION,
            "enable_fp_fusion": kernel.fused_multiply_add,
        }
    )
    parameters = list(kernel.function.arg_names)
    divisible = [parameters.index(name) for name, kind in kernel.arguments.items() if kind.endswith(":16")]
    source = ASTSource(
        fn=kernel.function,
        signature={
            name: "constexpr" if name in kernel.constants else kernel.arguments[name].removesuffix(":16")
            for name in parameters
        },
        constexprs=dict(kernel.constants),
        attrs={(index,): [["tt.divisibility", 16]] for index in divisible},
    )
    # `triton.compile` would continue to a cubin, for which it needs ptxas; the pipeline is run up to the PTX instead.
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    generators = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, generators, backend.get_module_map(), context)
    metadata: dict[str, Any] = {"num_warps": kernel.num_warps}
    for stage in ("ttir", "ttgir", "llir", "ptx"):
        module = stages[stage](module, metadata)
    if metadata["global_scratch_size"] or metadata["profile_scratch_size"]:
        raise ValueError(f"{kernel.name} needs scratch memory, which the launcher does not provide")
    return str(module), metadata


def entry(kernel: Kernel, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest's entry of a kernel."""
    return {
        "name": kernel.name,
        "family": kernel.family,
        **({"candidate": kernel.candidate} if kernel.candidate else {}),
        "file": f"{kernel.family}/{kernel.name}{f'.{kernel.candidate}' if kernel.candidate else ''}.ptx",
        "entry": metadata["name"],
        "source": kernel.source,
        "function": kernel.function_name,
        "arguments": [
            {"name": name, "type": kind.removesuffix(":16"), "divisible_by_16": kind.endswith(":16")}
            for name, kind in kernel.arguments.items()
        ],
        "constants": dict(kernel.constants),
        "num_warps": metadata["num_warps"],
        "shared_bytes": metadata["shared"],
    }


def compile_declared(source: str, index: int) -> tuple[str, dict[str, Any]]:
    """Compile the kernel of this index in a file; return its PTX and manifest entry."""
    kernel = kernels(source)[index]
    ptx, metadata = compile_kernel(kernel)
    return ptx, entry(kernel, metadata)


def write(folder: Path, names: Sequence[str]) -> None:
    """Compile these sources into `folder`, and merge them into its manifest."""
    path = folder / "manifest.json"
    before = json.loads(path.read_text())["kernels"] if path.exists() else []
    tasks = [(source, index) for source in names for index in range(len(kernels(source)))]
    with ProcessPoolExecutor() as pool:
        compiled_kernels = list(pool.map(compile_declared, *zip(*tasks, strict=True)))
    for ptx, described in compiled_kernels:
        file = folder / described["file"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(ptx)
    other_kernels = [
        described for described in before if described["source"] not in names and described["source"] in sources()
    ]
    entries = sorted(
        [*other_kernels, *(described for _, described in compiled_kernels)],
        key=lambda one: (one["name"], one["family"], one.get("candidate") or ""),
    )
    files = [described["file"] for described in entries]
    if len(set(files)) != len(files):
        raise ValueError("two kernels of a family have the same name")
    for file in folder.glob("*/*.ptx"):
        if str(file.relative_to(folder)) not in files:
            file.unlink()
    families = {name: {"arch": family.arch, "ptx_version": PTX_VERSION} for name, family in FAMILIES.items()}
    manifest = {"triton": triton.__version__, "families": families, "kernels": entries}
    path.write_text(json.dumps(manifest, indent=1) + "\n")


def differences(one: Path, other: Path) -> list[str]:
    """Return the files that are missing in one folder or differ in a byte."""
    names = {str(file.relative_to(folder)) for folder in (one, other) for file in folder.rglob("*") if file.is_file()}
    _, mismatches, errors = filecmp.cmpfiles(one, other, names, shallow=False)
    return sorted(mismatches + errors)


def main() -> int:
    """Write ptx/, or check it with --check."""
    parser = argparse.ArgumentParser(description="Compile Triton kernels to PTX ahead of time.")
    parser.add_argument("sources", nargs="*", help="files to compile; default: all")
    parser.add_argument("--check", action="store_true", help="fail if ptx/ differs from what the sources compile to")
    arguments = parser.parse_args()
    if not arguments.check:
        write(PTX, arguments.sources or sources())
        return 0
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), sources())
        changed_files = differences(Path(folder), PTX)
    for file in changed_files:
        print(
            f"ptx/{file} differs from what the sources compile to: run build.py (Triton as in requirements/oracle.txt)"
        )
    return bool(changed_files)


if __name__ == "__main__":
    sys.exit(main())

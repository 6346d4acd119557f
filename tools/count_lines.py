"""Count the lines of code of a commit, of the product and of tests, by crate and package.

Neither blank lines nor comments count, doc comments and docstrings among the comments.

    python tools/count_lines.py [COMMIT ...]    # default: HEAD
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import PurePosixPath

TEST_FOLDERS = {"tests", "fuzz"}
TEST_FILE = re.compile(r"(^|_)tests?\.(rs|py)$|^test_.*\.py$|^(conftest|testing)\.(rs|py)$")


def main() -> None:
    """Print a table for each commit."""
    for commit in sys.argv[1:] or ["HEAD"]:
        counted = count(commit)
        names = sorted({name for name, _ in counted})
        print(f"{commit:24} {'product':>8} {'tests':>8}")
        for name in names:
            print(f"{name:24} {counted[name, False]:8,} {counted[name, True]:8,}")
        totals = [sum(lines for (_, is_test), lines in counted.items() if is_test is kind) for kind in (False, True)]
        print(f"{'all':24} {totals[0]:8,} {totals[1]:8,}")


def count(commit: str) -> Counter[tuple[str, bool]]:
    """Return the lines by crate or package and by whether they are tests."""
    counted: Counter[tuple[str, bool]] = Counter()
    for name in git("ls-tree", "-r", "--name-only", commit).splitlines():
        path = PurePosixPath(name)
        if path.suffix not in (".rs", ".py"):
            continue
        text = git("show", f"{commit}:{name}")
        is_test = bool(TEST_FOLDERS & set(path.parts[:-1]) or TEST_FILE.search(path.name))
        of = "/".join(path.parts[: 2 if path.parts[0] in ("transformer_candle", "python") else 1])
        if path.suffix == ".py":
            counted[of, is_test] += len(python_lines(text))
        else:
            code, tests = rust_lines(text)
            counted[of, is_test] += code
            counted[of, True] += tests
    return counted


def git(*words: str) -> str:
    """Return what a command of git prints."""
    return subprocess.run(["git", *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def rust_lines(text: str) -> tuple[int, int]:
    """Return the lines of code outside of and inside of modules that are compiled for tests only."""
    code = tests = 0
    inside = is_next = False
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped or stripped.startswith("//"):
            continue
        if line.startswith("#[cfg(") and "test" in line:
            is_next = True
        elif is_next and not line.startswith("#["):
            inside, is_next = line.startswith(("mod ", "pub mod ", "pub(crate) mod ")) and line.endswith("{"), False
            tests += 1
            continue
        if inside or is_next:
            tests += 1
            inside = inside and line != "}"
        else:
            code += 1
    return code, tests


def python_lines(text: str) -> set[int]:
    """Return the numbers of the lines with code."""
    lines = {number for number, line in enumerate(text.splitlines(), 1) if line.strip() and line.lstrip()[0] != "#"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


if __name__ == "__main__":
    main()

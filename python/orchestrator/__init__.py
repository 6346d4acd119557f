"""Pre-train Llama-style models: the Python way into the Rust trainer.

>>> from orchestrator import RunConfig, Trainer
>>> trainer = Trainer(RunConfig.load("runs/demo/training.yaml"))
>>> for report in trainer:
...     print(report.step, report.loss)
"""

from __future__ import annotations

import os
import signal
import sys


def exit_at_once(_number: int = signal.SIGINT, _frame: object = None) -> None:
    """End the program `orchestrate` without unwinding: an exception in the middle of an import prints a traceback."""
    try:
        os.write(2, b"orchestrate: stopped by Ctrl-C\n")
    finally:
        os._exit(128 + signal.SIGINT)


def _is_the_program() -> bool:
    """Whether this process is `orchestrate` or `python -m orchestrator`, not a program that uses the package."""
    words = getattr(sys, "orig_argv", [])
    is_module = "-m" in words and words[words.index("-m") + 1 :][:1] == ["orchestrator"]
    return is_module or getattr(sys, "argv", [""])[0].rpartition(os.sep)[2].partition(".")[0] == "orchestrate"


# Before any other import: they take a good part of a second, in which Ctrl-C has no other handler.
if _is_the_program() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, exit_at_once)

import importlib.util  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from orchestrator._native import (
        ChatModel,
        CheckpointError,
        Completion,
        ConfigError,
        DataError,
        DivergenceError,
        EvaluationReport,
        MemoryPlan,
        OutOfMemoryError,
        Reply,
        RunConfig,
        StepReport,
        TokenStream,
        Trainer,
        TrainerError,
        __version__,
        generate,
        logits,
        memory_plan,
    )

__all__ = [
    "ChatModel",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DataError",
    "DivergenceError",
    "EvaluationReport",
    "MemoryPlan",
    "OutOfMemoryError",
    "Reply",
    "RunConfig",
    "StepReport",
    "TokenStream",
    "Trainer",
    "TrainerError",
    "__version__",
    "generate",
    "logits",
    "memory_plan",
]


def _pass_nvidia_wheels() -> None:
    """Name the folders of the package `nvidia` to the trainer, which opens CUDA's libraries by itself."""
    package = importlib.util.find_spec("nvidia")
    if package is not None and package.submodule_search_locations:
        os.environ.setdefault("ORCHESTRATE_NVIDIA_WHEELS", os.pathsep.join(package.submodule_search_locations))


_pass_nvidia_wheels()


def __getattr__(name: str) -> Any:
    """Import the extension at the first access to one of its names."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("orchestrator._native"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

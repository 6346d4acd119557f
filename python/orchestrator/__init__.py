"""Pre-train Llama-style models: the Python way into the Rust trainer.

>>> from orchestrator import RunConfig, Trainer
>>> trainer = Trainer(RunConfig.load("runs/demo/training.yaml"))
>>> for report in trainer:
...     print(report.step, report.loss)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from orchestrator import nvidia_wheels

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

nvidia_wheels.make_known()


def __getattr__(name: str) -> Any:
    """Import the extension at the first access to one of its names."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("orchestrator._native"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Pre-train Llama-style models: the Python way into the Rust trainer.

>>> from orchestrator import RunConfig, Trainer
>>> trainer = Trainer(RunConfig.load("runs/demo/training.yaml"))
>>> for report in trainer:
...     print(report.step, report.loss)
"""

from orchestrator import nvidia_wheels
from orchestrator._native import (
    CheckpointError,
    Completion,
    ConfigError,
    DataError,
    DivergenceError,
    EvaluationReport,
    MemoryPlan,
    OutOfMemoryError,
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
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DataError",
    "DivergenceError",
    "EvaluationReport",
    "MemoryPlan",
    "OutOfMemoryError",
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

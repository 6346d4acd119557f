"""A trial in a process of its own: trains a config, evaluates at equal fractions, writes no checkpoint.

    python -m orchestrator.tune.trial_process CONFIG EVALUATIONS

Prints one JSON object per line: `{"evaluation": 1, "tokens": ..., "loss": ...}` and, if training fails,
`{"error": "...", "code": ...}`. It ends when the process that started it is gone, and can be killed at any time.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from orchestrator import _native


def run(config: str, evaluations: int) -> int:
    """Train and return the exit code."""
    owner = os.getppid()
    try:
        resolved = _native.RunConfig.load(config)
        steps = resolved.to_dict()["scheduler"]["total_steps"]
        due = {round(number * steps / evaluations): number for number in range(1, evaluations + 1)}
        trainer = _native.Trainer(resolved)
        for report in trainer:
            if os.getppid() != owner:
                return 1
            if report.step in due:
                evaluation = trainer.evaluate()
                if evaluation is None:
                    raise _native.DataError("there is no held-out text to evaluate on")
                _print(evaluation=due[report.step], tokens=report.tokens, loss=evaluation.loss)
    except _native.TrainerError as error:
        _print(error=str(error), code=error.exit_code)
        return error.exit_code
    return 0


def _print(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], int(sys.argv[2])))

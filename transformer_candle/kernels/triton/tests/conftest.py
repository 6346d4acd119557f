"""Tests of the kernels in Triton's interpreter, with one thread for PyTorch."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import interpreter  # noqa: F401  (before any kernel is imported)
import torch

torch.set_num_threads(1)

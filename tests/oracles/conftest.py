"""Oracles compute on one thread, so that they give the same values on every machine."""

from __future__ import annotations

import torch

torch.set_num_threads(1)

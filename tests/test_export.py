"""Exporting without the packages that it needs."""

from __future__ import annotations

import importlib.util

import pytest
from workspace import Workspace


@pytest.mark.skipif(importlib.util.find_spec("gguf") is not None, reason="gguf is installed here")
def test_a_missing_package_is_named_with_its_command(workspace: Workspace) -> None:
    done = workspace.orchestrate("export", "--experiment=any")
    done.refused(2, "pip install 'transformer-candle[export]'")

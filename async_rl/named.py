"""What a user names as `module:attribute`: a reward, an environment."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def named(name: str) -> Any:
    """The attribute; the working directory is importable."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), attribute)

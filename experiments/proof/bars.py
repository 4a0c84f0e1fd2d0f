"""Keeping a proof's result, and judging it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
Result = dict[str, object]


def keep(name: str, result: Result) -> None:
    """Prints the result and writes `NAME.json` beside this file; exits with 1 if one of its `bars` is missed."""
    text = json.dumps(result, indent=2)
    print(text)
    (HERE / f"{name}.json").write_text(text + "\n")
    bars = result["bars"]
    assert isinstance(bars, dict)
    missed = [bar for bar, met in bars.items() if not met]
    if missed:
        sys.exit(f"missed: {', '.join(missed)}")

"""What an exported folder defines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

of_peft = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def loaded(folder: Path) -> Any:
    """What ``load.py`` defines in this process."""
    names: dict[str, Any] = {"__file__": str(folder / "load.py")}
    exec((folder / "load.py").read_text(), names)
    return names

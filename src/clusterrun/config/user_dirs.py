"""Where a user's own configs and hardware files are looked for."""

from __future__ import annotations

import os
from pathlib import Path


def user_config_dirs() -> list[Path]:
    """Directories that add to and shadow the packaged configs, the strongest first."""
    own = os.environ.get("CLUSTERRUN_CONFIG_PATH")
    home = [Path(p).expanduser() for p in own.split(os.pathsep) if p] if own else [Path.home() / ".config/clusterrun"]
    return [d for d in [Path.cwd() / "conf", *home] if d.is_dir()]

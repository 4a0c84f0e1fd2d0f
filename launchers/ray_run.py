"""A run on Ray: `python -m launchers.ray_run --run FOLDER`, which takes the place of `async-rl train`.

Apart from the command line, which answers without loading Ray.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from async_rl import config as configuration
from async_rl.errors import AsyncRLError
from launchers import local
from launchers.errors import LaunchError
from launchers.ray_host import RayHost

USAGE = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run, with its config.yaml")
    folder: Path = parser.parse_args().run
    config = configuration.load(folder / "config.yaml")
    try:
        host = RayHost(config)
    except (AsyncRLError, LaunchError) as error:
        print(f"error: {error}", file=sys.stderr)
        if {path.name for path in folder.iterdir()} <= {"config.yaml", "lock"}:  # nothing was ever started in it
            shutil.rmtree(folder)
        return USAGE
    return local.exit_code(local.launch(config, folder, host).status)


if __name__ == "__main__":
    sys.exit(main())

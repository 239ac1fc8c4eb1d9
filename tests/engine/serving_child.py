"""A server process for tests: `serving_child.py CACHE_DIRECTORY` prints its URL, then `closed`."""

import sys
import time
from pathlib import Path

from engine.config import read_config
from engine.recipe import Recipe
from engine.server import ServeOptions, serve
from fixtures.toy_core import ToyCore
from tests.engine.serving import SHAPE

CONFIG = read_config(Path(__file__).parents[2] / "fixtures" / "goldens" / "mini")


class Slow(ToyCore):
    """Takes a moment per step, so that things can happen meanwhile."""

    def step(self, sequences):
        time.sleep(0.01)
        return super().step(sequences)


def main(directory: str) -> None:
    core = Slow(**SHAPE)
    options = ServeOptions(
        prefix_cache_disk=Path(directory), package_hash="toy", prefix_cache_memory_bytes=0
    )
    serve(
        core,
        CONFIG,
        Recipe(),
        port=0,
        options=options,
        on_ready=lambda url: print(url, flush=True),
    )
    core.close()
    print("closed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

"""Kernels: what each kind of op computes, row by row, in float64 with one rounding (spec 1).

Compiled kernels are kept between processes in a folder named after the digest of all kernel
sources and their place: the compiler's own check looks at one file at a time, and a kernel inlines
others.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numba

KERNEL_CACHE_VARIABLE = "SPARKPROOF_KERNEL_CACHE"


def kernel_cache(environ: dict[str, str] | os._Environ[str] = os.environ) -> Path:
    """Where compiled kernels of this source are kept."""
    # The compiler files its results under the place of the source as well.
    digest = hashlib.sha256(str(Path(__file__).resolve().parent).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    base = environ.get(KERNEL_CACHE_VARIABLE)
    if not base:
        home = environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        base = Path(home) / "sparkproof" / "kernels"
    return Path(base) / digest.hexdigest()[:16]


numba.config.CACHE_DIR = str(kernel_cache())

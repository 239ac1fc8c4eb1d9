"""A process that runs some goldens and prints, as its last line, which vector code it could use."""

from __future__ import annotations

import json
import sys

import pytest


def vector_code() -> dict:
    """What the compiler, the BLAS and the tensor library were allowed to use."""
    import torch
    from threadpoolctl import threadpool_info

    from engine.ops import dense

    code = "".join(dense.norm_rows.inspect_asm().values())
    return {
        "blas": sorted({e["architecture"] for e in threadpool_info() if "architecture" in e}),
        "torch": torch.backends.cpu.get_cpu_capability(),
        "wide_registers": "ymm" in code or "zmm" in code,
        "code_bytes": len(code),
    }


if __name__ == "__main__":
    status = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[1:]])
    print(json.dumps(vector_code()))
    sys.exit(int(status))

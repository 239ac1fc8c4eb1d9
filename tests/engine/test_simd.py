"""The goldens keep every bit when no vector code beyond the processor's least is used."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLAIN_CORES = {"x86_64": "Prescott", "aarch64": "ARMV8"}
"""The least core that the BLAS can be told to take this processor for."""
CORE_NAMES = {"x86_64": {"Prescott", "Katmai"}, "aarch64": {"armv8", "ARMV8"}}
"""What it then calls itself: cores with one set of kernels go by the oldest one's name."""
GOLDENS = (
    "test_prefill_gives_every_golden_bit[tp1-64]",
    "test_decode_and_drafts_give_every_golden_bit[tp1-5]",
    "test_prefill_gives_every_golden_bit[tp3-64]",
)


def plain_environment(kernels: Path) -> dict[str, str]:
    """Vector code off, and kernels compiled anew in a folder of their own."""
    return {
        **os.environ,
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "OPENBLAS_CORETYPE": PLAIN_CORES[platform.machine()],
        "MKL_CBWR": "COMPATIBLE",
        "ATEN_CPU_CAPABILITY": "default",
        "SPARKPROOF_KERNEL_CACHE": str(kernels),
    }


@pytest.mark.slow
def test_goldens_do_not_depend_on_vector_code(tmp_path):
    nodes = [f"tests/engine/test_goldens.py::{name}" for name in GOLDENS]
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.plain_child", *nodes],
        cwd=ROOT,
        env=plain_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "3 passed" in done.stdout
    used = json.loads(done.stdout.splitlines()[-1])
    assert used["blas"] and set(used["blas"]) <= CORE_NAMES[platform.machine()]
    assert used["torch"] in ("DEFAULT", "NO AVX")
    assert used["code_bytes"] > 1000 and not used["wide_registers"]
    assert any(tmp_path.rglob("*.nbi")), "the kernels were not compiled here"

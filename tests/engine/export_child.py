"""A process that exports a sparse checkpoint and prints by how much its peak memory grew."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

from engine.checkpoint import open_checkpoint
from engine.config import parse_config
from engine.package_format import Manifest
from engine.package_writer import write_package
from engine.recipe import Recipe
from engine.shard import deal_ranks
from engine.tensorfile import DTYPE_BYTES
from engine.tensors import expected_tensors
from engine.units import MIB
from fixtures.checkpoints.mini_configs import mini_config


def write_sparse_checkpoint(directory: Path, size_bytes: int) -> None:
    """A checkpoint of zeros that takes no disk: half of it Engram tables, half experts."""
    experts = max(12, size_bytes // 2 // (11 * 2 * MIB))
    document = mini_config(
        hidden_size=1024,
        moe_intermediate_size=1280,
        n_routed_experts=experts,
        dspark_n_routed_experts=experts,
        engram_head_dim=256,
        engram_vocab_size=max(101, size_bytes // 2 // 12 // 264),
    )
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(document))
    entries, at = {}, 0
    for name, (dtype, shape) in expected_tensors(parse_config(document)).items():
        nbytes = DTYPE_BYTES[dtype]
        for items in shape:
            nbytes *= items
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    header = json.dumps(entries).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + at)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(directory: Path, size_mib: int) -> None:
    write_sparse_checkpoint(directory / "checkpoint", size_mib * MIB)
    with open_checkpoint(directory / "checkpoint") as checkpoint:
        before_bytes = peak_bytes()
        recipe = Recipe(ranks=3)
        deals = deal_ranks(checkpoint.config, recipe)
        manifest = Manifest(recipe, checkpoint.config, deals, checkpoint.fingerprint)
        write_package(directory / "package", manifest, checkpoint)
        written = [path.stat().st_size for path in (directory / "package").iterdir()]
        for path in (directory / "package").iterdir():
            os.unlink(path)
        measured = {
            "checkpoint_bytes": checkpoint.size_bytes,
            "package_bytes": sum(written),
            "before_bytes": before_bytes,
            "peak_growth_bytes": peak_bytes() - before_bytes,
        }
    print(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

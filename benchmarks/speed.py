"""Speed of the engine on this machine: prefill, decode, ranks, growth, against the float64 GEMM rate.

Prints one table. Nothing here is a test: a figure depends on the machine and on what else it does.
Run it alone: `python benchmarks/speed.py [--quick]`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from engine.core import LeadCore, follow
from engine.folding import fold_map
from engine.mapping import plan_model
from engine.mesh import build_mesh
from engine.rank import RankModel
from engine.recipe import Recipe
from engine.rendezvous import meet
from engine.request import SequenceStep
from fixtures.local_ranks import load_weights

GOLDENS = Path(__file__).parents[1] / "fixtures" / "goldens" / "mini"
PAGE = 128
POSITIONS = 40960
BASELINE = {"prefill 300": 650.0, "prefill 8192": 471.0, "decode x1": 9.1, "decode x8": 9.1}
"""tok/s of the published forward on the same mini model and a 2-core machine."""
GOAL = {"prefill 300": 4, "prefill 8192": 6, "decode x1": 8, "decode x8": 40}
FLOPS_PER_TOKEN = 11.5e6
"""Multiply-adds of the weights that one token meets, times two."""


def gemm_gflops(threads: int) -> float:
    """float64 matrix product rate of the library the kernels call, over `threads` threads."""
    from engine.ops.rows import Workers
    from engine.ops.tiles import multiply_rows

    x = np.zeros((4096, 512), np.uint16)
    w, out = np.ones((512, 512)), np.zeros((4096, 512))
    x64, y64 = np.zeros((threads, 256, 512)), np.zeros((threads, 256, 512))
    workers = Workers(threads)

    def part(index: int, first: int, past: int) -> None:
        multiply_rows(first, past, x, 0, w, x64[index], y64[index], out, 0)

    workers.each(part, len(x), 64)
    best = min(timed(lambda: workers.each(part, len(x), 64)) for _ in range(5))
    workers.close()
    return 2 * 4096 * 512 * 512 / best / 1e9


def timed(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def long_checkpoint(directory: Path) -> Path:
    """The mini checkpoint with room for long prompts."""
    shutil.copytree(GOLDENS, directory, ignore=shutil.ignore_patterns("prefill_*", "decode_*"))
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = POSITIONS
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class Driver:
    """Prefill and decode on a core."""

    def __init__(self, core: LeadCore, chunk: int) -> None:
        self.core = core
        self.chunk = chunk

    def pages(self, slot: int, past: int) -> tuple[int, ...]:
        most = -(-POSITIONS // PAGE) // 8 if slot else 0
        return tuple(slot * most + i for i in range(-(-past // PAGE)))

    def prefill(self, ids: list[int], slot: int = 0) -> None:
        for first in range(0, len(ids), self.chunk):
            part = tuple(ids[first : first + self.chunk])
            past = first + len(part)
            history = tuple(ids[max(0, first - 3) : first])
            rows = (len(part) - 1,)
            pages = self.pages(slot, past)
            self.core.step([SequenceStep(slot, first, part, history, pages, rows)])

    def decode(self, slots: int, start: int) -> None:
        pages = [self.pages(slot, start + 1) for slot in range(slots)]
        self.core.step(
            [SequenceStep(s, start, (7,), (4, 5, 6), pages[s], (0,)) for s in range(slots)]
        )


def measure(core: LeadCore, chunk: int, quick: bool) -> dict[str, float]:
    """tok/s per cell."""
    driver = Driver(core, chunk)
    rng = np.random.default_rng(20260101)
    found = {}
    lengths = (300, 4096, 8192) if quick else (300, 4096, 8192, 16384, 32768)
    for length in lengths:
        ids = rng.integers(4, 512, length).tolist()
        if length < 5000:
            driver.prefill(ids)
        repeats = 5 if length == 300 else 1 + (length < 10000)
        best = min(timed(lambda ids=ids: driver.prefill(ids)) for _ in range(repeats))
        found[f"prefill {length}"] = length / best
    for slots in (1, 8):
        for slot in range(slots):
            driver.prefill(rng.integers(4, 512, 64).tolist(), slot)
        driver.decode(slots, 64)
        times = sorted(timed(lambda s=slots: driver.decode(s, 64)) for _ in range(60))
        found[f"decode x{slots}"] = slots / times[len(times) // 2]
    return found


def run_rank(rank: int, ranks: int, port: int, directory: str, threads: int, quick: bool, results):
    """One rank as a process; rank 0 measures."""
    meeting = meet(rank, ranks, f"127.0.0.1:{port}", {}, "benchmark", 120)
    mesh = build_mesh(meeting)
    recipe = Recipe(ranks=ranks, max_concurrency=8, mtp_draft_tokens=0, prefill_chunk=4096)
    from engine.config import read_config

    config = read_config(Path(directory))
    planned = plan_model(config, recipe)
    mine = planned.ranks[rank]
    weights = load_weights(Path(directory), planned, rank)
    model = RankModel(
        config, recipe, planned.deals, mine.graphs, mine.plan, weights, POSITIONS // PAGE, mesh, threads
    )
    if rank == 0:
        core = LeadCore(model, mesh, fold_map(config, None))
        cells = measure(core, recipe.prefill_chunk, quick)
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        core.close()
        results.put((cells, peak_mib))
    else:
        follow(model, mesh)
    meeting.close()


def measure_ranks(ranks: int, directory: Path, quick: bool) -> tuple[dict[str, float], float]:
    """Cells and rank 0's peak memory at a number of ranks, each its own process."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    cores = multiprocessing.cpu_count()
    threads = max(1, cores // ranks)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    args = [(r, ranks, port, str(directory), threads, quick, results) for r in range(ranks)]
    processes = [context.Process(target=run_rank, args=a) for a in args]
    for process in processes:
        process.start()
    found = results.get(timeout=1800)
    for process in processes:
        process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="no prompts above 8,192 tokens")
    quick = parser.parse_args().quick
    cores = multiprocessing.cpu_count()
    rate = gemm_gflops(cores)
    with tempfile.TemporaryDirectory() as folder:
        directory = long_checkpoint(Path(folder) / "mini")
        measured = {ranks: measure_ranks(ranks, directory, quick) for ranks in (1, 3)}
    one, three = measured[1][0], measured[3][0]
    table = Table("cell", "TP1 tok/s", "x published", "goal", "GEMM share", "TP3 tok/s", "TP3 / TP1")
    for cell, speed in one.items():
        base = BASELINE.get(cell)
        share = speed * FLOPS_PER_TOKEN / 1e9 / rate if cell.startswith("prefill") else None
        table.add_row(
            cell,
            f"{speed:,.0f}",
            f"{speed / base:.1f}" if base else "",
            f">= {GOAL[cell]}" if cell in GOAL else "",
            f"{share:.0%}" if share else "",
            f"{three[cell]:,.0f}",
            f"{three[cell] / speed:.2f}",
        )
    console = Console(width=110)
    console.print(table)
    console.print(f"float64 GEMM on {cores} threads: {rate:.0f} GFLOP/s")
    for ranks, (_, peak_mib) in measured.items():
        console.print(f"peak memory of rank 0 at TP{ranks}: {peak_mib:,.0f} MiB")


if __name__ == "__main__":
    main()

"""The main job, end to end: a miniature checkpoint becomes a package, is served and judged.

Every step is the command that a user would type; this file only strings them together and shows what
they say.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from engine.errors import SparkproofError
from fixtures.checkpoints.random_mini import mini_config, write_random_checkpoint

RANKS = 3
PROMPT_LENGTHS = (5, 65, 131, 300)
"""Below and above the window and the selection of the mini model."""
SHOWN = 5
READY_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 60.0
EXPORT_OPTIONS = "--max-concurrency 4 --mtp-draft-tokens 5 --prefill-chunk 128".split()
JUDGED = ("suites.memory.test_maps", "suites.numerics.test_first_token")

Say = Callable[[str], None]


class StepError(SparkproofError):
    """A step of the main job that failed; carries what its command printed last."""


def command(module: str, *words: object) -> list[str]:
    """A command of this installation."""
    return [sys.executable, "-m", module, *map(str, words)]


def run_step(words: Sequence[str]) -> str:
    """Run a command to its end; its standard output. Raises StepError with its last lines."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise StepError(f"{' '.join(words[2:])} ended with {done.returncode}:\n{last}")
    return done.stdout


@dataclass
class Served:
    """A running server of all ranks."""

    process: subprocess.Popen
    url: str

    def stop(self) -> None:
        """Let it drain and end; nothing is left behind."""
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def serve(package: Path, log: Path) -> Served:
    """Start all ranks of a package on this host and wait for the line that says ready."""
    words = command("engine.cli.flare", "run", package, "--local", "--gpus", "cpu", "--port", 0)
    with log.open("w") as errors:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True)
    line = process.stdout.readline()
    if not line.startswith("ready "):
        process.kill()
        process.wait()
        raise StepError(f"flare run did not come up:\n{log.read_text()[-2000:]}")
    return Served(process, line.split()[1])


def first_tokens(url: str, vocab_size: int) -> list[tuple[int, dict]]:
    """(prompt length, logprobs of the first token) of a few prompts, top 20."""
    model = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
    found = []
    for length in PROMPT_LENGTHS:
        body = {
            "model": model,
            "prompt": [4 + (7 * i * i + 3 * i) % (vocab_size - 4) for i in range(length)],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 20,
        }
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
        if answer.status_code != 200:
            raise StepError(f"a completion was refused with {answer.status_code}: {answer.text}")
        found.append((length, answer.json()["choices"][0]["logprobs"]))
    return found


def inventory_table(document: dict) -> Table:
    """Rows of the inventory in MiB, a column a rank."""
    ranks = document["ranks"]
    table = Table("fixed device memory, MiB", *(f"rank {r['rank']}" for r in ranks))
    for row in ranks[0]["inventory"]:
        table.add_row(row.replace("_", " "), *(f"{r['inventory'][row]:,.3f}" for r in ranks))
    return table


def first_token_table(found: Sequence[tuple[int, dict]]) -> Table:
    """The best ids of the first token with their log-probabilities."""
    table = Table("prompt tokens", *(f"no. {i + 1}" for i in range(SHOWN)), "top-20 ids given")
    for length, logprobs in found:
        (ids,), (top,) = logprobs["top_token_ids"], logprobs["top_logprobs"]
        values = list(top.values())
        cells = [f"{i}: {v:.6f}" for i, v in zip(ids[:SHOWN], values[:SHOWN], strict=True)]
        table.add_row(str(length), *cells, str(len(ids)))
    return table


def judge(package: Path, checkpoint: Path) -> int:
    """The memory and numerics suites on the package; their output goes to the screen."""
    words = command("pytest", "--pyargs", *JUDGED, "-q", "-k", "package", "-p", "no:cacheprovider")
    words += ["--package", str(package), "--checkpoint", str(checkpoint)]
    return subprocess.run(words).returncode


def run_demo(folder: Path, seed: int, console: Console, say: Say) -> int:
    """All steps; the exit code of the suites' verdict."""
    checkpoint, package = folder / "checkpoint", folder / "package"
    config = mini_config()
    say(f"1/6 building a miniature checkpoint, seed {seed}")
    write_random_checkpoint(checkpoint, config, seed)
    say(f"2/6 ignition export --ranks {RANKS}: a package for each of three ranks")
    ranks = ("--ranks", RANKS, "--gpus", "cpu", "--local")
    run_step(
        command("engine.cli.ignition", "export", checkpoint, *ranks, *EXPORT_OPTIONS, "-o", package)
    )
    say("3/6 flare inspect --memory-map: what each rank maps")
    shown = run_step(
        command("engine.cli.flare", "inspect", "--memory-map", "--json", package)
    )
    say("4/6 flare run: three processes come up (the first time they compile kernels)")
    served = serve(package, folder / "flare.log")
    try:
        say("5/6 completions with top-20 log-probabilities")
        found = first_tokens(served.url, config["text_config"]["vocab_size"])
    finally:
        served.stop()
    say("6/6 the memory and numerics suites judge package and answers")
    verdict = judge(package, checkpoint)
    console.print(inventory_table(json.loads(shown)))
    console.print(first_token_table(found))
    console.print(f"package {package}")
    console.print("[bold]accepted[/bold]" if verdict == 0 else f"[bold red]refused ({verdict})")
    return verdict

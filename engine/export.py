"""From a checkpoint to packages: rank 0 plans and says what to write, every rank writes its file.

A rank that cannot see the checkpoint leaves its file to rank 0. Nothing is complete before all
ranks have written all of theirs: the package's `model.safetensors` gets its name last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.checkpoint import Checkpoint, open_checkpoint
from engine.errors import CheckpointError, PackageError, SparkproofError
from engine.folding import fold_map
from engine.hostmem import check_floor, read_host_memory
from engine.mapping import PlannedModel, Progress, plan_model
from engine.meeting import Meeting
from engine.package_format import Manifest, RankContent, content_from_json, manifest_from_json
from engine.package_writer import RankWriter, copy_side_files
from engine.recipe import Recipe

TOKENIZER = "tokenizer.json"
SIDE_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "generation_config.json",
    "chat_format.json",
)
"""Files of a checkpoint that a server needs beside the weights, where there are any."""

FOLD_NAME = "engram.fold"
"""The Engram id of every token id, int32 [vocabulary], in every rank's file."""

ReadMemory = Callable[[], int]


def available_bytes() -> int:
    """MemAvailable of this host."""
    return read_host_memory().available_bytes


@dataclass(frozen=True)
class Exported:
    """What rank 0 has to tell: the package, its map, and where each rank's file lies."""

    directory: Path
    package_hash: str
    planned: PlannedModel
    manifest: Manifest
    files: Mapping[int, str]


def find_checkpoint(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of a checkpoint: a path, or ORG/NAME in the local Hugging Face cache.

    Raises CheckpointError naming every place that was looked at; nothing is downloaded.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    looked = [str(path)]
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        home = Path(environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
        cache = Path(environ.get("HF_HUB_CACHE") or home / "hub")
        model = cache / f"models--{name.replace('/', '--')}"
        revision = model / "refs" / "main"
        if revision.is_file():
            snapshot = model / "snapshots" / revision.read_text().strip()
            if snapshot.is_dir():
                return snapshot
        looked.append(str(model))
    raise CheckpointError(f"no checkpoint {name!r}; looked at {' and '.join(looked)}")


def export_options(device: str, ranks: int, code_version: str) -> dict[str, object]:
    """What exporting ranks compare when they meet; the rest rank 0 hands out afterwards."""
    return {
        "command": "export",
        "device": device,
        "ranks": ranks,
        "code_version": code_version,
    }


def make_manifest(checkpoint: Checkpoint, planned: PlannedModel, directory: Path) -> Manifest:
    """What all files of the package say; side files are copied into `directory`."""
    config, recipe = planned.config, planned.recipe
    constants = {}
    if config.engram_layer_ids:
        constants[FOLD_NAME] = ("I32", (config.vocab_size,))
    present = [name for name in SIDE_FILES if (checkpoint.directory / name).is_file()]
    return Manifest(
        recipe=recipe,
        config=config,
        deals=planned.deals,
        checkpoint=checkpoint.fingerprint,
        graphs=planned.graph_digests,
        memory_map=planned.memory_map.to_json(),
        left_out=checkpoint.ledger(recipe.mtp_draft_tokens).summary,
        constants=constants,
        side_files=copy_side_files(checkpoint.directory, directory, present),
    )


def constants_of(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """The arrays that the exporter computes, as `make_manifest` declares them."""
    if not checkpoint.config.engram_layer_ids:
        return {}
    fold = fold_map(checkpoint.config, checkpoint.directory / TOKENIZER)
    return {FOLD_NAME: fold.astype(np.int32)}


def refuse_existing(directory: Path, overwrite: bool) -> None:
    """Refuse to replace a package unless asked to."""
    first = Path(directory) / "model.safetensors"
    if first.exists() and not overwrite:
        raise PackageError(f"{first} exists; choose another directory or give --overwrite")


def export_package(
    checkpoint_directory: Path,
    recipe: Recipe,
    output: Path,
    meet: Callable[[], Meeting],
    report: Progress,
    read_memory: ReadMemory = available_bytes,
) -> Exported:
    """Rank 0's half. `meet` is called once the checkpoint is known to be good.

    Raises MemoryFloorError before anything is read if this host or another rank's has less than
    the recipe's floor; CheckpointError, PackageError and PeerLostError as they come.
    """
    check_floor(read_memory(), recipe.host_memory_floor_bytes, "before compilation")
    with open_checkpoint(checkpoint_directory) as checkpoint, ExitStack() as stack:
        constants = constants_of(checkpoint)
        meeting = stack.enter_context(meet())
        planned = plan_model(checkpoint.config, recipe, report)
        directory = Path(output).absolute()
        manifest = make_manifest(checkpoint, planned, directory)
        elsewhere = _hand_out(meeting, manifest, checkpoint, directory)
        writers = [
            stack.enter_context(RankWriter(directory, manifest, rank, constants))
            for rank in range(recipe.ranks)
            if rank not in elsewhere
        ]
        contents = _stream(writers, checkpoint, report)
        files = {writer.rank: str(writer.path) for writer in writers}
        for rank in elsewhere:
            found = json.loads(meeting.links[rank].receive())
            contents.append(content_from_json(found["content"]))
            files[rank] = found["file"]
        _share(meeting, contents)
        package_hash = ""
        for writer in sorted(writers, key=lambda writer: -writer.rank):
            package_hash = writer.seal(contents)
    return Exported(directory, package_hash, planned, manifest, dict(sorted(files.items())))


def _hand_out(
    meeting: Meeting, manifest: Manifest, checkpoint: Checkpoint, directory: Path
) -> list[int]:
    """Give every rank its job; the ranks that write their files themselves.

    Every rank's host is asked for its memory before any of them writes.
    """
    job = {
        "manifest": manifest.to_json(),
        "checkpoint": str(checkpoint.directory.absolute()),
        "output": str(directory),
    }
    message = json.dumps(job).encode()
    for link in meeting.links.values():
        link.send(message)
    elsewhere = []
    for rank, link in meeting.links.items():
        answer = json.loads(link.receive())
        floor_bytes = manifest.recipe.host_memory_floor_bytes
        check_floor(answer["available_bytes"], floor_bytes, f"of rank {rank} before writing")
        if answer["writes"]:
            elsewhere.append(rank)
    for link in meeting.links.values():
        link.send(b"write")
    return elsewhere


def _share(meeting: Meeting, contents: Sequence[RankContent]) -> None:
    """Tell all ranks what was written; go on when each of them has sealed its file."""
    message = json.dumps([content.to_json() for content in contents]).encode()
    for link in meeting.links.values():
        link.send(message)
    for link in meeting.links.values():
        answer = link.receive()
        assert answer == b"sealed", f"rank {link.rank} answered {answer!r}"


def _stream(
    writers: Sequence[RankWriter], checkpoint: Checkpoint, report: Progress
) -> list[RankContent]:
    totals = [sum(w.nbytes for w in writer.manifest.weights(writer.rank)) for writer in writers]
    contents, before = [], 0
    for writer, size_bytes in zip(writers, totals, strict=True):

        def progress(done: int, total: int, before: int = before) -> None:
            report("write", min(before + done, sum(totals)), sum(totals))

        contents.append(writer.stream(checkpoint, progress))
        before += size_bytes
    report("write", sum(totals), sum(totals))
    return contents


@dataclass(frozen=True)
class Joined:
    """What another rank has to tell: the file it wrote, or why it left it to rank 0."""

    file: Path | None
    reason: str


def join_export(
    meeting: Meeting,
    report: Progress,
    checkpoint_directory: Path | None = None,
    output: Path | None = None,
    read_memory: ReadMemory = available_bytes,
) -> Joined:
    """Another rank's half: takes the job from rank 0, and writes its own file if it can.

    checkpoint_directory, output: where this host has them, by default where rank 0 has.
    """
    link = meeting.links[0]
    job = json.loads(link.receive())
    manifest = manifest_from_json(job["manifest"])
    source = Path(checkpoint_directory or job["checkpoint"])
    directory = Path(output or job["output"])
    with ExitStack() as stack:
        checkpoint, reason = _same_checkpoint(source, manifest, checkpoint_directory is not None)
        if checkpoint is not None:
            stack.enter_context(checkpoint)
        answer = {
            "available_bytes": read_memory(),
            "writes": checkpoint is not None,
            "reason": reason,
        }
        link.send(json.dumps(answer).encode())
        go = link.receive()
        assert go == b"write", f"rank 0 sent {go!r}"
        if checkpoint is None:
            link.receive()
            link.send(b"sealed")
            return Joined(None, reason)
        writer = stack.enter_context(
            RankWriter(directory, manifest, meeting.rank, constants_of(checkpoint))
        )
        (content,) = _stream([writer], checkpoint, report)
        message = {"content": content.to_json(), "file": str(writer.path)}
        link.send(json.dumps(message).encode())
        contents = [content_from_json(document) for document in json.loads(link.receive())]
        writer.seal(contents)
        link.send(b"sealed")
        return Joined(writer.path, "")


def _same_checkpoint(
    source: Path, manifest: Manifest, chosen: bool
) -> tuple[Checkpoint | None, str]:
    """The checkpoint at `source` if it is rank 0's, else why not; one chosen by hand must be."""
    try:
        checkpoint = open_checkpoint(source)
    except SparkproofError as error:
        if chosen:
            raise
        return None, str(error)
    if checkpoint.fingerprint == manifest.checkpoint:
        return checkpoint, ""
    checkpoint.close()
    reason = (
        f"{source} is another checkpoint: fingerprint {manifest.checkpoint[:12]} expected, "
        f"{checkpoint.fingerprint[:12]} found"
    )
    if chosen:
        raise PackageError(reason)
    return None, reason

"""The README's claims, executed: its commands exist and run, its tree is the tree."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MODULE_OF = {
    "ignition": "engine.cli.ignition",
    "flare": "engine.cli.flare",
    "sparkproof": "suites.cli",
}


def block(marker: str) -> str:
    found = re.search(rf"<!-- {marker} -->\n```sh\n(.*?)```", README, re.DOTALL)
    assert found, f"README.md has no block behind <!-- {marker} -->"
    return found.group(1).strip()


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", MODULE_OF[words[0]], *words[1:]]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_step_by_step_commands_run_as_written(tmp_path):
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    for line in block("walk").splitlines():
        done = run(shlex.split(line), tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def table_commands() -> list[list[str]]:
    rows = re.findall(r"^\| .*? \| (.*) \|$", README, re.MULTILINE)
    commands = [shlex.split(c) for row in rows for c in re.findall(r"`([^`]+)`", row)]
    return [c for c in commands if c[0] in MODULE_OF]


def test_the_table_of_tasks_names_commands():
    assert len(table_commands()) >= 9


@pytest.mark.parametrize("words", table_commands(), ids=" ".join)
def test_commands_and_options_of_the_table_exist(words, tmp_path):
    shown = run([words[0], words[1], "--help"], tmp_path)
    assert shown.returncode == 0, shown.stderr
    for word in words[2:]:
        if word.startswith("-"):
            option = re.escape(word)
            assert re.search(rf"(^|[\s,]){option}\b", shown.stdout), f"{words[:2]} has no {word}"


def test_the_layout_lists_every_folder():
    listed = set(re.findall(r"^(\w+)/ ", README, re.MULTILINE))
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    folders = {name.split("/")[0] for name in tracked.split() if "/" in name}
    assert listed == {f for f in folders if not f.startswith(".")}


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), f"{link} does not exist"


def test_ci_runs_the_test_command_as_written():
    script = (ROOT / ".ci" / "run").read_text()
    assert "<!-- test command -->" in script
    assert block("test command").endswith("pytest")
    assert "sparkproof demo" in block("main command")

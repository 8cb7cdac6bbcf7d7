"""Every code block of the README runs on a CPU; one that cannot says why in a comment above it."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from nanovllm import SamplingParams
from nanovllm.config import Config

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"((?:^<!--[^\n]*-->\n)*)^```(python|bash|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REASON = re.compile(r"<!-- not run by the tests: (.+?) -->")
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = BLOCK.findall(README)


def start(language: str, code: str, folder: Path, model: str) -> subprocess.Popen[str]:
    """Run a block in a folder that looks like a checkout and has a model at path/to/model."""
    for name in ("bench.py", "example.py", "nanovllm", "assets"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "model").symlink_to(model)
    if language == "console":
        code = "".join(line[2:] + "\n" for line in code.splitlines() if line.startswith("$ "))
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-euo", "pipefail", "-c", code]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    changes = {"PATH": path, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=folder, env={**os.environ, **changes}, text=True, **pipes)


@pytest.fixture(scope="module")
def blocks(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[subprocess.Popen[str] | str]]:
    """The blocks, all running, or the reason why one is not."""
    found: list[subprocess.Popen[str] | str] = []
    for comments, language, code in BLOCKS:
        reason = REASON.search(comments)
        found.append(reason[1] if reason else start(language, code, tmp_path_factory.mktemp("block"), tiny_model))
    yield found
    for process in found:
        if not isinstance(process, str):
            process.kill()
            process.wait()


def test_every_block_with_a_language_is_run_or_has_a_reason() -> None:
    assert len(BLOCKS) == len(re.findall(r"^```\w", README, re.MULTILINE)) > 5


@pytest.mark.parametrize("i", range(len(BLOCKS)), ids=[code[:40] for _, _, code in BLOCKS])
def test_a_code_block_runs(blocks: list[subprocess.Popen[str] | str], i: int) -> None:
    process = blocks[i]
    if isinstance(process, str):
        pytest.skip(process)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 0 and '"error": ' not in output, output


@pytest.mark.parametrize(("heading", "kind"), [("Options", Config), ("Sampling", SamplingParams)])
def test_a_table_has_every_field_and_its_default(heading: str, kind: type) -> None:
    section = re.search(rf"^## {heading}\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)
    assert section
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \|", section[1], re.MULTILINE)
    found = {name.strip("`"): default.strip("`").strip('"') for names, default in rows for name in names.split(", ")}
    assert found == {f.name: str(f.default) for f in fields(kind) if f.init and f.name != "model"}


def test_the_reading_order_has_every_module_that_says_something_once() -> None:
    listed = re.findall(r"`([\w/]+\.py)`", README.partition("## Reading order")[2].partition("\n## ")[0])
    package = ROOT / "nanovllm"
    there = [str(p.relative_to(package)) for p in package.rglob("*.py") if p.name != "__init__.py"]
    assert sorted(listed) == sorted(there)

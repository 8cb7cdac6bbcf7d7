"""Every code block of the README runs on a CPU; one that cannot says why in a comment above it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"((?:^<!--[^\n]*-->\n)*)^```(python|bash|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REASON = re.compile(r"<!-- not run by the tests: (.+?) -->")
BLOCKS = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))


def test_the_readme_has_code_blocks() -> None:
    assert len(BLOCKS) > 5


@pytest.mark.parametrize(("comments", "language", "code"), BLOCKS, ids=[code[:40] for _, _, code in BLOCKS])
def test_a_code_block_runs(comments: str, language: str, code: str, tiny_model: str, tmp_path: Path) -> None:
    if reason := REASON.search(comments):
        pytest.skip(reason[1])
    for name in ("bench.py", "example.py", "nanovllm", "assets"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "model").symlink_to(tiny_model)
    if language == "console":
        code = "".join(line[2:] + "\n" for line in code.splitlines() if line.startswith("$ "))
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-euo", "pipefail", "-c", code]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr

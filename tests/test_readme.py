"""README: its Python examples run."""

import re
from pathlib import Path

import pytest

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_an_example_runs(code: str, tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(code.replace('"path/to/model"', repr(tiny_model)), {})
    assert capsys.readouterr().out.strip()

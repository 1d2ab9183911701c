"""The examples of README.md below "Files" run, and `python -m pelton`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import LIMIT

README = Path(__file__).parent.parent / "README.md"


def example(heading: str, number: int = 0) -> str:
    (section,) = re.findall(rf"^## {heading}\n(.*?)^## ", README.read_text(), re.DOTALL | re.MULTILINE)
    block: str = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[number]
    return block


def run(script: str, directory: Path) -> str:
    """Runs a script in a directory, and returns what it prints."""
    program = [sys.executable, "-c", "import asyncio\nimport pelton\nimport pelton.files\n" + script]
    done = subprocess.run(program, cwd=directory, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_files(tmp_path: Path) -> None:
    found = run(example("Files") + "asyncio.run(files())", tmp_path)
    assert found == "b'file'\nb'HELLO, file' ['copy', 'notes']\n"


def test_record_files(tmp_path: Path) -> None:
    assert run(example("Record files"), tmp_path) == "[b'event 0', b'event 1', b'event 2']\n"


def test_logging(tmp_path: Path, name: str) -> None:
    run(example("Logging").replace('"events"', repr(name)), tmp_path)
    assert (tmp_path / "all.log").read_text() == "3 apples are left\n"


def test_numpy_and_arrow(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    assert run(example("NumPy and Arrow"), tmp_path) == "True False\n"
    pytest.importorskip("pyarrow")
    assert run(example("NumPy and Arrow", 1), tmp_path) == "{'name': ['apple', 'pear'], 'count': [3, 4]}\n"


def test_python_m_pelton_runs_the_command_where_it_is_installed(tmp_path: Path) -> None:
    def run(path: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", "pelton", "send", "a b"]
        return subprocess.run(program, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=LIMIT)

    tool = tmp_path / "pelton"
    tool.write_text(f'#!{shutil.which("sh")}\necho "$# $2"\nexit 7\n')
    tool.chmod(0o755)
    try:
        found = run(str(tmp_path))
    finally:
        # run-tests refuses what is named so and left behind.
        tool.unlink()
    assert (found.returncode, found.stdout) == (7, "2 a b\n")
    found = run("/nonexistent")
    assert found.returncode == 1 and "not in PATH" in found.stderr and "./run install" in found.stderr

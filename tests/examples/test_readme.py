"""The README's example runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_the_python_blocks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 1
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(blocks[0], str(README), "exec"), names)
    assert "(2, 0)-label-DP" in capsys.readouterr().out
    assert names["labels"].guarantee().is_private  # type: ignore[attr-defined]


def test_the_commands_exist() -> None:
    text = README.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", README.with_name("Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M))
    assert {"demo", "test"} <= named
    assert named - targets == set()


def test_local_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []

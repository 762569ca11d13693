"""The README's code runs, one block after another, and says what it says it prints."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_code(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, README.name, "exec"), {"__name__": "__main__"})
    for expected in re.findall(r"^print\(.*\)  # (.*)$", block, flags=re.MULTILINE):
        printed = capsys.readouterr().out.split()
        assert [float(x) for x in re.findall(r"[\d.]+", " ".join(printed))] == [
            float(x) for x in re.findall(r"[\d.]+", expected)
        ]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target

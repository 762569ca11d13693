"""The code of the README and of docs/ runs, one block after another, and says what it says it prints."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    (page, block)
    for page in PAGES
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
]


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[f"{page.stem}-{i}" for i, (page, _) in enumerate(BLOCKS)])
def test_code(
    page: Path, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, page.name, "exec"), {"__name__": "__main__"})
    for expected in re.findall(r"^print\(.*\)  # (.*)$", block, flags=re.MULTILINE):
        printed = capsys.readouterr().out.split()
        assert [float(x) for x in re.findall(r"[\d.]+", " ".join(printed))] == [
            float(x) for x in re.findall(r"[\d.]+", expected)
        ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target

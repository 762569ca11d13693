"""The code of the README and of docs/ runs and says what it says it prints, and links lead somewhere."""

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of a page, each with the number of lines in front of it."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_code(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A page is read from top to bottom: later blocks know what earlier ones have defined."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for n_lines, block in blocks(page, "python"):
        exec(compile("\n" * n_lines + block, page, "exec"), names)
        for expected in re.findall(r"^print\(.*\)  # (.*)$", block, flags=re.MULTILINE):
            printed = capsys.readouterr().out
            assert list(map(float, re.findall(r"[\d.]+", printed))) == list(map(float, re.findall(r"[\d.]+", expected)))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "pycon")], ids=lambda page: page.stem)
def test_examples(page: Path) -> None:
    names: dict[str, object] = {}
    for n_lines, block in blocks(page, "pycon"):
        test = doctest.DocTestParser().get_doctest(block, names, page.name, str(page), n_lines)
        assert test.examples
        results = doctest.DocTestRunner().run(test, clear_globs=False)
        names = test.globs
        assert results.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target

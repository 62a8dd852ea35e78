"""Links in pages and references in code lead somewhere; RESULTS.md is what benchmarks/tables.py makes of its files."""

import re
from pathlib import Path

from charts import RESULTS
from specserve.cli.paths import PROJECT
from tables import PAGE, page, read_results

PARTS = ("handler", "tests", "benchmarks", "config")
PAGES = [*PROJECT.glob("*.md"), *(path for part in (".github", *PARTS) for path in (PROJECT / part).rglob("*.md"))]
KINDS = ("py", "h", "cpp", "yaml")
SOURCES = [path for part in PARTS for kind in KINDS for path in (PROJECT / part).rglob(f"*.{kind}")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
REFERENCE = re.compile(r"benchmarks/decisions/[\w-]+\.md")


def prose(path: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> list[str]:
    """Links of a page to files or headings of the project that do not exist."""
    broken = []
    for link in LINK.findall(path.read_text(encoding="utf-8")):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        missing = not target.exists() or (anchor and anchor not in anchors(target))
        if missing and not re.match(r"[a-z]+:", link):
            broken.append(f"{path.name}: {link}")
    return broken


def test_links_of_pages_lead_to_files_and_headings(tmp_path: Path) -> None:
    assert [link for path in PAGES for link in broken_links(path)] == []
    (tmp_path / "there.md").write_text("# What is `here`?\n", encoding="utf-8")
    links = ["there.md", "there.md#what-is-here", "https://example.com/x", "gone.md", "there.md#gone"]
    (tmp_path / "page.md").write_text("\n".join(f"[a link]({link})" for link in links), encoding="utf-8")
    assert broken_links(tmp_path / "page.md") == ["page.md: gone.md", "page.md: there.md#gone"]


def test_decisions_that_code_refers_to_exist() -> None:
    references = {name for path in SOURCES for name in REFERENCE.findall(path.read_text(encoding="utf-8"))}
    assert [name for name in sorted(references) if not (PROJECT / name).exists()] == []


def test_results_are_what_the_script_makes_of_all_its_files() -> None:
    """`benchmarks/tables.py` writes the page."""
    assert PAGE.read_text(encoding="utf-8") == page(read_results())
    shown = {(PAGE.parent / link).resolve() for link in LINK.findall(prose(PAGE))}
    assert {path for path in RESULTS.glob("*.json") if path.resolve() not in shown} == set()

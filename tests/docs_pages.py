"""The pages of the manual as text: code blocks, links, headings, commands and quoted errors."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MANUAL = sorted(DOCS.rglob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "tests/golden/README.md",
    *sorted((ROOT / "benchmarks/results").glob("*.md")),
    *MANUAL,
]
"""Every page whose links are checked."""

_FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.S | re.M)
_COMMAND = "python -m jax_megamoe "


def name(page: Path) -> str:
    """The page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[tuple[str, str]]:
    """What stands after the opening fence, and the text, of each fenced block."""
    return [(fence["info"], fence["body"]) for fence in _FENCE.finditer(page.read_text())]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """Targets of links to other files or headings of the repository."""
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    targets: list[str] = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in targets if "://" not in target]


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may end in."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    kept = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in kept}


def broken_links(page: Path) -> list[str]:
    """Links of the page that lead nowhere."""
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def commands(page: Path) -> list[str]:
    """What follows `python -m jax_megamoe` where the page quotes a command line."""
    quoted = re.findall(r"`([^`\n]+)`", prose(page))
    quoted += [line for _, body in blocks(page) for line in body.splitlines()]
    found = (line.partition(_COMMAND) for line in quoted)
    return [arguments for _, command, arguments in found if command]


def quoted_errors(page: Path) -> list[str]:
    """Error texts in the first cells of the page's tables, `…` for what varies."""
    cells = (line.split(" | ")[0] for line in prose(page).splitlines() if line.startswith("| `"))
    return [re.findall(r"`([^`]+)`", cell)[0] for cell in cells]


def fragments(error: str) -> list[str]:
    """The parts of a quoted error that its builder has as they are."""
    parts = re.split(r"…|: expected |, got |; ", error)
    return [part.strip(" ,:") for part in parts if part.strip(" ,:")]


def unknown_parts(error: str, texts: list[str]) -> list[str]:
    """The parts of a quoted error that are in none of the texts."""
    return [part for part in fragments(error) if not any(part in text for text in texts)]


def source_texts() -> list[str]:
    """Every string that the sources of the package and of its compiled module contain."""
    texts: list[str] = []
    for path in (ROOT / "jax_megamoe").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        texts += [
            n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)
        ]
    for path in (ROOT / "ffi").glob("*.cc"):
        joined = re.sub(r'"\s*\n\s*"', "", path.read_text())
        texts += re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined)
    return texts


def public_names() -> set[str]:
    """The names that jax_megamoe/__init__.py exports."""
    tree = ast.parse((ROOT / "jax_megamoe/__init__.py").read_text())
    return {alias.name for alias in _aliases(tree) if alias.name == alias.asname}


def _aliases(tree: ast.AST) -> Iterator[ast.alias]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from node.names


def documented_names() -> list[str]:
    """The names of jax_megamoe that the API pages take from docstrings."""
    pages = (path.read_text() for path in (DOCS / "api").glob("*.md"))
    return [
        found for page in pages for found in re.findall(r"^::: jax_megamoe\.(\w+)$", page, re.M)
    ]

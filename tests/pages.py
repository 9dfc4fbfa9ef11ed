"""The code blocks of the documentation, found in its Markdown."""

import re
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"(pip|python|make|git|cd|export|cat|sed|mkdir|tensorboard|compile-profiler|\.ci/run)\b(?! {2})")
NOT_RUN = re.compile(r"<!-- not run: .+ -->")


class Block(NamedTuple):
    """A code block of a page.

    ``language`` is that of its fence, ``shell`` for what has none and begins with a command, or else empty.
    ``why_not`` is the comment that stands before it, if it says that the block is not run.
    """

    page: Path
    line: int  # of its first line, from 1
    language: str
    text: str
    why_not: str | None


def blocks(page: Path) -> list[Block]:
    """Every block of ``page``, in order."""
    found, why_not = [], None
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            language = {"bash": "shell", "sh": "shell"}.get(token.info.strip(), token.info.strip())
            text = token.content
            if not language and COMMAND.match(text):
                language, text = "shell", text.partition("\n\n")[0]  # below an empty line its output begins
            first = token.map[0] + (2 if token.type == "fence" else 1)
            found.append(Block(page, first, language, text, why_not))
        if token.nesting >= 0 and token.type != "inline":
            why_not = token.content.strip() if NOT_RUN.match(token.content) else None
    return found


def commands(text: str) -> list[str]:
    """The commands of a shell block: one a line, a here document with its text as one; no comments.

    >>> commands('''cat > a.py <<'EOF'
    ... print()
    ... EOF
    ... python a.py  # runs it
    ... ''')
    ["cat > a.py <<'EOF'\\nprint()\\n", 'python a.py']
    """
    found, lines = [], iter(text.replace("\\\n", " ").splitlines())
    for line in lines:
        if line.endswith("<<'EOF'"):
            body = [line, *iter(lambda: next(lines), "EOF")]
            found.append("\n".join(body) + "\n")
        elif command := re.sub(r"\s+# .*", "", line).strip():
            found.append(command)
    return found

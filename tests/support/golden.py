"""Golden files: cases as data, each with a query and the plans or statements that are expected for it.

A file is `<layer>/<subject>.txt` or `<layer>/<subject>.<topic>.txt` in `tests/fixtures/golden`. It starts with free text.
A case has its name, options, a query that ends with ";", and the expected sections:

    -- name: a filter moves below a projection
    -- option: value
    SELECT ...;
    ---- before
    ...
    ---- after
    ...

`pytest --update-golden` writes the sections; the rest is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import unified_diff
from functools import cache
from pathlib import Path

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden"
_OPTION = re.compile(r"^-- (\w+): (.+)$")


class GoldenFormatError(Exception):
    """A golden file or case is not written as it should be."""


@dataclass
class GoldenCase:
    """A case of a golden file."""

    file: GoldenFile
    name: str
    options: Mapping[str, str]
    sql: str  # without the ";" at the end
    expected: dict[str, str]
    _read: set[str] = field(default_factory=set)

    @property
    def subject(self) -> str:
        """What the file is about; the topic that may follow only distinguishes files."""
        return self.file.path.stem.partition(".")[0]

    @property
    def topic(self) -> str:
        return self.file.path.stem.partition(".")[2]

    @property
    def id(self) -> str:
        return f"{self.file.path.stem}: {self.name}"

    def option(self, name: str, default: str = "") -> str:
        self._read.add(name)
        return self.options.get(name, default)

    def flag(self, name: str) -> bool:
        """An option that is `yes` or missing."""
        value = self.option(name, "no")
        if value not in {"yes", "no"}:
            raise GoldenFormatError(f"{self.id}: {name} is neither yes nor no")
        return value == "yes"

    def check(self, found: Mapping[str, str], *, update: bool) -> None:
        """Compare the sections with the expected ones, or write them to the file."""
        if unknown := set(self.options) - self._read:
            raise GoldenFormatError(f"{self.id}: nothing reads the options {sorted(unknown)}")
        if update:
            self.expected = dict(found)
            self.file.write()
            return
        assert self.expected, f"{self.id} has no expected sections: run pytest --update-golden and read the difference"
        assert found == self.expected, f"{self.id} gives something else than expected\n{self._difference(found)}"

    def text(self) -> str:
        options = [f"-- {name}: {value}" for name, value in {"name": self.name, **self.options}.items()]
        return "\n".join([*options, f"{self.sql};", *_section_lines(self.expected)]) + "\n"

    def _difference(self, found: Mapping[str, str]) -> str:
        expected, lines = _section_lines(self.expected), _section_lines(found)
        return "\n".join(unified_diff(expected, lines, "expected", "found", lineterm=""))


def _section_lines(sections: Mapping[str, str]) -> list[str]:
    return [line for title, body in sections.items() for line in (f"---- {title}", *body.splitlines())]


@dataclass
class GoldenFile:
    """The cases of one file, in order."""

    path: Path
    description: str
    cases: list[GoldenCase] = field(default_factory=list)

    def text(self) -> str:
        return "\n".join([f"{self.description}\n", *(case.text() for case in self.cases)])

    def write(self) -> None:
        text = self.text()
        if text != self.path.read_text(encoding="utf-8"):
            self.path.write_text(text, encoding="utf-8")


@cache
def load_golden(layer: str) -> tuple[GoldenFile, ...]:
    """The golden files of a layer. They are loaded once, so that all cases of a file are written together."""
    return tuple(read_golden(path) for path in sorted((GOLDEN / layer).glob("*.txt")))


def golden_cases(layer: str) -> list[GoldenCase]:
    return [case for file in load_golden(layer) for case in file.cases]


def read_golden(path: Path) -> GoldenFile:
    """Read a golden file; raises GoldenFormatError if it is not written as it should be."""
    description, *blocks = re.split(r"^(?=-- name: )", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    file = GoldenFile(path, description.strip())
    file.cases = [_read_case(file, block) for block in blocks]
    names = [case.name for case in file.cases]
    if not description.strip() or not names or len(set(names)) != len(names):
        raise GoldenFormatError(f"{path.name}: needs a description, and cases with different names")
    return file


def _read_case(file: GoldenFile, block: str) -> GoldenCase:
    head, *parts = re.split(r"^---- ", block, flags=re.MULTILINE)
    lines = head.strip().splitlines()
    options: dict[str, str] = {}
    while lines and (match := _OPTION.match(lines[0])):
        options[match[1]] = match[2].strip()
        lines.pop(0)
    name, sql = options.pop("name"), "\n".join(lines).strip()
    if not sql.endswith(";"):
        raise GoldenFormatError(f"{file.path.name}: the query of {name!r} must end with ';'")
    sections = {}
    for part in parts:
        title, _, body = part.partition("\n")
        sections[title] = body.rstrip()
    return GoldenCase(file, name, options, sql[:-1], sections)

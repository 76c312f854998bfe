"""The corpus: queries in data files over one small schema, each with the mode that AUTO should choose."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Mode = Literal["DIFFERENTIAL", "FULL"]

CORPUS = Path(__file__).parent.parent / "fixtures" / "corpus"
_HEADER = re.compile(r"^-- (name|mode|by_value|placement): (.+)$")

SCHEMA_SQL: str = (CORPUS / "schema.sql").read_text(encoding="utf-8")


@dataclass(frozen=True)
class CorpusQuery:
    """A query of the corpus; `operator` is the name of its file."""

    name: str
    sql: str
    operator: str
    mode: Mode
    by_value: frozenset[str]
    """Columns that hold keys, minima or maxima of a type whose `=` is not identity (1.5 and 1.50)."""
    placement: str | None
    """With which a bug was found: it runs with this one every time. None: with either."""


def load_corpus() -> list[CorpusQuery]:
    """All queries, ordered by file name and position."""
    queries = [query for path in sorted((CORPUS / "queries").glob("*.sql")) for query in _read_file(path)]
    names = [query.name for query in queries]
    if len(set(names)) != len(names):
        raise ValueError(f"corpus names are not unique: {sorted({n for n in names if names.count(n) > 1})}")
    return queries


def half_of_corpus(placement: str) -> list[CorpusQuery]:
    """The queries that every test run covers with this placement: one half, and those that require the placement."""
    turn = ("auto", "spark")
    return [query for i, query in enumerate(load_corpus()) if (query.placement or turn[i % 2]) == placement]


def _read_file(path: Path) -> list[CorpusQuery]:
    blocks = re.split(r"^(?=-- name: )", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    # Text before the first header describes the file.
    return [_read_block(block, path) for block in blocks if block.startswith("-- name: ")]


def _read_block(block: str, path: Path) -> CorpusQuery:
    headers: dict[str, str] = {}
    lines = block.strip().splitlines()
    while lines and (match := _HEADER.match(lines[0])):
        headers[match[1]] = match[2].strip()
        lines.pop(0)
    sql = "\n".join(lines).strip()
    if not sql.endswith(";") or sql.count(";") != 1:
        raise ValueError(f"{path.name}: {headers['name']} must be one statement that ends with ';'")
    by_value = frozenset(column.strip() for column in headers.get("by_value", "").split(",") if column.strip())
    mode = _mode(headers.get("mode", "DIFFERENTIAL"))
    return CorpusQuery(headers["name"], sql[:-1], path.stem, mode, by_value, headers.get("placement"))


def _mode(text: str) -> Mode:
    match text:
        case "DIFFERENTIAL" | "FULL":
            return text
    raise ValueError(f"unknown mode in the corpus: {text}")

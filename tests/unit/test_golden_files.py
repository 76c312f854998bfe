"""The golden files themselves: how they are read, compared and written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.golden import GOLDEN, GoldenFormatError, read_golden
from tests.support.sql_layout import sql_layout

TEXT = """What the file is about.

-- name: first
-- placement: spark
SELECT 1;
---- plan
a
  b
---- sql

-- name: second
SELECT 2;
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "subject.topic.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("path", sorted(GOLDEN.rglob("*.txt")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_writing_a_file_changes_nothing(path: Path) -> None:
    assert read_golden(path).text() == path.read_text(encoding="utf-8")


def test_a_case_has_options_a_query_and_sections(path: Path) -> None:
    first, second = read_golden(path).cases
    assert (first.subject, first.topic, first.name, first.sql) == ("subject", "topic", "first", "SELECT 1")
    assert first.option("placement", "auto") == "spark"
    assert second.option("placement", "auto") == "auto"
    assert first.expected == {"plan": "a\n  b", "sql": ""}


def test_other_sections_than_expected_fail(path: Path) -> None:
    first, second = read_golden(path).cases
    first.option("placement")
    first.check({"plan": "a\n  b", "sql": ""}, update=False)
    for found in ({"plan": "a\n b", "sql": ""}, {"plan": "a\n  b"}, {"plan": "a\n  b", "sql": "", "more": ""}):
        with pytest.raises(AssertionError, match=r"(?s)--- expected.*\+\+\+ found"):
            first.check(found, update=False)
    with pytest.raises(AssertionError, match="second has no expected sections"):
        second.check({}, update=False)


def test_an_option_that_nothing_reads_fails(path: Path) -> None:
    first, _ = read_golden(path).cases
    with pytest.raises(GoldenFormatError, match="placement"):
        first.check(first.expected, update=True)


def test_an_update_writes_the_sections_of_one_case(path: Path) -> None:
    _, second = read_golden(path).cases
    second.check({"plan": "c\nd"}, update=True)
    assert path.read_text() == TEXT + "---- plan\nc\nd\n"
    read_golden(path).cases[1].check({"plan": "c\nd"}, update=False)


@pytest.mark.parametrize(
    "text",
    [
        "No cases.\n",
        "-- name: no description\nSELECT 1;\n",
        "Two of a name.\n\n-- name: a\nSELECT 1;\n\n-- name: a\nSELECT 2;\n",
        "No semicolon.\n\n-- name: a\nSELECT 1\n",
    ],
)
def test_a_file_that_is_written_wrongly_is_refused(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(GoldenFormatError):
        read_golden(path)


def test_a_statement_has_a_line_for_each_clause() -> None:
    text = (
        "SELECT 'FROM (' || extract(year FROM a), (SELECT count(*) FROM b)"
        " FROM (SELECT a FROM t WHERE a IS NOT DISTINCT FROM 1) AS s"
    )
    assert sql_layout(text).splitlines() == [
        "SELECT 'FROM (' || extract(year FROM a), (SELECT count(*) FROM b)",
        "FROM (",
        "  SELECT a",
        "  FROM t",
        "  WHERE a IS NOT DISTINCT FROM 1",
        ") AS s",
    ]

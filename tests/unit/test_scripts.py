"""The SQL scripts of the catalog and the list of them."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from pgtrickle.catalog.scripts import FINAL, FUNCTIONS, MIGRATIONS, TEMPLATES, read_script

CATALOG = Path(str(files("pgtrickle.catalog")))
SQL_FILES = sorted(CATALOG.glob("**/*.sql"))


def test_every_script_is_listed_once() -> None:
    listed = (*MIGRATIONS, *TEMPLATES, *FUNCTIONS, *FINAL)
    found = [str(path.relative_to(CATALOG / "sql").with_suffix("")) for path in (CATALOG / "sql").glob("**/*.sql")]
    assert sorted(listed) == sorted(found)


def test_migrations_are_numbered_by_version() -> None:
    assert [int(name.removeprefix("migrations/")[:4]) for name in MIGRATIONS] == list(range(1, len(MIGRATIONS) + 1))


@pytest.mark.parametrize("path", SQL_FILES, ids=lambda path: str(path.relative_to(CATALOG)))
def test_lines_are_shorter_than_120_columns(path: Path) -> None:
    long = {number: len(line) for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) >= 120}
    assert long == {}


def test_parameters_of_templates_have_one_form() -> None:
    """`{name}` in small letters; braces around anything else are text."""
    parameters = {name for template in TEMPLATES for name in re.findall(r"\{(\w+)\}", read_script(template))}
    assert all(re.fullmatch("[a-z_]+", name) for name in parameters)

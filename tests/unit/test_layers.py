"""Dependencies between packages are one-way, including imports under TYPE_CHECKING and inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2] / "pgtrickle"

# A package may import those of earlier lines, and itself. `pgtrickle` is the facade, pgtrickle/__init__.py.
LAYERS = (
    {"_version", "enums", "errors"},
    {"query", "frontier", "embedded"},
    {"ivm"},
    {"compile"},
    {"catalog"},
    {"postgres"},
    {"sites", "spark"},
    {"refresh"},
    {"api", "service"},
    {"observability", "demo", "pgtrickle"},
    {"cli"},
)
# No connection and no Spark here: of psycopg nothing but the composition of SQL.
PURE = {"query", "ivm", "compile", "frontier"}
# What the command line goes through.
CLI_USES = {"_version", "enums", "errors", "api", "service", "observability", "demo", "cli"}

# Exceptions of today, by importing and imported module. Each list may only become shorter.
UPWARDS: set[tuple[str, str]] = set()
CLI_BYPASSES = {
    ("cli.commands.prepare", "spark.prepare"),
    ("cli.commands.prepare", "spark.progress"),
    ("cli.commands.run", "catalog.install"),
    ("cli.commands.run", "catalog.trust"),
    ("cli.commands.run", "spark.progress"),
    ("cli.commands.run", "spark.session"),
    ("cli.commands.tune", "spark.session"),
    ("cli.commands.verify", "spark.progress"),
    ("cli.common", "refresh.progress"),
    ("cli.diagnostics", "catalog.install"),
    ("cli.diagnostics", "catalog.problems"),
    ("cli.diagnostics", "postgres.connection"),
    ("cli.diagnostics", "spark.session"),
    ("cli.refresh_request", "refresh.results"),
    ("cli.refresh_request", "spark.progress"),
}
CYCLES = {
    ("query.subqueries", "query.binder"),
}


def name_of(path: Path) -> str:
    """The name of a module below `pgtrickle`."""
    return (
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        .removesuffix(".__init__")
        .replace("__init__", "pgtrickle")
    )


MODULES = {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}


def imports_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Imported modules, and the names that are imported from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def own_imports() -> set[tuple[str, str]]:
    """All pairs of importing and imported modules of pgtrickle."""
    found = set()
    for module, tree in MODULES.items():
        for imported, name in imports_of(tree):
            if imported.partition(".")[0] == "pgtrickle":
                whole = f"{imported}.{name}".removeprefix("pgtrickle.")
                found.add((module, whole if whole in MODULES else whole.rpartition(".")[0] or "pgtrickle"))
    return found


def package_of(module: str) -> str:
    return module.partition(".")[0]


def test_packages_import_only_layers_below_them() -> None:
    level = {package: number for number, layer in enumerate(LAYERS) for package in layer}
    assert {package_of(module) for module in MODULES} == level.keys()
    upwards = {
        (module, imported)
        for module, imported in own_imports()
        if package_of(module) != package_of(imported) and level[package_of(imported)] >= level[package_of(module)]
    }
    assert upwards == UPWARDS


def test_no_module_imports_itself_by_way_of_others() -> None:
    edges = own_imports()
    assert edges >= CYCLES
    graph = {module: {target for source, target in edges - CYCLES if source == module} for module in MODULES}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError, which names them


def test_the_algebra_has_no_connection_and_no_spark() -> None:
    wrong = {
        (module, imported)
        for module, tree in MODULES.items()
        if package_of(module) in PURE
        for imported, name in imports_of(tree)
        if imported.partition(".")[0] in {"psycopg", "pyspark", "py4j", "pyarrow"}
        and (imported, name) != ("psycopg", "sql")
    }
    assert not wrong


def test_the_command_line_goes_through_the_api_and_the_service() -> None:
    bypasses = {pair for pair in own_imports() if package_of(pair[0]) == "cli" and package_of(pair[1]) not in CLI_USES}
    assert bypasses == CLI_BYPASSES

"""Shared scans: reading the changes of a table once for all stream tables of a refresh."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from psycopg import sql

from pgtrickle.compile.postgres import form_type
from pgtrickle.compile.shared_scan import SharedScan, Slice, change_scan
from pgtrickle.frontier.snapshot import Snapshot
from pgtrickle.frontier.window import since
from pgtrickle.query.plan import Plan
from pgtrickle.refresh.fetch.fetcher import Fetcher, FormList, arrow_type
from pgtrickle.refresh.fetch.medium import InMemory, Request

# Fragments in one statement, whose result can have at most 1,664 columns in PostgreSQL.
_MOST = 100


def read_shared_scans(fetchers: Sequence[Fetcher[pa.Table]], medium: InMemory) -> None:
    """Read the changes that several fragments need once, for fetchers that use one medium.

    One reader reads for all fragments of a group. So what runs an owner's code is not in a group with what the service
    reads with its own rights.
    """
    groups: dict[tuple[int, Snapshot, bool], list[tuple[Fetcher[pa.Table], Plan, FormList]]] = {}
    for fetcher in fetchers:
        for plan, forms in fetcher.missing.items():
            scan = change_scan(plan)
            window = fetcher.windows.get(scan.relation.database) if scan is not None else None
            if scan is not None and window is not None:
                own_code = fetcher.readers[scan.relation.database].own_code
                groups.setdefault((scan.relation.oid, window, own_code), []).append((fetcher, plan, forms))
    for wanted in groups.values():
        for i in range(0, len(wanted), _MOST):
            if len(wanted[i : i + _MOST]) > 1:
                _read_group(wanted[i : i + _MOST], medium)


def _read_group(wanted: Sequence[tuple[Fetcher[pa.Table], Plan, FormList]], medium: InMemory) -> None:
    first, plan, _ = wanted[0]
    scan = change_scan(plan)
    assert scan is not None
    reader = first.readers[scan.relation.database]
    shared = SharedScan(scan.relation)
    slices: list[Slice] = [shared.add(plan, forms) for _, plan, forms in wanted]
    columns = [(name, type_, form) for name, type_, form in shared.columns.values()]
    window = since(first.windows[scan.relation.database], "__pgt_xid")
    names = [(name, form_type(type_, form)) for name, type_, form in columns]
    names += [(flag, "boolean") for flag in shared.flags.values()] + [("w", "bigint")]
    schema = pa.schema(
        [(name, arrow_type(type_, form)) for name, type_, form in columns]
        + [(flag, pa.bool_()) for flag in shared.flags.values()]
        + [("w", pa.int64())]
    )

    def statement(part: sql.Composable | None, rows: sql.Composable | None) -> sql.Composable:
        assert part is None
        assert rows is None
        return reader.as_reader(plan, shared.statement(), {}, window, names)

    whole = medium.read(Request(plan, schema, statement, reader))
    for (fetcher, fragment, _), slice_ in zip(wanted, slices, strict=True):
        fetcher.put(fragment, medium.cut_out(whole, slice_))

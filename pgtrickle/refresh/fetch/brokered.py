"""Taking changes from a broker's offer instead of reading them."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from pgtrickle.compile.postgres import form_type
from pgtrickle.compile.shared_scan import SharedScan, change_scan
from pgtrickle.frontier.snapshot import Snapshot
from pgtrickle.query.plan import Plan
from pgtrickle.refresh.fetch.fetcher import Fetcher, FormList, arrow_type
from pgtrickle.sites.shared_cut import WEIGHT, Interest, SharedChanges, SharedCut


def take_brokered(
    fetcher: Fetcher[pa.Table], database: str, stable_names: Mapping[int, str], shared_cut: SharedCut | None
) -> dict[str, Interest]:
    """Give the fetcher the rows that a broker offers; return what it needs beyond them, by stable name."""
    lacking: dict[str, Interest] = {}
    window = fetcher.windows.get(database)
    for plan, forms in fetcher.missing.items():
        scan = change_scan(plan)
        if scan is None or scan.relation.database != database or window is None or database in fetcher.joined:
            continue
        name = stable_names.get(scan.relation.oid)
        if name is None:
            continue
        brokered = shared_cut.of(name, window) if shared_cut is not None else None
        found = _rows(plan, forms, brokered, window) if brokered is not None else None
        if found is not None:
            fetcher.put(plan, found)
        else:
            _add(lacking.setdefault(name, Interest()), plan, forms)
    return lacking


def _rows(plan: Plan, forms: FormList, brokered: SharedChanges, window: Snapshot) -> pa.Table | None:
    """A fragment's rows, or None unless everything that it needs is offered."""
    shared, slice_ = _shared_scan(plan, forms)
    texts = {name: text for text, (name, _, _) in shared.columns.items()}
    (condition,) = shared.flags or (None,)
    if not set(texts.values()) | ({condition} if condition else set()) <= brokered.columns.keys():
        return None
    types = {text: arrow_type(type_, form) for text, (_, type_, form) in shared.columns.items()}
    if any(brokered.rows.schema.field(brokered.columns[text]).type != type_ for text, type_ in types.items()):
        return None  # a column was retyped since
    flag = [brokered.columns[condition]] if condition else []
    columns = {mine: brokered.columns[texts[shared_name]] for mine, shared_name in slice_.items()}
    rows = brokered.behind(window, list(dict.fromkeys([*columns.values(), *flag])))
    if flag:
        rows = rows.filter(rows.column(flag[0]))
    return pa.table([rows.column(name) for name in [*columns.values(), WEIGHT]], names=[*columns, WEIGHT])


def _add(interest: Interest, plan: Plan, forms: FormList) -> None:
    shared, _ = _shared_scan(plan, forms)
    for text, (_, type_, form) in shared.columns.items():
        arrow = arrow_type(type_, form)
        sizes = (arrow.precision, arrow.scale) if pa.types.is_decimal(arrow) else (0, 0)
        interest.expressions[text] = (form_type(type_, form), *sizes)
    interest.conditions |= set(shared.flags)


def _shared_scan(plan: Plan, forms: FormList) -> tuple[SharedScan, dict[str, str]]:
    scan = change_scan(plan)
    assert scan is not None
    shared = SharedScan(scan.relation)
    return shared, shared.add(plan, forms).columns

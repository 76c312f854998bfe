"""The stage in which Spark computes the deltas."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from pgtrickle.errors import RefreshError
from pgtrickle.refresh.apply.load import Delta, Staged
from pgtrickle.refresh.compute.shared_text import Input
from pgtrickle.refresh.compute.spark_jobs import run_jobs
from pgtrickle.refresh.progress import Progress
from pgtrickle.refresh.stages import Computed, Fetched


def compute(tables: Sequence[Fetched], progress: Progress) -> list[Computed]:
    """The deltas of all stream tables. Those that Spark cannot compute fail."""
    deltas: dict[int, Delta | None] = {}
    for table in tables:
        if table.large is not None:
            deltas |= _compute_large(table, progress)
    inputs = {
        table.row.pgt_id: Input(table.decided.job, table.tables, table.parts)
        for table in tables
        if table.decided.job is not None and table.large is None
    }
    if inputs:
        started = time.monotonic()
        progress.on_step("spark")
        deltas |= _run(tables, inputs, progress)
        for pgt_id in inputs:
            progress.phases[pgt_id].spark = (time.monotonic() - started) / len(inputs)
    computed = [
        Computed(replace(table, tables={}, parts={}), deltas.get(table.row.pgt_id))
        for table in progress.failed.healthy(tables)
    ]
    for one in computed:
        rows = one.delta.num_rows if isinstance(one.delta, pa.Table) else None
        progress.reached("compute", one, rows=0 if one.delta is None else rows)
    return computed


def _compute_large(table: Fetched, progress: Progress) -> dict[int, Delta | None]:
    job, pgt_id = table.decided.job, table.row.pgt_id
    assert job is not None
    assert table.large is not None
    started = time.monotonic()
    progress.on_step("spark")
    stage = f"stage_{pgt_id}_{table.decided.claimed.token}"
    try:
        delta = table.large.compute(job, stage)
    except RefreshError as error:
        progress.failed.add(error, [table])
        return {}
    finally:
        progress.phases[pgt_id].spark = time.monotonic() - started
    if isinstance(delta, Staged):
        progress.staged[pgt_id] = delta
    return {pgt_id: delta}


def _run(tables: Sequence[Fetched], inputs: dict[int, Input], progress: Progress) -> dict[int, Delta | None]:
    """Run all jobs together; if that fails, run each alone, so that one stream table does not stop the others."""
    try:
        return dict(zip(inputs, run_jobs(list(inputs.values())), strict=True))
    except RefreshError as error:
        if len(inputs) == 1:
            progress.failed.add(error, [table for table in tables if table.row.pgt_id in inputs])
            return {}
    deltas: dict[int, Delta | None] = {}
    for table in tables:
        if table.row.pgt_id in inputs:
            try:
                deltas[table.row.pgt_id] = run_jobs([inputs[table.row.pgt_id]])[0]
            except RefreshError as error:
                progress.failed.add(error, [table])
    return deltas

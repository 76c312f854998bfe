"""Jobs that share one Spark text, because their plans differ only in what they read.

Spark plans a text again each time, which takes most of the time if a refresh has few rows. A hundred tenants' totals,
or one query with a hundred constants, are planned once: their rows are in the same tables, with the numbers of their
jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pgtrickle.compile.spark.compiler import SHARED, NotShareableError
from pgtrickle.query.plan import Fragment
from pgtrickle.refresh.fetch.medium import Part
from pgtrickle.refresh.planning.jobs import Job, SharedText

SHARED_FROM = 2  # jobs
# The most rows of a job that shares a text. Jobs over the same changes read the same rows, unless they share a text:
# then each job has a copy. For few rows that costs less than planning another text, for many it costs more.
SHARED_ROWS = 2000
MOST_TEXTS = 64  # cached per job


@dataclass(frozen=True)
class Input:
    """The input of one job. `parts` has the fragments whose rows are part of a shared read."""

    job: Job
    tables: Mapping[Fragment, pa.Table]
    parts: Mapping[Fragment, Part]

    def gives_anything(self, filled: Collection[Fragment]) -> bool:
        """Whether the delta can have rows if only these fragments have rows."""
        return self.job.output(lambda fragment: "" if fragment in filled else None) is not None


@dataclass(frozen=True)
class Sharers:
    """The jobs of one text, by their numbers."""

    jobs: Mapping[int, Input]
    shareable: bool

    @property
    def share(self) -> bool:
        return self.shareable and len(self.jobs) >= SHARED_FROM

    @property
    def first(self) -> tuple[int, Input]:
        return next(iter(self.jobs.items()))

    def rows(self, fragment: Fragment) -> pa.Table:
        """The rows of all jobs for a fragment of the first job. The others' fragments are found by position."""
        place = list(self.first[1].job.fragments).index(fragment)
        names = sorted(self.first[1].tables[fragment].schema.names)
        tables = []
        for number, item in self.jobs.items():
            rows = item.tables[list(item.job.fragments)[place]].select(names)
            tables.append(rows.append_column(SHARED[0], pa.repeat(pa.scalar(number, pa.int32()), rows.num_rows)))
        return pa.concat_tables(tables)


def share(jobs: Sequence[Input]) -> list[Sharers]:
    """Group the jobs by the texts that they share; others get a text of their own, and those without a delta none."""
    shared: dict[SharedText, dict[int, Input]] = {}
    alone: list[Sharers] = []
    for number, item in enumerate(jobs):
        filled = frozenset(fragment for fragment, table in item.tables.items() if table.num_rows)
        if sum(table.num_rows for table in item.tables.values()) > SHARED_ROWS:
            if item.gives_anything(filled):
                alone.append(Sharers({number: item}, shareable=False))
            continue
        try:
            text = item.job.texts.get(filled) or _text(item, filled)
        except NotShareableError:
            if item.gives_anything(filled):
                alone.append(Sharers({number: item}, shareable=False))
            continue
        if len(item.job.texts) >= MOST_TEXTS:
            item.job.texts.clear()
        item.job.texts[filled] = text
        if text.output is not None:
            shared.setdefault(text, {})[number] = item
    return [*(Sharers(members, shareable=True) for members in shared.values()), *alone]


def _text(item: Input, filled: Collection[Fragment]) -> SharedText:
    """The job's text over tables that are named by position, so that jobs that can share it have the same."""
    places = {fragment: f"pgt_{i}" for i, fragment in enumerate(item.job.fragments) if fragment in filled}
    schemas = tuple(
        tuple(sorted((field.name, str(field.type)) for field in item.tables[fragment].schema)) for fragment in places
    )
    return SharedText(item.job.output(places.get, SHARED), schemas)

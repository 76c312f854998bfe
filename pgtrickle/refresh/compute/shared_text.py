"""Which jobs share one Spark text: those whose plans differ in nothing but what they read.

Spark plans a text anew each time, and for the few rows of a refresh that is most of the time. A hundred tenants' totals, or one
query with a hundred constants, are planned once: their rows stand in the same tables, each with the number of its job.
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
# Of a job. Jobs over the same changes stand on the same rows, unless they share a text: then each brings its own. Few rows cost
# less than a plan of one's own, many cost more.
SHARED_ROWS = 2000
MOST_TEXTS = 64  # that a job keeps


@dataclass(frozen=True)
class Input:
    """What one job reads. Fragments that were read together stand in one table."""

    job: Job
    tables: Mapping[Fragment, pa.Table]
    parts: Mapping[Fragment, Part]

    def gives_anything(self, filled: Collection[Fragment]) -> bool:
        """Whether something can come out where only these fragments have rows."""
        return self.job.output(lambda fragment: "" if fragment in filled else None) is not None


@dataclass(frozen=True)
class Sharers:
    """Jobs, by their numbers, that one text is for."""

    jobs: Mapping[int, Input]
    shareable: bool

    @property
    def share(self) -> bool:
        return self.shareable and len(self.jobs) >= SHARED_FROM

    @property
    def first(self) -> tuple[int, Input]:
        return next(iter(self.jobs.items()))

    def rows(self, fragment: Fragment) -> pa.Table:
        """The rows of all jobs for what is this fragment to the first; a job's fragments come in one order."""
        place = list(self.first[1].job.fragments).index(fragment)
        names = sorted(self.first[1].tables[fragment].schema.names)
        tables = []
        for number, item in self.jobs.items():
            rows = item.tables[list(item.job.fragments)[place]].select(names)
            tables.append(rows.append_column(SHARED[0], pa.repeat(pa.scalar(number, pa.int32()), rows.num_rows)))
        return pa.concat_tables(tables)


def share(jobs: Sequence[Input]) -> list[Sharers]:
    """The jobs by the texts they share, and those that have one of their own; without those that give nothing."""
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
    """The text over tables that are called by their place: jobs that can share it have the same."""
    places = {fragment: f"pgt_{i}" for i, fragment in enumerate(item.job.fragments) if fragment in filled}
    schemas = tuple(
        tuple(sorted((field.name, str(field.type)) for field in item.tables[fragment].schema)) for fragment in places
    )
    return SharedText(item.job.output(places.get, SHARED), schemas)

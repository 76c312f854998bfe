"""Planning the job of one refresh: what it reads, and what Spark computes from that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from pgtrickle.catalog.analysis import Analysis
from pgtrickle.compile.placement import Placement
from pgtrickle.compile.postgres import compile_fragment
from pgtrickle.enums import Action
from pgtrickle.ivm.simplify import simplify
from pgtrickle.query.budget import Budget, planning_within
from pgtrickle.refresh.decide.decision import Decision
from pgtrickle.refresh.planning.jobs import Job, change_job, check_job, full_job, rows_job, state_job
from pgtrickle.refresh.planning.programs import Plans
from pgtrickle.refresh.stages import AtCut


@dataclass(frozen=True)
class JobPlanner:
    """Plans jobs, and keeps them for refreshes that change the same sources."""

    conn: psycopg.Connection[Any]
    plans: Plans

    def job(self, at_cut: AtCut, decision: Decision, placement: str) -> Job | None:
        """The job for an action; None if nothing has to be read. Raises OverBudget if planning it takes too much."""
        if decision.action is Action.NO_DATA:
            return None
        changed = frozenset(source.relid for source in at_cut.sources if source.changed)
        key = (at_cut.compiled.shape, placement, decision.action, changed)
        where: Placement = "spark" if placement == "spark" else "auto"
        return self.plans.job(at_cut.row.pgt_id, key, lambda: self._plan(at_cut, decision, where, changed))

    def _plan(self, at_cut: AtCut, decision: Decision, placement: Placement, changed: frozenset[int]) -> Job | None:
        """Plan a job within a budget, because the other stream tables of the refresh wait meanwhile."""
        with planning_within(Budget()):
            job = self._build(at_cut, decision, placement, changed)
            if job is not None:
                check_job(job)
                for fragment in job.fragments:
                    compile_fragment(fragment.plan, ())  # cached for the fetch
            return job

    def _build(self, at_cut: AtCut, decision: Decision, placement: Placement, changed: frozenset[int]) -> Job | None:
        compiled = at_cut.compiled
        program = compiled.program
        if decision.action is Action.DIFFERENTIAL:
            assert program is not None
            assert program.change is not None
            change = simplify(program.change, changed)
            return None if change is None else change_job(program, change, placement)
        if program is not None and program.additive is not None:
            return state_job(program.additive, placement)
        if program is not None and program.finish and placement == "spark":
            return rows_job(program.core, program.core.columns, placement)
        with self.conn.transaction():
            storage = Analysis(self.conn).relations(at_cut.row.relid)
        return full_job(compiled, next(iter(storage.values())), placement)

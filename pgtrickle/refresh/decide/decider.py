"""The stage that decides what a refresh does, and makes the job for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pgtrickle.enums import Action, RefreshMode
from pgtrickle.errors import KeyLostError, NotDifferentiableError
from pgtrickle.frontier.frontier import Frontier
from pgtrickle.query.budget import OverBudget
from pgtrickle.refresh.cut.cut import Cut
from pgtrickle.refresh.decide.cost import check_fuse, compare_costs
from pgtrickle.refresh.decide.decision import Decision, decide
from pgtrickle.refresh.planning.job_planner import JobPlanner
from pgtrickle.refresh.planning.jobs import Job
from pgtrickle.refresh.stages import AtCut, Decided


@dataclass(frozen=True)
class Decider:
    """Decides on the actions of refreshes at one cut."""

    cut: Cut
    jobs: JobPlanner

    def decide(self, at_cut: AtCut) -> Decided:
        """The action of a refresh, with its job."""
        _check_key(at_cut)
        decision = decide(at_cut.row, at_cut.compiled, at_cut.sources, at_cut.frontier)
        check_fuse(at_cut, decision, self.cut)
        decision, changes = compare_costs(at_cut, decision, self.cut)
        frontier = _as_far_as_read(at_cut, decision)
        if any(source.database and not source.attached for source in at_cut.sources):
            # Capture must be set up before these can be read.
            return Decided(at_cut, decision, frontier, at_cut.row.placement, None, changes)
        decision, placement, job = self._job(at_cut, decision)
        return Decided(at_cut, decision, frontier, placement, job, changes)

    def in_full(self, decided: Decided, reason: str) -> Decided:
        """The same refresh in full."""
        decision = replace(decided.decision, action=Action.FULL, reason=reason)
        decision, placement, job = self._job(decided.at_cut, decision)
        return replace(decided, decision=decision, placement=placement, job=job)

    def _job(self, at_cut: AtCut, decision: Decision) -> tuple[Decision, str, Job | None]:
        """The job, and the decision and placement with which it can be planned within the budget."""
        placement = at_cut.row.placement
        while True:
            try:
                return decision, placement, self.jobs.job(at_cut, decision, placement)
            except OverBudget as error:
                decision, placement = _cheaper_to_plan(at_cut, decision, placement, error)


def _cheaper_to_plan(at_cut: AtCut, decision: Decision, placement: str, error: OverBudget) -> tuple[Decision, str]:
    """A full refresh instead of a differential one, or one by PostgreSQL instead of Spark.

    Raises NotDifferentiableError if neither is allowed.
    """
    row = at_cut.row
    if decision.action is Action.DIFFERENTIAL and row.refresh_mode == RefreshMode.AUTO:
        return replace(decision, action=Action.FULL, reason=error.reason), placement
    if decision.action is not Action.DIFFERENTIAL and placement == "spark" and not row.in_parts:
        return decision, "auto"
    raise NotDifferentiableError(
        f"{row.label} cannot be refreshed: {error.reason}",
        "Use refresh_mode AUTO or FULL, or make several stream tables of it that read each other.",
    ) from error


def _check_key(at_cut: AtCut) -> None:
    """Raise KeyLostError if the stream table's key is no longer a key of its query: rows would overwrite each other."""
    row, program = at_cut.row, at_cut.compiled.program
    stored = row.key_columns
    if stored is None or program is None or (program.key is not None and set(program.key) <= set(stored)):
        return
    raise KeyLostError(
        f"{row.label} has the key ({', '.join(stored)}), which is no longer one of its query",
        "The query or the key of a source was changed. Give the source its key back and resume the stream table,"
        " or drop it and create it again.",
    )


def _as_far_as_read(at_cut: AtCut, decision: Decision) -> Frontier:
    """The frontier to store. A remote database without changes keeps its stored entry, and gets no new proof."""
    now = at_cut.frontier
    known = at_cut.row.stored_frontier
    if known is None or decision.action not in {Action.DIFFERENTIAL, Action.NO_DATA}:
        return now
    news = {source.database for source in at_cut.sources if source.changed}
    return replace(
        now,
        databases={
            name: one if name in news or name not in known.databases else known.databases[name]
            for name, one in now.databases.items()
        },
    )

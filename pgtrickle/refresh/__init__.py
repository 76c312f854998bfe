"""One refresh, in the order of its stages: claim, planning, cut, decide, fetch, compute, apply."""

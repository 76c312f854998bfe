"""One refresh, with a folder per stage, in this order: claim, planning, cut, decide, fetch, compute, apply."""

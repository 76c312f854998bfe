"""The bounds of commit times that follow from polling remote databases."""

from __future__ import annotations

from pgtrickle.service.remote_watch import Look


def test_a_change_counts_from_its_capture_and_from_the_previous_poll() -> None:
    first = Look().next(1000.0, [("a", 1, 30.0), ("b", 2, None)])
    assert first.active == (("a", 1, 970.0), ("b", 2, 0.0))
    second = first.next(1010.0, [("a", 1, 40.5), ("a", 3, 2.0), ("b", 4, 600.0)])
    assert second.active == (("a", 1, 970.0), ("a", 3, 1008.0), ("b", 4, 1000.0))

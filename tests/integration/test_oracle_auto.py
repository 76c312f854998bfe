"""Half of the corpus in four rounds with placement auto; the whole corpus in the long tests."""

from __future__ import annotations

import pytest

from tests.support.corpus import half_of_corpus, load_corpus
from tests.support.database import TestDatabase
from tests.support.oracle_rounds import SHARED_ROUNDS, SOME_ROUNDS, run_rounds

SEED = 20261115


def test_half_of_the_corpus_is_exact_after_every_round(database: TestDatabase) -> None:
    statements = run_rounds(database, half_of_corpus("auto"), "auto", SEED, SOME_ROUNDS)
    assert statements


@pytest.mark.long
def test_the_whole_corpus_is_exact_after_every_round(database: TestDatabase) -> None:
    assert run_rounds(database, load_corpus(), "auto", SEED + 1, shared=SHARED_ROUNDS)

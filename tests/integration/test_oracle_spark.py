"""The other half of the corpus in four rounds with placement spark; the whole corpus in the long tests."""

from __future__ import annotations

import pytest

from tests.support.corpus import half_of_corpus, load_corpus
from tests.support.database import TestDatabase
from tests.support.oracle_rounds import SHARED_ROUNDS, SOME_ROUNDS, run_rounds

SEED = 20261116


def test_half_of_the_corpus_is_exact_after_every_round(database: TestDatabase) -> None:
    assert run_rounds(database, half_of_corpus("spark"), "spark", SEED, SOME_ROUNDS)


@pytest.mark.long
def test_the_whole_corpus_is_exact_after_every_round(database: TestDatabase) -> None:
    assert run_rounds(database, load_corpus(), "spark", SEED + 1, shared=SHARED_ROUNDS)

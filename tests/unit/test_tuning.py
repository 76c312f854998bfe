"""Profiles, sizes and budgets are those of the scaling guide, and the figures add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgtrickle.observability.tuning import (
    PROFILES,
    SIZES,
    Change,
    DatabaseAtHand,
    ServerAtHand,
    Setting,
    compute_budget,
    largest_pool,
    pool_size,
    recommended_workers,
    size_of,
    total_stream_tables,
)

# As the guide prints them.
GUIDE = {
    "low-latency": """
pg_trickle.scheduler_interval_ms = 200
pg_trickle.event_driven_wake = on
pg_trickle.parallel_refresh_mode = 'on'
pg_trickle.max_dynamic_refresh_workers = 8
pg_trickle.tiered_scheduling = on""",
    "high-throughput": """
pg_trickle.scheduler_interval_ms = 500
pg_trickle.parallel_refresh_mode = 'on'
pg_trickle.max_dynamic_refresh_workers = 16
pg_trickle.max_concurrent_refreshes = 8
pg_trickle.per_database_worker_quota = 8
pg_trickle.tiered_scheduling = on
pg_trickle.merge_work_mem_mb = 128""",
    "resource-constrained": """
pg_trickle.scheduler_interval_ms = 2000
pg_trickle.parallel_refresh_mode = 'on'
pg_trickle.max_dynamic_refresh_workers = 2
pg_trickle.max_concurrent_refreshes = 2
pg_trickle.tiered_scheduling = on
pg_trickle.delta_work_mem_cap_mb = 256
pg_trickle.merge_work_mem_mb = 32""",
}

SERVER = ServerAtHand(
    where="localhost:5432",
    version=18,
    max_connections=100,
    superuser_reserved=3,
    reserved=0,
    in_use=10,
    own=2,
    role="app",
    role_limit=None,
    role_in_use=0,
    max_worker_processes=8,
    autovacuum_max_workers=3,
    max_parallel_workers=8,
    databases=(
        DatabaseAtHand("a", 150, enabled=True),
        DatabaseAtHand("b", 50, enabled=True),
        DatabaseAtHand("disabled", 7, enabled=False),
        DatabaseAtHand("plain", None),
        DatabaseAtHand("closed", None, problem="no pg_hba.conf entry"),
    ),
)


def test_profiles_print_as_in_the_guide() -> None:
    assert {name: "\n" + "\n".join(p.as_configuration()) for name, p in PROFILES.items()} == GUIDE


def test_profiles_print_as_sql() -> None:
    assert PROFILES["low-latency"].as_sql()[0] == "SELECT pgtrickle.set('pg_trickle.scheduler_interval_ms', '200');"


@pytest.mark.parametrize(
    ("stream_tables", "size", "workers"),
    [
        (0, "Small", 2),
        (1, "Small", 2),
        (10, "Small", 3),
        (19, "Small", 4),
        (20, "Medium", 4),
        (60, "Medium", 6),
        (100, "Large", 8),
        (150, "Large", 12),
        (199, "Large", 16),
        (200, "Very Large", 16),
        (350, "Very Large", 24),
        (500, "Very Large", 32),
        (5000, "Very Large", 32),
    ],
)
def test_workers_by_the_sizing_table(stream_tables: int, size: str, workers: int) -> None:
    assert size_of(stream_tables).name == size
    assert recommended_workers(stream_tables) == workers


def test_more_stream_tables_never_get_fewer_workers() -> None:
    numbers = [recommended_workers(n) for n in range(600)]
    assert numbers == sorted(numbers)
    assert all(size_of(n).fewest_workers <= recommended_workers(n) <= size_of(n).most_workers for n in range(600))
    assert [size.fewest_tables for size in SIZES[1:]] == [size.most_tables for size in SIZES[:-1]]


def test_the_budget_is_connections_instead_of_worker_processes() -> None:
    budget = compute_budget(SERVER, workers=16)
    assert (budget.launchers, budget.schedulers, budget.workers, budget.kept_idle, budget.needed) == (1, 2, 16, 0, 19)
    assert budget.available == 100 - 3 - 10
    assert budget.fits
    assert budget.apply_mb == 1024
    assert budget.worker_processes_by_guide == 1 + 2 + 16 + 3 + 8
    assert budget.worker_processes == 0


def test_every_service_has_its_own() -> None:
    budget = compute_budget(SERVER, workers=8, services=3)
    assert budget.needed == 3 * (1 + 2 + 8)
    assert budget.apply_mb == 3 * 8 * 64


def test_workers_that_changed_databases_keep_connections_for_a_while() -> None:
    # Each of two databases may have had four of the four workers.
    assert compute_budget(SERVER, workers=4).kept_idle == 4
    assert compute_budget(SERVER, workers=6).kept_idle == 2
    alone = replace(SERVER, databases=(DatabaseAtHand("a", 150, enabled=True, workers=4, at_once=4),))
    assert compute_budget(alone, workers=4).kept_idle == 0


def test_the_pool_is_what_the_most_demanding_served_database_asks_for() -> None:
    assert pool_size([SERVER]) == 4
    demanding = DatabaseAtHand("c", 1, enabled=True, workers=12)
    switched_off = DatabaseAtHand("d", 1, enabled=False, workers=40)
    assert pool_size([SERVER, replace(SERVER, databases=(demanding, switched_off))]) == 12
    assert pool_size([replace(SERVER, databases=())]) == 4


def test_reserved_connections_and_the_roles_limit_reduce_the_budget() -> None:
    assert compute_budget(replace(SERVER, reserved=5), 4).available == 82
    limited = replace(SERVER, role_limit=12, role_in_use=2)
    assert (compute_budget(limited, 16).available, compute_budget(limited, 16).fits) == (10, False)
    assert compute_budget(replace(SERVER, in_use=97), 4).available == 0
    assert largest_pool(replace(SERVER, in_use=97)) == 0
    assert largest_pool(SERVER) == 64


def test_the_largest_pool_fits_and_a_larger_one_does_not() -> None:
    for in_use in range(40, 94):
        server = replace(SERVER, in_use=in_use)
        workers = largest_pool(server, services=2)
        assert workers == 0 or compute_budget(server, workers, services=2).fits
        assert not compute_budget(server, workers + 1, services=2).fits


def test_only_served_databases_count() -> None:
    assert total_stream_tables([SERVER, SERVER]) == 2 * (150 + 50)


def test_a_value_of_the_server_takes_precedence_over_the_profile() -> None:
    default, server = Setting("1000", "default"), Setting("300", "database")
    assert Change("scheduler_interval_ms", "200", server, server).overruled
    assert not Change("scheduler_interval_ms", "200", default, Setting("200", "pgtrickle.set")).overruled

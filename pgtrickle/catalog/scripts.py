"""The SQL scripts of the catalog, in the order in which they run: the names of files in `sql/`."""

from __future__ import annotations

from importlib.resources import files

# Each script brings the catalog to the version that is its position here.
MIGRATIONS = (
    "migrations/0001_catalog",
    "migrations/0002_services",
    "migrations/0003_rotation",
    "migrations/0004_scheduling",
    "migrations/0005_refresh_groups",
    "migrations/0006_databases",
    "migrations/0007_sets",
    "migrations/0008_broker",
    "migrations/0009_request_keys",
    "migrations/0010_foreign_servers",
    "migrations/0011_functions",
    "migrations/0012_citus",
    "migrations/0013_purge",
    "migrations/0014_buffer_turns",
    "migrations/0015_writer_cost",
    "migrations/0016_gaps",
    "migrations/0017_rewritten_columns",
    "migrations/0018_rights",
    "migrations/0019_comparisons",
    "migrations/0020_unknown_objects",
    "migrations/0021_row_ids",
    "migrations/0022_staleness",
    "migrations/0023_failures",
    "migrations/0024_identity",
    "migrations/0025_verifications",
    "migrations/0026_verify_requests",
    "migrations/0027_names",
)

# Texts from which functions in the database generate other functions.
TEMPLATES = (
    "templates/capture",
    "templates/capture_check_merge",
    "templates/capture_row",
    "templates/capture_shards",
    "templates/capture_shards_check_merge",
    "templates/capture_shards_guard",
    "templates/capture_shards_operation",
    "templates/capture_shards_types",
    "templates/capture_statement",
    "templates/owner_read",
    "templates/owner_write",
)

# Functions and views, created or replaced by every install and upgrade. Views need the functions that they call.
FUNCTIONS = (
    "common/settings",
    "common/identity",
    "common/protection",
    "common/templates",
    "capture/sources",
    "capture/functions",
    "capture/tracking",
    "capture/triggers",
    "capture/end",
    "capture/purge",
    "remote/databases",
    "remote/rights",
    "remote/names",
    "remote/stand_ins",
    "remote/sets",
    "remote/foreign_servers",
    "remote/consumers",
    "remote/functions",
    "remote/broker",
    "citus/cluster",
    "citus/capture",
    "citus/triggers",
    "citus/nodes",
    "citus/placement",
    "citus/status",
    "stream_table/query",
    "stream_table/privileges",
    "stream_table/schedule",
    "stream_table/rows",
    "stream_table/views_schema",
    "stream_table/owner_functions",
    "stream_table/catalog",
    "stream_table/create",
    "stream_table/alter",
    "stream_table/drop",
    "stream_table/groups",
    "stream_table/commit",
    "service/requests",
    "service/service",
    "monitoring/status",
    "monitoring/freshness",
    "monitoring/pool",
    "monitoring/buffers",
    "monitoring/history",
    "monitoring/tree",
    "monitoring/health",
    "common/gate",
)

# These run last, when functions that this release does not have are gone.
FINAL = (
    "common/grants",
    "capture/renew",
)


def read_script(name: str) -> str:
    """The text of a script."""
    return (files("pgtrickle.catalog") / "sql" / f"{name}.sql").read_text(encoding="utf-8")

-- Private functions are named after what they do: a catalog of an earlier version does not have them, and the
-- installation drops the old ones. Comments on tables and columns use the words of the glossary.

COMMENT ON TABLE pgtrickle.pgt_dependencies IS
    'The tables that a stream table reads, with views resolved, and the columns that it uses.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.every IS
    'The interval between refreshes; NULL for a cron schedule.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.stretch IS
    'A factor by which the interval grows while refreshes take longer than it.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.full_seconds IS 'The cost of the last FULL refresh.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.row_seconds IS
    'The cost of a changed row in DIFFERENTIAL mode: a moving average over refreshes with many changes.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.polled IS
    'The result can change without a captured change, so it is refreshed on schedule.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.tier IS
    'Set by a user; NULL: derived from the time of the last change.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.refresh_group IS
    'Refreshed in one transaction with the others in this group and with the stream tables that they read.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.own_seconds IS
    'Its share of the cost of the last refresh, without the stream tables refreshed with it.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.lost_members IS
    'While a member of a database set is unreachable: wait for it, or keep its last rows and continue with the rest.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.st_placement IS
    'The kind of table in a Citus cluster; auto until the initial population chooses one.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.through_coordinator IS
    'Distributed tables are read in full by queries of the coordinator, not at one moment on all nodes.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.consecutive_errors IS 'Failed refreshes since the last successful one.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.counted_errors IS
    'Those of them that are not temporary: max_consecutive_errors of them suspend the stream table.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.error_kind IS
    'The kind of failure of the last refresh; NULL if it succeeded.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.alerted IS
    'What the last event reported: a kind of failure, or SUSPENDED; NULL if nothing is wrong.';
COMMENT ON COLUMN pgtrickle.pgt_refresh_history.kind IS 'The kind of failure; see pgtrickle.diagnose_errors().';

COMMENT ON COLUMN pgtrickle.pgt_requests.request_key IS
    'Chosen by the requester: a second request with the same key is the same request.';
COMMENT ON TABLE pgtrickle.pgt_locks IS 'Rows to lock: one for each operation that runs in one transaction at a time.';
COMMENT ON TABLE pgtrickle.pgt_openings IS 'Only the transaction that creates a stream table sees rows here.';
COMMENT ON TABLE pgtrickle.pgt_verifications IS
    'Results of comparisons of stream tables with their queries, and their cost.';
COMMENT ON COLUMN pgtrickle.pgt_verifications.unexpected IS
    'Rows of the stream table that the query did not return.';
COMMENT ON COLUMN pgtrickle.pgt_services.earlier_ticks IS
    'Earlier ticks, fewer the older they are; earlier_snapshots has their snapshots.';

COMMENT ON COLUMN pgtrickle.pgt_change_tracking.kept_upto IS
    'The last transaction in the table that writers have left: until all readers have seen it, the table is kept.';
COMMENT ON COLUMN pgtrickle.pgt_change_tracking.left_turn IS
    'The value of the sequence that left_at belongs to; left_at is void after the next switch.';
COMMENT ON COLUMN pgtrickle.pgt_change_tracking.left_at IS
    'A transaction later than all that can have rows in the table that writers have left.';
COMMENT ON COLUMN pgtrickle.pgt_change_tracking.captured_as IS
    'The column names, by number, when capture by name was last updated.';
COMMENT ON COLUMN pgtrickle_changes.pgt_activity.waiting_since IS
    'For a refresh of a stream table: when the oldest change that it applied began to wait.';

COMMENT ON TABLE pgtrickle.pgt_databases IS
    'Databases whose tables queries can name in three parts; roles lists who may, besides administrators.';
COMMENT ON COLUMN pgtrickle.pgt_databases.node IS 'Its identity when last asked: system identifier and database OID.';
COMMENT ON COLUMN pgtrickle.pgt_databases.looked_at IS 'When the service last polled it.';
COMMENT ON COLUMN pgtrickle.pgt_databases.problem IS 'Why it could not be polled.';
COMMENT ON COLUMN pgtrickle.pgt_databases.citus_group IS
    'The group of a node of this database''s Citus cluster; NULL for other databases.';
COMMENT ON TABLE pgtrickle.pgt_behind IS 'Stream tables that lack changes of other databases, as of the last poll.';
COMMENT ON TABLE pgtrickle.pgt_foreign_tables IS
    'Tables that stand for tables of other databases: empty ones of pgtrickle, and foreign tables of postgres_fdw.';
COMMENT ON COLUMN pgtrickle.pgt_foreign_tables.columns IS
    'The columns in the other database: name, attnum, type, not_null, generated.';
COMMENT ON COLUMN pgtrickle.pgt_foreign_tables.shape IS
    'Changes when the table, one of its columns or its key changes in the other database.';
COMMENT ON COLUMN pgtrickle.pgt_foreign_tables.key IS
    'The primary key, in the other database, of the table behind a foreign table.';
COMMENT ON COLUMN pgtrickle.pgt_foreign_tables.resolved_by IS
    'For a foreign table: a hash of its target when it was resolved. NULL for tables made by pgtrickle.';
COMMENT ON TABLE pgtrickle.pgt_foreign_functions IS
    'Functions that queries call, as registered databases described them when a stream table was created.';
COMMENT ON COLUMN pgtrickle.pgt_foreign_functions.definition IS
    'A hash of the body and of everything else that determines the result; NULL if there is no such function.';
COMMENT ON TABLE pgtrickle.pgt_database_sets IS
    'Sets of registered databases: those listed in members, and those whose names match the pattern.';
COMMENT ON COLUMN pgtrickle.pgt_database_sets.server_dsn IS
    'A server whose databases are registered automatically if their names match the pattern.';
COMMENT ON TABLE pgtrickle.pgt_sharded_tables IS
    'Empty tables that stand for a table of every member of a set, preceded by the column pgt_database.';
COMMENT ON TABLE pgtrickle.pgt_shards IS 'The stand-ins of the members'' tables.';
COMMENT ON COLUMN pgtrickle.pgt_sharded_tables.prepared_group IS
    'For a distributed table: the last node group that existed when all nodes captured it.';
COMMENT ON COLUMN pgtrickle.pgt_sharded_tables.placed_upto IS
    'The last placement of a shard that existed while all nodes captured the table.';
COMMENT ON COLUMN pgtrickle.pgt_dependencies.through IS 'The table of a set or cluster of which this one is a member.';
COMMENT ON COLUMN pgtrickle.pgt_consumers.snapshot IS
    'It has stored everything up to this snapshot; NULL before the initial population.';
COMMENT ON COLUMN pgtrickle.pgt_consumers.proof IS
    'Left by its last cut; former_proof by the cut whose result it has stored.';
COMMENT ON COLUMN pgtrickle.pgt_consumers.written_as IS
    'The state of its columns and of the table''s files when capture was last updated.';

COMMENT ON TABLE pgtrickle.pgt_broker IS
    'The service that scans change buffers for all. Its token gives access to rows; only the service sees it.';
COMMENT ON TABLE pgtrickle.pgt_broker_entries IS
    'Databases that subscribe to changes of sources here, with what the last scan found.';
COMMENT ON COLUMN pgtrickle.pgt_broker_entries.home IS 'The identity of the database: system identifier and OID.';
COMMENT ON COLUMN pgtrickle.pgt_broker_entries.upper_bound IS 'The last transaction among the changes.';

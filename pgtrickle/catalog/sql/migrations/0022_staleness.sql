-- Bounds of the times at which pending changes were committed.

-- Set by the default, so that capture functions do not change. A change is committed after its transaction's last
-- statement.
ALTER TABLE pgtrickle_changes.pgt_activity ADD COLUMN captured_at timestamptz;
ALTER TABLE pgtrickle_changes.pgt_activity ALTER COLUMN captured_at SET DEFAULT pg_catalog.clock_timestamp();
ALTER TABLE pgtrickle_changes.pgt_activity ADD COLUMN waiting_since timestamptz;
COMMENT ON COLUMN pgtrickle_changes.pgt_activity.captured_at IS 'When the statement ran.';
COMMENT ON COLUMN pgtrickle_changes.pgt_activity.waiting_since IS
    'Of a refresh of a stream table: since when the changes that it brought were waiting, at the longest.';

ALTER TABLE pgtrickle.pgt_services ADD COLUMN earlier_ticks timestamptz[], ADD COLUMN earlier_snapshots pg_snapshot[];
COMMENT ON COLUMN pgtrickle.pgt_services.earlier_ticks IS 'Ticks before the last one, with '
                                                          'their snapshots in earlier_snapshots: '
                                                          'the older, the fewer.';

ALTER TABLE pgtrickle.pgt_databases RENAME COLUMN clear_at TO looked_at;
COMMENT ON COLUMN pgtrickle.pgt_databases.looked_at IS 'When the service last looked at it.';

CREATE TABLE pgtrickle.pgt_behind (
    pgt_id bigint NOT NULL REFERENCES pgtrickle.pgt_stream_tables ON DELETE CASCADE,
    database text NOT NULL REFERENCES pgtrickle.pgt_databases ON UPDATE CASCADE ON DELETE CASCADE,
    since timestamptz NOT NULL,
    PRIMARY KEY (pgt_id, database)
);
COMMENT ON TABLE pgtrickle.pgt_behind IS 'Stream tables that lack changes of other databases, '
                                         'as of the last look there.';

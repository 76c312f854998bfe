-- Citus: tables whose rows are on other nodes of the cluster.

ALTER TABLE pgtrickle.pgt_change_tracking DROP CONSTRAINT pgt_change_tracking_capture_kind_check;
ALTER TABLE pgtrickle.pgt_change_tracking ADD CONSTRAINT pgt_change_tracking_capture_kind_check
    CHECK (capture_kind IN ('statement', 'row', 'shards'));

ALTER TABLE pgtrickle.pgt_databases ADD COLUMN citus_group integer UNIQUE;
COMMENT ON COLUMN pgtrickle.pgt_databases.citus_group IS 'Of a node of the Citus cluster that this database coordinates; NULL for others.';

DROP FUNCTION IF EXISTS pgtrickle._begin_tracking(regclass, text);

-- Remembers when writers left a table of a change buffer, so that it can be truncated without reading it. The status
-- of a cluster shows the distribution columns.

ALTER TABLE pgtrickle.pgt_change_tracking ADD COLUMN left_turn bigint, ADD COLUMN left_at bigint;
COMMENT ON COLUMN pgtrickle.pgt_change_tracking.left_turn IS 'Which change of tables `left_at` '
                                                             'belongs to; another one since leaves it void.';
COMMENT ON COLUMN pgtrickle.pgt_change_tracking.left_at IS
    'A transaction later than all that may have rows in the table that writers have left.';
DROP FUNCTION IF EXISTS pgtrickle._empty_buffer(regclass, bigint, bigint[]);

DROP FUNCTION IF EXISTS pgtrickle._shards_here(regclass);
DROP VIEW IF EXISTS pgtrickle.citus_status;
DROP FUNCTION IF EXISTS pgtrickle._citus_status();

-- What keeps a change buffer from being emptied is remembered: looking for it takes a scan.

ALTER TABLE pgtrickle.pgt_change_tracking ADD COLUMN kept_upto bigint;
COMMENT ON COLUMN pgtrickle.pgt_change_tracking.kept_upto IS
    'The last transaction in the table that writers have left: while a reader has not seen it, nobody needs to look whether the table can go.';
DROP FUNCTION IF EXISTS pgtrickle._empty_buffer(regclass, bigint, bigint[]);

-- What an early form of version 12 lacked.
ALTER TABLE pgtrickle.pgt_stream_tables ADD COLUMN IF NOT EXISTS through_coordinator boolean NOT NULL DEFAULT false;
ALTER TABLE pgtrickle.pgt_dependencies DROP CONSTRAINT IF EXISTS pgt_dependencies_source_type_check;
ALTER TABLE pgtrickle.pgt_dependencies ADD CONSTRAINT pgt_dependencies_source_type_check
    CHECK (source_type IN ('TABLE', 'PARTITIONED', 'STREAM_TABLE', 'FOREIGN_TABLE', 'MATVIEW', 'OTHER_DATABASE',
                           'DISTRIBUTED'));
DROP FUNCTION IF EXISTS pgtrickle._behind(regclass);
DROP FUNCTION IF EXISTS pgtrickle._attach_sources(regclass);
ALTER TABLE pgtrickle.pgt_sharded_tables ADD COLUMN IF NOT EXISTS prepared_group bigint,
    ADD COLUMN IF NOT EXISTS placed_upto bigint;

-- Remembers why a change buffer could not be emptied, because finding out takes a scan.

ALTER TABLE pgtrickle.pgt_change_tracking ADD COLUMN kept_upto bigint;
COMMENT ON COLUMN pgtrickle.pgt_change_tracking.kept_upto IS
    'The last transaction in the table that writers have left: while a reader has not seen '
    'it, nobody needs to look whether the table can go.';
DROP FUNCTION IF EXISTS pgtrickle._empty_buffer(regclass, bigint, bigint[]);

-- Citus: tables whose rows are on other nodes of the cluster.

ALTER TABLE pgtrickle.pgt_change_tracking DROP CONSTRAINT pgt_change_tracking_capture_kind_check;
ALTER TABLE pgtrickle.pgt_change_tracking ADD CONSTRAINT pgt_change_tracking_capture_kind_check
    CHECK (capture_kind IN ('statement', 'row', 'shards'));

ALTER TABLE pgtrickle.pgt_databases ADD COLUMN citus_group integer UNIQUE;
COMMENT ON COLUMN pgtrickle.pgt_databases.citus_group IS 'Of a node of the Citus cluster that '
                                                         'this database coordinates; NULL for others.';

DROP FUNCTION IF EXISTS pgtrickle._begin_tracking(regclass, text);

-- Stream tables that Citus distributes.
ALTER TABLE pgtrickle.pgt_stream_tables ADD COLUMN output_distribution_column text;
ALTER TABLE pgtrickle.pgt_stream_tables ADD CONSTRAINT pgt_stream_tables_st_placement_check
    CHECK (st_placement IN ('local', 'reference', 'distributed', 'auto'));
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.st_placement IS 'Where the table is in a Citus '
                                                              'cluster; auto until its first filling decides.';

DROP FUNCTION IF EXISTS pgtrickle.create_stream_table(text, text, text, text, boolean, boolean, text, text[]);
DROP FUNCTION IF EXISTS pgtrickle._create(text, text, text, text, boolean, boolean, text, text[], text, text);
DROP FUNCTION IF EXISTS pgtrickle._create_storage(text, regclass, text[]);

CREATE INDEX ON pgtrickle.pgt_dependencies (through) WHERE through IS NOT NULL;

-- Stream tables that the coordinator computes in full.
ALTER TABLE pgtrickle.pgt_stream_tables ADD COLUMN through_coordinator boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.through_coordinator IS
    'Its distributed tables are read by queries of the coordinator, in full: not at a moment '
    'that is common to all nodes.';
ALTER TABLE pgtrickle.pgt_dependencies DROP CONSTRAINT pgt_dependencies_source_type_check;
ALTER TABLE pgtrickle.pgt_dependencies ADD CONSTRAINT pgt_dependencies_source_type_check
    CHECK (source_type IN ('TABLE', 'PARTITIONED', 'STREAM_TABLE', 'FOREIGN_TABLE', 'MATVIEW', 'OTHER_DATABASE',
                           'DISTRIBUTED'));
DROP FUNCTION IF EXISTS pgtrickle._behind(regclass);
DROP FUNCTION IF EXISTS pgtrickle._attach_sources(regclass);

ALTER TABLE pgtrickle.pgt_sharded_tables ADD COLUMN prepared_group bigint, ADD COLUMN placed_upto bigint;
COMMENT ON COLUMN pgtrickle.pgt_sharded_tables.prepared_group IS 'Of a distributed table: '
                                                                 'the last group of nodes '
                                                                 'that there was when all nodes captured it.';
COMMENT ON COLUMN pgtrickle.pgt_sharded_tables.placed_upto IS 'The last placement of a shard '
                                                              'that there was while all nodes captured it.';

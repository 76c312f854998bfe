-- Foreign tables of postgres_fdw whose changes are captured in the registered database that they stand for.

ALTER TABLE pgtrickle.pgt_foreign_tables
    DROP CONSTRAINT pgt_foreign_tables_database_source_relid_key,
    ADD COLUMN key jsonb NOT NULL DEFAULT 'null',
    ADD COLUMN resolved_by text;
CREATE UNIQUE INDEX ON pgtrickle.pgt_foreign_tables (database, source_relid) WHERE resolved_by IS NULL;
COMMENT ON TABLE pgtrickle.pgt_foreign_tables IS 'Tables here that stand for tables of other '
                                                 'databases: empty ones of ours, and foreign tables of postgres_fdw.';
COMMENT ON COLUMN pgtrickle.pgt_foreign_tables.key IS 'The primary key there of what a foreign table stands for.';
COMMENT ON COLUMN pgtrickle.pgt_foreign_tables.resolved_by IS 'For a foreign table: where '
                                                              'it pointed to when it was resolved. '
                                                              'NULL where the table is ours.';

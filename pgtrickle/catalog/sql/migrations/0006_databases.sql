-- Stream tables that read tables of other databases: what is known of those databases here, and which of their stream
-- tables read tables of this one.

-- Never contains a password: libpq finds it in a password file or service file, or it is named as ${VARIABLE}.
CREATE TABLE pgtrickle.pgt_databases (
    name text PRIMARY KEY,
    dsn text NOT NULL,
    node text,
    roles text[] NOT NULL DEFAULT '{}',
    clear_at timestamptz,
    problem text,
    registered_by text NOT NULL,
    registered_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE pgtrickle.pgt_databases IS 'Databases whose tables queries may name in three '
                                            'parts; roles: who may, besides administrators.';
COMMENT ON COLUMN pgtrickle.pgt_databases.node IS 'Who it was when last asked: system identifier and database.';

COMMENT ON COLUMN pgtrickle.pgt_databases.clear_at IS 'When the service last looked and found nothing new there.';
COMMENT ON COLUMN pgtrickle.pgt_databases.problem IS 'Why it could not be looked at.';

CREATE TABLE pgtrickle.pgt_foreign_tables (
    relid regclass PRIMARY KEY,
    database text NOT NULL REFERENCES pgtrickle.pgt_databases ON UPDATE CASCADE,
    source_relid bigint NOT NULL,
    source_schema text NOT NULL,
    source_name text NOT NULL,
    source_stable_name text NOT NULL,
    node text NOT NULL,
    columns jsonb NOT NULL,
    shape text NOT NULL,
    UNIQUE (database, source_relid)
);
COMMENT ON TABLE pgtrickle.pgt_foreign_tables IS 'Empty tables here that stand for tables '
                                                 'of other databases: PostgreSQL analyses queries by them.';
COMMENT ON COLUMN pgtrickle.pgt_foreign_tables.columns IS 'Its columns as they are there: '
                                                          'name, attnum, type, not_null, generated.';
COMMENT ON COLUMN pgtrickle.pgt_foreign_tables.shape IS 'Changes when the table, one of its '
                                                        'columns or its key changes there.';

ALTER TABLE pgtrickle.pgt_dependencies DROP CONSTRAINT pgt_dependencies_source_type_check;
ALTER TABLE pgtrickle.pgt_dependencies ADD CONSTRAINT pgt_dependencies_source_type_check
    CHECK (source_type IN ('TABLE', 'PARTITIONED', 'STREAM_TABLE', 'FOREIGN_TABLE', 'MATVIEW', 'OTHER_DATABASE'));

-- Between its cut and its apply, a stream table of another database leaves a proof here. If the proof is gone at its
-- next cut, changes that it has seen may be gone too, and transaction IDs may have been reused. Changes that it needs
-- are not purged.
CREATE TABLE pgtrickle.pgt_consumers (
    consumer text NOT NULL,
    source_relid regclass NOT NULL,
    source_stable_name text NOT NULL,
    columns_used smallint[] NOT NULL,
    label text NOT NULL,
    snapshot pg_snapshot,
    proof uuid,
    former_proof uuid,
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, source_relid)
);
CREATE INDEX ON pgtrickle.pgt_consumers (source_relid);
CREATE INDEX ON pgtrickle.pgt_consumers (source_stable_name);
COMMENT ON TABLE pgtrickle.pgt_consumers IS 'Stream tables of other databases that read the changes of tables here.';
COMMENT ON COLUMN pgtrickle.pgt_consumers.snapshot IS 'Up to which it has stored what it read; '
                                                      'NULL before it was filled.';
COMMENT ON COLUMN pgtrickle.pgt_consumers.proof IS 'Left by its last cut; former_proof by the one that it has stored.';

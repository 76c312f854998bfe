-- One table in many databases: sets of registered databases, and the tables that all members have.

CREATE TABLE pgtrickle.pgt_database_sets (
    name text PRIMARY KEY,
    pattern text,
    members text[] NOT NULL DEFAULT '{}',
    server_dsn text,
    roles text[] NOT NULL DEFAULT '{}',
    problem text,
    registered_by text NOT NULL,
    registered_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE pgtrickle.pgt_database_sets IS 'Sets of registered databases: those named '
                                                'in members, and those whose names fit the pattern.';
COMMENT ON COLUMN pgtrickle.pgt_database_sets.server_dsn IS 'A server whose databases are '
                                                            'registered by themselves where '
                                                            'their names fit the pattern.';
COMMENT ON COLUMN pgtrickle.pgt_database_sets.problem IS 'Why a database could not join it.';

CREATE TABLE pgtrickle.pgt_sharded_tables (
    relid regclass PRIMARY KEY,
    database_set text NOT NULL REFERENCES pgtrickle.pgt_database_sets,
    source_schema text NOT NULL,
    source_name text NOT NULL
);
COMMENT ON TABLE pgtrickle.pgt_sharded_tables IS 'Empty tables here that stand for a table '
                                                 'of every member of a set, with the column '
                                                 'pgt_database before theirs.';

CREATE TABLE pgtrickle.pgt_shards (
    relid regclass NOT NULL REFERENCES pgtrickle.pgt_sharded_tables ON DELETE CASCADE,
    database text NOT NULL REFERENCES pgtrickle.pgt_databases,
    member_relid regclass NOT NULL REFERENCES pgtrickle.pgt_foreign_tables,
    PRIMARY KEY (relid, database)
);
COMMENT ON TABLE pgtrickle.pgt_shards IS 'The members'' tables behind them: what stands for each here.';

ALTER TABLE pgtrickle.pgt_dependencies ADD COLUMN through regclass;
COMMENT ON COLUMN pgtrickle.pgt_dependencies.through IS 'The sharded table as a member of which it is read.';

ALTER TABLE pgtrickle.pgt_stream_tables ADD COLUMN lost_members text NOT NULL DEFAULT 'wait'
    CHECK (lost_members IN ('wait', 'keep'));
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.lost_members
    IS 'While a member of a set cannot be reached: wait for it, or keep what was last read '
       'of it and go on with the others.';

DROP FUNCTION IF EXISTS pgtrickle.alter_stream_table(text, text, text, text, boolean, text, text, text, bigint);
DROP FUNCTION IF EXISTS pgtrickle._alter(bigint, text, text, text, boolean, text, text, text, text, bigint);
DROP FUNCTION IF EXISTS pgtrickle._change(bigint, text, text, text, text, boolean, text, jsonb, text, bigint);
DROP FUNCTION IF EXISTS pgtrickle._check_options(text, text, text, text, text, bigint);

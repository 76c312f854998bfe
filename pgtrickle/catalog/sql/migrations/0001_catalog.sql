-- The catalog of stream tables, their sources and their refreshes. References to relations are regclass: they follow
-- renames, and a dump restores them by name.

CREATE TABLE pgtrickle.pgt_stream_tables (
    pgt_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    pgt_schema text NOT NULL,
    pgt_name text NOT NULL,
    pgt_relid regclass NOT NULL UNIQUE,
    view_relid regclass NOT NULL,
    defining_query text NOT NULL,
    schedule text NOT NULL DEFAULT 'calculated',
    refresh_mode text NOT NULL DEFAULT 'AUTO' CHECK (refresh_mode IN ('AUTO', 'DIFFERENTIAL', 'FULL')),
    effective_mode text,
    mode_reason text,
    status text NOT NULL DEFAULT 'INITIALIZING' CHECK (status IN ('INITIALIZING', 'ACTIVE', 'SUSPENDED', 'ERROR')),
    status_reason text,
    key_columns text[],
    frontier jsonb,
    data_timestamp timestamptz,
    reinit_reason text DEFAULT 'initial population',
    st_placement text NOT NULL DEFAULT 'local',
    placement text CHECK (placement IN ('auto', 'spark')),
    pooler_compatibility_mode boolean NOT NULL DEFAULT false,
    session_settings jsonb NOT NULL DEFAULT '{}',
    consecutive_errors integer NOT NULL DEFAULT 0,
    last_error text,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (pgt_schema, pgt_name)
);
COMMENT ON TABLE pgtrickle.pgt_stream_tables IS 'One row per stream table; its owner is the owner of pgt_relid.';

CREATE TABLE pgtrickle.pgt_dependencies (
    pgt_id bigint NOT NULL REFERENCES pgtrickle.pgt_stream_tables ON DELETE CASCADE,
    source_relid regclass NOT NULL,
    source_schema text NOT NULL,
    source_name text NOT NULL,
    source_type text NOT NULL
        CHECK (source_type IN ('TABLE', 'PARTITIONED', 'STREAM_TABLE', 'FOREIGN_TABLE', 'MATVIEW')),
    columns_used smallint[] NOT NULL,
    source_stable_name text NOT NULL,
    source_placement text NOT NULL DEFAULT 'local',
    capture_signature text,
    PRIMARY KEY (pgt_id, source_relid)
);
CREATE INDEX ON pgtrickle.pgt_dependencies (source_relid);
COMMENT ON TABLE pgtrickle.pgt_dependencies IS 'The tables that a stream table reads, views '
                                               'resolved, with the columns it uses.';

CREATE TABLE pgtrickle.pgt_change_tracking (
    source_relid regclass PRIMARY KEY,
    source_stable_name text NOT NULL UNIQUE,
    buffer_relid regclass NOT NULL,
    tracked_columns smallint[] NOT NULL,
    capture_kind text NOT NULL CHECK (capture_kind IN ('statement', 'row')),
    created_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE pgtrickle.pgt_change_tracking IS 'One row per source whose changes are captured.';

-- No foreign key: the history of a dropped stream table stays.
CREATE TABLE pgtrickle.pgt_refresh_history (
    refresh_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    pgt_id bigint NOT NULL,
    pgt_schema text NOT NULL,
    pgt_name text NOT NULL,
    start_time timestamptz NOT NULL DEFAULT clock_timestamp(),
    end_time timestamptz,
    status text NOT NULL DEFAULT 'RUNNING' CHECK (status IN ('RUNNING', 'COMPLETED', 'FAILED', 'SKIPPED')),
    action text CHECK (action IN ('NO_DATA', 'FULL', 'DIFFERENTIAL', 'REINITIALIZE', 'SKIP')),
    initiated_by text NOT NULL DEFAULT 'MANUAL',
    reason text,
    rows_in bigint,
    rows_inserted bigint,
    rows_updated bigint,
    rows_deleted bigint,
    phases jsonb,
    error text,
    sqlstate text,
    frontier jsonb
);
CREATE INDEX ON pgtrickle.pgt_refresh_history (pgt_id, refresh_id);

CREATE TABLE pgtrickle.pgt_settings (
    name text PRIMARY KEY,
    value text NOT NULL,
    set_at timestamptz NOT NULL DEFAULT now(),
    set_by text NOT NULL DEFAULT session_user
);

-- Changes that capture could not record as rows: TRUNCATE, a source with other columns, a buffer past its limit, a
-- MERGE that hides rows.
CREATE TABLE pgtrickle_changes.pgt_markers (
    source_stable_name text NOT NULL,
    xid bigint NOT NULL,
    kind text NOT NULL CHECK (kind IN ('TRUNCATE', 'SCHEMA', 'OVERFLOW', 'MERGE'))
);
CREATE INDEX ON pgtrickle_changes.pgt_markers (source_stable_name, xid);

-- One small table lists the sources that changed; probing 1,000 buffers would cost a tick 86 ms.
CREATE TABLE pgtrickle_changes.pgt_activity (
    source_stable_name text NOT NULL,
    xid bigint NOT NULL
);

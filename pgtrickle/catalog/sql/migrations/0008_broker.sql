-- The refresh broker: the service that reads the changes of this database's tables on behalf of other databases, and
-- their subscriptions.

CREATE TABLE pgtrickle.pgt_broker (
    only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    service_id uuid NOT NULL,
    address text NOT NULL,
    token text NOT NULL,
    tick bigint NOT NULL DEFAULT 0,
    elected_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    lease_expires timestamptz NOT NULL
);
COMMENT ON TABLE pgtrickle.pgt_broker IS 'The service that scans change buffers for everybody. '
                                         'Its token opens what it has read: only the service role sees it.';

CREATE TABLE pgtrickle.pgt_broker_entries (
    home text NOT NULL,
    database text NOT NULL,
    source_stable_name text NOT NULL,
    expressions jsonb NOT NULL DEFAULT '{}',
    conditions jsonb NOT NULL DEFAULT '[]',
    settings jsonb NOT NULL,
    pending_rows bigint,
    upper_bound bigint,
    last_tick bigint,
    registered_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (home, source_stable_name)
);
COMMENT ON TABLE pgtrickle.pgt_broker_entries IS 'Databases that want the changes of sources '
                                                 'here, and what of them; with what the last scan found.';
COMMENT ON COLUMN pgtrickle.pgt_broker_entries.home IS 'Who the database is: system identifier and OID.';
COMMENT ON COLUMN pgtrickle.pgt_broker_entries.upper_bound IS 'The latest transaction among the changes.';

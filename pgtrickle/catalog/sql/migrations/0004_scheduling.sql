-- What a service needs to refresh stream tables on its own: schedules, jobs and fuses.

-- A claim is valid as long as its holder's lease. Leases are renewed in a separate table: a refresh that keeps one
-- snapshot for several stream tables could not write a row that was renewed meanwhile.
ALTER TABLE pgtrickle.pgt_services
    ADD COLUMN kind text NOT NULL DEFAULT 'service' CHECK (kind IN ('service', 'refresh')),
    ADD COLUMN lease_expires timestamptz NOT NULL DEFAULT clock_timestamp() + interval '30 seconds',
    ADD COLUMN pool_size integer NOT NULL DEFAULT 0,
    ADD COLUMN pool_active integer NOT NULL DEFAULT 0,
    ADD COLUMN plans_found bigint NOT NULL DEFAULT 0,
    ADD COLUMN plans_made bigint NOT NULL DEFAULT 0,
    ADD COLUMN ticked_at timestamptz,
    ADD COLUMN tick_snapshot pg_snapshot,
    ADD COLUMN settings jsonb NOT NULL DEFAULT '{}';

ALTER TABLE pgtrickle.pgt_stream_tables
    DROP COLUMN claim_expires,
    ADD COLUMN every interval,
    ADD COLUMN next_due timestamptz NOT NULL DEFAULT '-infinity',
    ADD COLUMN stretch real NOT NULL DEFAULT 1,
    ADD COLUMN polled boolean NOT NULL DEFAULT false,
    ADD COLUMN tier text CHECK (tier IN ('hot', 'warm', 'cold', 'frozen')),
    ADD COLUMN last_change_at timestamptz,
    ADD COLUMN last_seconds real,
    ADD COLUMN full_seconds real,
    ADD COLUMN row_seconds real,
    ADD COLUMN fuse_ceiling bigint CHECK (fuse_ceiling >= 0),
    ADD COLUMN fuse_blown_at timestamptz,
    ADD COLUMN fuse_passes boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.every IS 'How stale it may become; NULL for a cron schedule.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.stretch IS 'Multiplies the schedule while refreshes '
                                                         'take longer than it.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.full_seconds IS 'What the last refresh in full cost.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.row_seconds IS 'What a changed row costs differentially: '
                                                             'a moving average over refreshes of many.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.polled IS 'Its result may change without a change '
                                                        'that is captured: it is refreshed on schedule.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.tier IS 'Set by hand; NULL: by how lately its sources changed.';
-- Not on next_due: every refresh writes it, and would have to update the index as well.
CREATE INDEX pgt_stream_tables_unprompted ON pgtrickle.pgt_stream_tables (pgt_id)
    WHERE polled OR reinit_reason IS NOT NULL;
CREATE INDEX pgt_stream_tables_cron ON pgtrickle.pgt_stream_tables (pgt_id) WHERE every IS NULL;
ALTER TABLE pgtrickle.pgt_stream_tables SET (fillfactor = 70);
CREATE INDEX ON pgtrickle.pgt_dependencies (source_stable_name);

-- A request is done when a refresh's cut sees the transaction that filed it.
ALTER TABLE pgtrickle.pgt_requests
    ADD COLUMN xid xid8 NOT NULL DEFAULT pg_current_xact_id();
UPDATE pgtrickle.pgt_requests SET status = 'PENDING', started_at = NULL WHERE status = 'RUNNING';

-- Jobs that the scheduler submitted to its workers.
CREATE TABLE pgtrickle.pgt_jobs (
    job_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    service_id uuid NOT NULL,
    kind text NOT NULL CHECK (kind IN ('IMMEDIATE', 'GROUP', 'FUSED', 'SINGLETON')),
    pgt_ids bigint[] NOT NULL,
    status text NOT NULL DEFAULT 'QUEUED' CHECK (status IN ('QUEUED', 'RUNNING', 'SUCCEEDED', 'FAILED')),
    worker text,
    worker_pid integer,
    enqueued_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at timestamptz,
    finished_at timestamptz,
    error text
);

-- Notifications, for clients that cannot listen.
CREATE TABLE pgtrickle.pgt_events (
    event_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    event text NOT NULL,
    pgt_id bigint,
    payload jsonb NOT NULL
);
CREATE INDEX ON pgtrickle.pgt_events (at);
CREATE INDEX ON pgtrickle.pgt_refresh_history (start_time);

-- These functions get more arguments.
DROP FUNCTION IF EXISTS pgtrickle.alter_stream_table(text, text, text, text, boolean, text, text);
DROP FUNCTION IF EXISTS pgtrickle._alter(bigint, text, text, text, boolean, text, text, text);
DROP FUNCTION IF EXISTS pgtrickle._change(bigint, text, text, text, text, boolean, text, jsonb);

-- What services need to share the work: the running services, the requests, and the claims on stream tables.

ALTER TABLE pgtrickle.pgt_stream_tables
    ADD COLUMN data_version bigint NOT NULL DEFAULT 0,
    ADD COLUMN fencing_token bigint NOT NULL DEFAULT 0,
    ADD COLUMN apply_xid xid8,
    ADD COLUMN claimed_by uuid,
    ADD COLUMN claim_expires timestamptz;

CREATE TABLE pgtrickle.pgt_requests (
    request_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    pgt_id bigint NOT NULL REFERENCES pgtrickle.pgt_stream_tables ON DELETE CASCADE,
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    requested_by text NOT NULL,
    status text NOT NULL DEFAULT 'PENDING' CHECK (status IN ('PENDING', 'RUNNING', 'DONE', 'FAILED')),
    started_at timestamptz,
    finished_at timestamptz,
    error text,
    refresh_id bigint
);
CREATE INDEX ON pgtrickle.pgt_requests (request_id) WHERE status IN ('PENDING', 'RUNNING');
CREATE INDEX ON pgtrickle.pgt_requests (pgt_id);

CREATE TABLE pgtrickle.pgt_services (
    service_id uuid PRIMARY KEY,
    host text NOT NULL,
    pid integer NOT NULL,
    version text NOT NULL,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_seen timestamptz NOT NULL DEFAULT clock_timestamp()
);

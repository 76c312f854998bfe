-- Results of comparing stream tables with their queries. Contains no user data: differing rows are shown only to the
-- caller.
CREATE TABLE pgtrickle.pgt_verifications (
    verification_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    pgt_id bigint NOT NULL REFERENCES pgtrickle.pgt_stream_tables ON DELETE CASCADE,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    equal boolean NOT NULL,
    row_count bigint NOT NULL,
    missing bigint NOT NULL,
    unexpected bigint NOT NULL,
    query_seconds double precision NOT NULL,
    table_seconds double precision NOT NULL,
    frontier jsonb NOT NULL
);
CREATE INDEX ON pgtrickle.pgt_verifications (pgt_id, verification_id);
COMMENT ON TABLE pgtrickle.pgt_verifications IS 'What pgtrickle verify found, when, and what it cost.';
COMMENT ON COLUMN pgtrickle.pgt_verifications.missing IS 'Rows of the query that the stream table lacked.';
COMMENT ON COLUMN pgtrickle.pgt_verifications.unexpected IS 'Rows of the stream table that the query did not give.';

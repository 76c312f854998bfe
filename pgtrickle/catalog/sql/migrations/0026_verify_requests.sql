-- Requests for a comparison of a stream table with its query, in addition to those for a refresh.
ALTER TABLE pgtrickle.pgt_requests ADD COLUMN kind text NOT NULL DEFAULT 'REFRESH'
    CHECK (kind IN ('REFRESH', 'VERIFY'));
COMMENT ON COLUMN pgtrickle.pgt_requests.kind IS 'REFRESH, or VERIFY: compare the stream table with its query.';

-- Jobs whose worker could not record their result, mostly because it lost its connection; nor could it postpone their
-- stream tables. A job that causes lost connections must not be retried without a pause.
WITH lost AS (
    UPDATE pgtrickle.pgt_jobs AS j SET status = 'FAILED', finished_at = clock_timestamp(), error = l.error
    FROM unnest(%(jobs)s::bigint[], %(errors)s::text[], %(kinds)s::text[]) AS l (job_id, error, kind)
    WHERE j.job_id = l.job_id AND j.finished_at IS NULL
    RETURNING coalesce(j.started_at, j.enqueued_at) AS began, j.pgt_ids, l.error, l.kind
), put_off AS (
    SELECT s.pgt_id FROM pgtrickle.pgt_stream_tables AS s
    WHERE EXISTS (SELECT FROM lost WHERE s.pgt_id = ANY (lost.pgt_ids)
                    AND (s.failed_at IS NULL OR s.failed_at < lost.began)
                                     AND (s.data_timestamp IS NULL OR s.data_timestamp < lost.began))
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE pgtrickle.pgt_stream_tables AS s
SET consecutive_errors = s.consecutive_errors + 1, failed_at = clock_timestamp(), error_kind = lost.kind,
    last_error = lost.error,
    next_due = clock_timestamp()
        + make_interval(secs => least(%(longest)s, 2.0 ^ least(s.consecutive_errors + 1, 10)) * (0.5 + random() / 2))
FROM put_off JOIN lost ON put_off.pgt_id = ANY (lost.pgt_ids)
WHERE put_off.pgt_id = s.pgt_id;

-- A refresh that failed: the claim goes back, and the next attempt waits the longer the more have failed.
WITH failed AS (
    UPDATE pgtrickle.pgt_stream_tables
    SET claimed_by = NULL, apply_xid = NULL,
        consecutive_errors = consecutive_errors + %(counts)s::int,
        last_error = CASE WHEN %(failed)s THEN %(told)s ELSE last_error END,
        next_due = CASE WHEN %(failed)s THEN clock_timestamp() + make_interval(secs => %(pause)s) ELSE next_due END,
        fuse_blown_at = CASE WHEN %(blown)s THEN clock_timestamp() ELSE fuse_blown_at END,
        status = CASE WHEN %(blown)s OR consecutive_errors + %(counts)s::int >= %(most)s THEN 'SUSPENDED' ELSE status END,
        status_reason = CASE WHEN %(blown)s THEN %(told)s
                             WHEN consecutive_errors + %(counts)s::int >= %(most)s
                             THEN format('%%s refreshes in a row failed, the last with: %%s', consecutive_errors + 1, %(told)s)
                             ELSE status_reason END
    WHERE pgt_id = %(id)s AND fencing_token = %(token)s
    RETURNING pgt_id, status, consecutive_errors
), told AS (
    INSERT INTO pgtrickle.pgt_refresh_history (
        pgt_id, pgt_schema, pgt_name, start_time, end_time, status, initiated_by, error, sqlstate)
    VALUES (%(id)s, %(schema)s, %(name)s, clock_timestamp() - make_interval(secs => %(seconds)s), clock_timestamp(), 'FAILED',
            %(by)s, %(told)s, %(sqlstate)s)
), answered AS (
    UPDATE pgtrickle.pgt_requests SET status = 'FAILED', finished_at = clock_timestamp(), error = %(told)s
    WHERE pgt_id = %(id)s AND status = 'PENDING' AND %(counts)s
)
SELECT status, consecutive_errors FROM failed;

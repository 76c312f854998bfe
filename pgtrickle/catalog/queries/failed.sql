-- A failed refresh: releases the claim. Each failure in a row makes the pause before the next attempt longer.
WITH failed AS (
    UPDATE pgtrickle.pgt_stream_tables
    SET claimed_by = NULL, apply_xid = NULL,
        consecutive_errors = consecutive_errors + %(failed)s::int,
        counted_errors = counted_errors + %(counts)s::int,
        last_error = CASE WHEN %(failed)s THEN %(told)s ELSE last_error END,
        error_kind = CASE WHEN %(failed)s THEN %(kind)s ELSE error_kind END,
        failed_at = CASE WHEN %(failed)s THEN clock_timestamp() ELSE failed_at END,
        next_due = CASE WHEN %(failed)s THEN clock_timestamp() + make_interval(secs => %(pause)s) ELSE next_due END,
        fuse_blown_at = CASE WHEN %(blown)s THEN clock_timestamp() ELSE fuse_blown_at END,
        status = CASE WHEN %(blown)s OR %(lost_key)s::text IS NOT NULL
                      OR counted_errors + %(counts)s::int >= %(most)s THEN 'SUSPENDED' ELSE status END,
        status_reason = CASE WHEN %(blown)s THEN %(told)s
                             WHEN %(lost_key)s::text IS NOT NULL THEN %(lost_key)s
                             WHEN counted_errors + %(counts)s::int >= %(most)s
                             THEN format('%%s refreshes in a row failed, the last with: %%s',
                                         counted_errors + %(counts)s::int, %(told)s)
                             ELSE status_reason END
    WHERE pgt_id = %(id)s AND fencing_token = %(token)s
), told AS (
    INSERT INTO pgtrickle.pgt_refresh_history (
        pgt_id, pgt_schema, pgt_name, start_time, end_time, status, initiated_by, error, sqlstate, kind)
    VALUES (%(id)s, %(schema)s, %(name)s, clock_timestamp() - make_interval(secs => %(seconds)s), clock_timestamp(),
            'FAILED',
            %(by)s, %(told)s, %(sqlstate)s, %(kind)s)
)
UPDATE pgtrickle.pgt_requests SET status = 'FAILED', finished_at = clock_timestamp(), error = %(told)s
WHERE pgt_id = %(id)s AND status = 'PENDING' AND kind = 'REFRESH' AND %(answers)s;

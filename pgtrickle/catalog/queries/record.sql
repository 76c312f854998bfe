-- A refresh that is over: the frontier, the state and the history, in the transaction that wrote the rows.
WITH moved AS (
    UPDATE pgtrickle.pgt_stream_tables
    SET frontier = %(frontier)s, data_timestamp = %(time)s, apply_xid = NULL,
        status = CASE WHEN status = 'SUSPENDED' THEN status ELSE 'ACTIVE' END, status_reason = NULL,
        reinit_reason = NULL, effective_mode = %(mode)s, mode_reason = %(mode_reason)s,
        claimed_by = NULL, claim_expires = NULL, consecutive_errors = 0, last_error = NULL, updated_at = now(),
        data_version = data_version + CASE WHEN %(changed)s THEN 1 ELSE 0 END
    WHERE pgt_id = %(id)s
)
INSERT INTO pgtrickle.pgt_refresh_history (
    pgt_id, pgt_schema, pgt_name, start_time, end_time, status, action, initiated_by, reason, rows_in, rows_inserted,
    rows_updated, rows_deleted, phases, frontier)
VALUES (
    %(id)s, %(schema)s, %(name)s, clock_timestamp() - make_interval(secs => %(seconds)s), clock_timestamp(),
    'COMPLETED', %(action)s, %(by)s, %(reason)s, %(rows_in)s, %(inserted)s, 0, %(deleted)s, %(phases)s, %(frontier)s)
RETURNING refresh_id;

-- A successful refresh: the frontier, the state and the history, in the transaction that wrote the rows.
WITH moved AS (
    UPDATE pgtrickle.pgt_stream_tables
    SET frontier = %(frontier)s, data_timestamp = %(time)s, apply_xid = NULL,
        status = CASE WHEN status = 'SUSPENDED' THEN status ELSE 'ACTIVE' END,
        status_reason = CASE WHEN status = 'SUSPENDED' THEN status_reason END,
        reinit_reason = NULL, effective_mode = %(mode)s, mode_reason = %(mode_reason)s,
        claimed_by = NULL, consecutive_errors = 0, counted_errors = 0, last_error = NULL, error_kind = NULL,
        failed_at = NULL,
        alerted = CASE WHEN status = 'SUSPENDED' THEN alerted END, polled = %(polled)s, fuse_passes = false,
        last_seconds = %(seconds)s, own_seconds = %(cost)s,
        last_change_at = CASE WHEN %(rows_in)s > 0 THEN %(time)s ELSE last_change_at END,
        full_seconds = CASE WHEN %(action)s IN ('FULL', 'REINITIALIZE') THEN %(cost)s ELSE full_seconds END,
        -- A refresh that was FULL because that seemed cheaper will eventually check whether it still is.
        row_seconds = CASE WHEN %(action)s = 'DIFFERENTIAL' AND %(changes)s > 0
                           THEN coalesce(0.7 * row_seconds + 0.3 * %(cost)s / %(changes)s, %(cost)s / %(changes)s)
                           WHEN %(by_cost)s THEN 0.9 * row_seconds ELSE row_seconds END,
        stretch = 1, next_due = CASE WHEN every IS NULL THEN 'infinity' ELSE %(time)s + every END,
        data_version = data_version + CASE WHEN %(changed)s THEN 1 ELSE 0 END
    WHERE pgt_id = %(id)s
), written AS (
    INSERT INTO pgtrickle.pgt_refresh_history (
        pgt_id, pgt_schema, pgt_name, start_time, end_time, status, action, initiated_by, reason, rows_in,
        rows_inserted,
        rows_updated, rows_deleted, phases, frontier)
    -- A scheduler that found nothing to do has nothing to report.
    SELECT %(id)s, %(schema)s, %(name)s, clock_timestamp() - make_interval(secs => %(seconds)s), clock_timestamp(),
           'COMPLETED', %(action)s, %(by)s, %(reason)s, %(rows_in)s, %(inserted)s, 0, %(deleted)s, %(phases)s,
           %(frontier)s
    WHERE NOT (%(action)s = 'NO_DATA' AND %(by)s = 'SCHEDULE')
    RETURNING refresh_id
), relayed AS (
    -- Readers of this stream table lack the changes that it lacked until now.
    UPDATE pgtrickle_changes.pgt_activity
    SET waiting_since = (SELECT known_at FROM pgtrickle._freshness(ARRAY[%(id)s::bigint]))
    WHERE %(changed)s AND xid = pg_current_xact_id_if_assigned()::text::bigint
      AND source_stable_name = (SELECT t.source_stable_name FROM pgtrickle.pgt_change_tracking t
                                JOIN pgtrickle.pgt_stream_tables s ON s.pgt_relid = t.source_relid
                                WHERE s.pgt_id = %(id)s)
), caught_up AS (
    DELETE FROM pgtrickle.pgt_behind WHERE pgt_id = %(id)s
), answered AS (
    UPDATE pgtrickle.pgt_requests
    SET status = 'DONE', finished_at = clock_timestamp(), refresh_id = (SELECT refresh_id FROM written), error = NULL
    WHERE pgt_id = %(id)s AND status = 'PENDING' AND kind = 'REFRESH' AND pg_visible_in_snapshot(xid, %(snapshot)s)
)
SELECT coalesce((SELECT refresh_id FROM written), 0);

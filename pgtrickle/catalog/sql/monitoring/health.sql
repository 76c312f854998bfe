-- Health checks: problems, and what to do about them.

CREATE OR REPLACE FUNCTION pgtrickle.health_summary()
RETURNS TABLE (total_stream_tables integer, active_count integer, error_count integer, suspended_count integer,
               stale_count integer,
               max_staleness_seconds double precision, scheduler_status text, services integer,
               cache_hit_rate double precision,
               pending_requests integer)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT counted.total, counted.active, counted.failing, counted.suspended,
           fresh.late, fresh.worst, service.scheduler_status, service.services, service.cache_hit_rate,
           service.pending_requests
    FROM (SELECT count(*)::integer AS total,
                 count(*) FILTER (WHERE s.status = 'ACTIVE')::integer AS active,
                 count(*) FILTER (WHERE s.status = 'ERROR')::integer AS failing,
                 count(*) FILTER (WHERE s.status = 'SUSPENDED')::integer AS suspended
          FROM pgtrickle.pgt_visible_stream_tables AS s) AS counted
    CROSS JOIN (SELECT count(*) FILTER (WHERE l.late)::integer AS late, max(l.staleness) AS worst
                FROM pgtrickle._late_stream_tables() AS l) AS fresh
    CROSS JOIN pgtrickle._service_state() AS service
$$;

-- What prevents vacuum from removing rows for so long. Not SECURITY DEFINER: a caller with pg_read_all_stats sees
-- more.
--
-- The start of another role's transaction is hidden, and that of a replication slot is not recorded. But frontiers are
-- snapshots taken at known times: a holder of an xmin or xid from before one of them is older than that.
CREATE OR REPLACE FUNCTION pgtrickle._vacuum_blockers(older_than interval)
RETURNS TABLE (holder text, since timestamptz, remedy text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    WITH bound AS MATERIALIZED (
        SELECT clock_timestamp() - older_than AS before, c.system_identifier || '/' || d.oid AS node
        FROM pg_control_system() AS c JOIN pg_database AS d ON d.datname = current_database()
    ), known AS MATERIALIZED (
        SELECT each.at, pg_snapshot_xmin(each.snapshot)::xid AS xmin, pg_snapshot_xmax(each.snapshot)::xid AS xmax
        FROM (
            (SELECT h.end_time AS at, (h.frontier ->> 'snapshot')::pg_snapshot AS snapshot
             FROM pgtrickle.pgt_refresh_history AS h CROSS JOIN bound AS b
             WHERE h.end_time < b.before AND h.frontier ->> 'node' = b.node ORDER BY h.start_time DESC LIMIT 1)
            UNION ALL
            (SELECT s.data_timestamp, (s.frontier ->> 'snapshot')::pg_snapshot
             FROM pgtrickle.pgt_stream_tables AS s CROSS JOIN bound AS b
             WHERE s.data_timestamp < b.before AND s.frontier ->> 'node' = b.node ORDER BY 1 DESC LIMIT 1)
        ) AS each ORDER BY 1 DESC LIMIT 1
    )
    SELECT format('process %s (role %s%s)', a.pid, coalesce(a.usename, '?'), ', ' || nullif(a.application_name, '')),
           coalesce(a.xact_start, k.at), format('End it, or SELECT pg_terminate_backend(%s);', a.pid)
    FROM pg_stat_activity AS a CROSS JOIN bound AS b LEFT JOIN known AS k ON true
    -- Snapshots of other databases do not matter here, nor does what vacuum itself holds.
    WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
      AND a.backend_type IS DISTINCT FROM 'autovacuum worker'
      AND (a.backend_xid IS NOT NULL OR a.backend_xmin IS NOT NULL)
      AND (a.xact_start < b.before
           OR a.xact_start IS NULL AND (age(a.backend_xmin) > age(k.xmin) OR age(a.backend_xid) > age(k.xmax)))
    UNION ALL
    SELECT format('prepared transaction %L (role %s)', p.gid, p.owner), p.prepared,
           format('As that role: COMMIT PREPARED %1$L or ROLLBACK PREPARED %1$L;', p.gid)
    FROM pg_prepared_xacts AS p CROSS JOIN bound AS b
    WHERE p.database = current_database() AND p.prepared < b.before
    UNION ALL
    SELECT format('replication slot %s (%s)', r.slot_name, CASE WHEN r.active THEN 'active' ELSE 'inactive' END),
           coalesce(i.inactive_since, k.at),
           CASE WHEN r.active THEN 'Find out why its consumer lags.'
                ELSE format('Start its consumer, or, if it is not needed, SELECT pg_drop_replication_slot(%L);',
                            r.slot_name) END
    FROM pg_replication_slots AS r CROSS JOIN bound AS b LEFT JOIN known AS k ON true
    -- Servers before version 17 do not have that column.
    CROSS JOIN LATERAL (SELECT (to_jsonb(r) ->> 'inactive_since')::timestamptz AS inactive_since) AS i
    WHERE (r.xmin IS NOT NULL OR r.catalog_xmin IS NOT NULL)
      AND (i.inactive_since < b.before OR age(r.xmin) > age(k.xmin) OR age(r.catalog_xmin) > age(k.xmin))
$$;

-- Sources whose changes are missed, or may be.
CREATE OR REPLACE FUNCTION pgtrickle._capture_problems()
RETURNS TABLE (source text, severity text, problem text, remedy text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT c.name,
           CASE WHEN c.stopped OR c.missing > 0 OR c.disabled > 0 THEN 'ERROR' ELSE 'WARN' END,
           CASE WHEN c.stopped THEN 'capture is stopped'
                WHEN c.missing > 0 OR c.disabled > 0
                THEN 'capture triggers are '
                    || concat_ws(' and ', nullif(c.missing, 0) || ' missing', nullif(c.disabled, 0) || ' disabled')
                ELSE 'triggers, partitions or children changed since the last refresh' END,
           CASE WHEN c.stopped THEN 'SELECT pgtrickle.resume_capture();'
                WHEN c.missing > 0 OR c.disabled > 0
                THEN
                    format('As the owner of %s: SELECT pgtrickle._retrack(%1$L); the next '
                           'refresh re-initializes its readers.', c.name)
                ELSE 'The next refresh re-initializes its readers.' END
    FROM (
        SELECT format('%I.%I', n.nspname, r.relname) AS name,
               bool_or(p.oid IS NULL OR p.prosrc = pgtrickle._inert_body()) AS stopped,
               count(*) FILTER (WHERE g.oid IS NULL) AS missing,
               count(*) FILTER (WHERE g.tgenabled NOT IN ('O', 'A')) AS disabled,
               EXISTS (SELECT FROM pgtrickle.pgt_dependencies AS d
                       WHERE d.source_relid = t.source_relid AND d.capture_signature <> s.signature) AS changed
        FROM pgtrickle.pgt_change_tracking AS t
        JOIN pg_class AS r ON r.oid = t.source_relid
        JOIN pg_namespace AS n ON n.oid = r.relnamespace
        CROSS JOIN LATERAL (SELECT pgtrickle._capture_signature(t.source_relid) AS signature OFFSET 0) AS s
        LEFT JOIN pg_proc AS p
            ON p.oid = to_regprocedure(format('pgtrickle_changes.capture_%s()', t.source_stable_name))
        CROSS JOIN LATERAL pgtrickle._partition_tree(t.source_relid) AS member
        CROSS JOIN unnest('{insert,update,delete,truncate}'::text[]) AS operation
        LEFT JOIN pg_trigger AS g ON g.tgrelid = member AND g.tgfoid = p.oid
            AND g.tgname = format('pgtrickle_capture_%s_%s', operation, t.source_stable_name)
        WHERE EXISTS (SELECT FROM pgtrickle.pgt_dependencies AS d WHERE d.source_relid = t.source_relid)
        GROUP BY t.source_relid, n.nspname, r.relname, s.signature
    ) AS c
    WHERE c.stopped OR c.missing > 0 OR c.disabled > 0 OR c.changed
$$;

-- How to remove a value that a setting does not allow, by its origin; see _setting_sources() for the ranks. Settings
-- that no extension has declared can be attached to a role or database, and removed, only by a superuser.
CREATE OR REPLACE FUNCTION pgtrickle._setting_remedy(rank integer, name text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE rank
        WHEN 1 THEN format('As a superuser: ALTER ROLE %I IN DATABASE %I RESET pg_trickle.%s;',
                           pgtrickle._service_role(), current_database(), name)
        WHEN 2 THEN format('As a superuser: ALTER ROLE %I RESET pg_trickle.%s;', pgtrickle._service_role(), name)
        WHEN 3 THEN format('As a superuser: ALTER DATABASE %I RESET pg_trickle.%s;', current_database(), name)
        WHEN 4 THEN format('As a superuser: ALTER ROLE ALL RESET pg_trickle.%s;', name)
        WHEN 5 THEN format('Correct pg_trickle.%s in postgresql.conf and reload.', name)
        ELSE format('SELECT pgtrickle.set(%L, NULL);', name) END
$$;

-- Each problem as a row.
CREATE OR REPLACE FUNCTION pgtrickle._health_problems()
RETURNS TABLE (check_name text, severity text, detail text, remedy text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    WITH service AS MATERIALIZED (
        SELECT * FROM pgtrickle._service_state()
    ), stream_tables AS MATERIALIZED (
        SELECT s.*, n.full_name FROM pgtrickle.pgt_visible_stream_tables AS s JOIN pgtrickle._current_names() AS n
               USING (pgt_id)
    ), alert AS MATERIALIZED (
        SELECT pgtrickle._effective_setting('buffer_alert_threshold')::bigint AS threshold
    ), refusal AS MATERIALIZED (
        SELECT * FROM pgtrickle._not_served()
    )
    SELECT 'service', CASE service.scheduler_status WHEN 'DISABLED' THEN 'WARN' ELSE 'ERROR' END,
           'no service serves this database' || coalesce('; the last attempt failed: ' || refusal.reason, ''),
           CASE WHEN refusal.reason IS NULL THEN 'Start one: pgtrickle run'
                ELSE 'Fix this, or see the log of the service.' END
    FROM service LEFT JOIN refusal ON true WHERE service.services = 0
    UNION ALL
    SELECT 'scheduler', 'WARN', 'a service has a problem here: ' || refusal.reason, 'See the log of the service.'
    FROM service JOIN refusal ON true WHERE service.services > 0 AND refusal.lately
    UNION ALL
    SELECT 'scheduler', 'WARN', 'pg_trickle.enabled is off: nothing is refreshed',
           'Set pg_trickle.enabled to on where it was set to off.'
    FROM service WHERE service.scheduler_status = 'DISABLED'
    UNION ALL
    SELECT 'scheduler', 'WARN', 'refreshes are paused', 'SELECT pgtrickle.resume();' WHERE pgtrickle.is_paused()
    UNION ALL
    SELECT 'settings', 'WARN',
           format('pg_trickle.%s cannot be %L (%s): it takes %s', v.name, v.raw, v.origin, v.meaning),
           pgtrickle._setting_remedy(v.rank, v.name)
    FROM pgtrickle._setting_sources() AS v WHERE v.value IS NULL
    UNION ALL
    SELECT 'suspended', CASE s.status_reason WHEN 'by request' THEN 'WARN' ELSE 'ERROR' END,
           format('%s: %s', s.full_name, coalesce(s.status_reason, 'no reason given')),
           CASE s.status_reason WHEN 'emergency stop' THEN 'SELECT pgtrickle.resume_capture();'
                ELSE format('Remove the cause; then SELECT pgtrickle.resume_stream_table(%L);', s.full_name) END
    FROM stream_tables AS s WHERE s.status = 'SUSPENDED' AND s.fuse_blown_at IS NULL
    UNION ALL
    SELECT 'failing', 'WARN', format('%s: %s: %s', s.full_name,
               CASE WHEN s.consecutive_errors > 0 THEN s.consecutive_errors || ' in a row, the last'
                    ELSE 'its last refresh failed' END,
               coalesce(s.last_error, s.status_reason, 'unknown')),
           format('SELECT * FROM pgtrickle.diagnose_errors(%L);', s.full_name)
    FROM stream_tables AS s WHERE s.status = 'ERROR'
    UNION ALL
    SELECT 'stale', 'WARN',
           format('%s: for %s s, %s s are allowed', s.full_name, round(l.waited::numeric, 1),
                  round(l.allowed::numeric, 1)),
           'See the other checks, worker_pool_status() and parallel_job_status(): more workers, or a longer schedule.'
    FROM pgtrickle._late_stream_tables() AS l JOIN stream_tables AS s USING (pgt_id) WHERE l.late
    UNION ALL
    SELECT 'fuses', 'ERROR',
           format('%s: %s', s.full_name, coalesce(s.status_reason, 'more changes at once than its fuse allows')),
           format('SELECT pgtrickle.reset_fuse(%L);', s.full_name)
    FROM stream_tables AS s WHERE s.fuse_blown_at IS NOT NULL
    UNION ALL
    SELECT 'change_buffers', 'WARN',
           format('%I.%I: %s changes, %s', b.source_schema, b.source_name, b.row_count, pg_size_pretty(b.size_bytes)),
           'Check that all stream tables that read it are refreshed: changes are kept for the slowest one.'
    -- A row takes more than 40 bytes, so smaller buffers need not be counted.
    FROM alert CROSS JOIN LATERAL pgtrickle._buffer_sizes(40 * alert.threshold) AS b
    WHERE b.row_count > alert.threshold
    UNION ALL
    SELECT 'held_back_xmin', 'WARN', format('%s: since %s or before', h.holder, h.since), h.remedy
    FROM pgtrickle._vacuum_blockers(interval '5 minutes') AS h
    UNION ALL
    SELECT 'capture', c.severity, format('%s: %s', c.source, c.problem), c.remedy
    FROM pgtrickle._capture_problems() AS c
    UNION ALL
    SELECT 'requests', 'ERROR',
           format('%s waiting, the first since %s, and no service', service.pending_requests, service.oldest_request),
           'Start a service, or serve them once: pgtrickle run --once'
    FROM service WHERE service.services = 0 AND service.pending_requests > 0
$$;

-- Always the same rows in the same order, each with at most the first five problems of its kind.
CREATE OR REPLACE FUNCTION pgtrickle.health_check()
RETURNS TABLE (check_name text, severity text, detail text, remedy text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    WITH problems AS (
        SELECT p.*, row_number() OVER (PARTITION BY p.check_name ORDER BY p.severity, p.detail) AS place,
               row_number() OVER (PARTITION BY p.check_name, p.remedy ORDER BY p.severity, p.detail) AS told
        FROM pgtrickle._health_problems() AS p
    ), summed AS (
        SELECT p.check_name, min(p.severity) AS severity,
               string_agg(p.detail, '; ' ORDER BY p.place) FILTER (WHERE p.place <= 5)
                   || CASE WHEN count(*) > 5 THEN format('; and %s more', count(*) - 5) ELSE '' END AS detail,
               string_agg(p.remedy, ' ' ORDER BY p.place) FILTER (WHERE p.place <= 5 AND p.told = 1) AS remedy
        FROM problems AS p GROUP BY 1
    )
    SELECT c.name, coalesce(s.severity, 'OK'), coalesce(s.detail, c.well), s.remedy
    FROM (VALUES
        (1, 'service', 'a service serves this database'),
        (2, 'scheduler', 'enabled and not paused'),
        (3, 'settings', 'all values are allowed'),
        (4, 'suspended', 'no stream table is suspended'),
        (5, 'failing', 'no stream table failed at its last refresh'),
        (6, 'stale', 'no stream table is later than twice its schedule'),
        (7, 'fuses', 'no fuse is blown'),
        (8, 'change_buffers', 'no buffer is above buffer_alert_threshold'),
        (9, 'held_back_xmin', 'nothing is known to be open for more than 5 minutes'),
        (10, 'capture', 'the triggers of all sources are in place'),
        (11, 'requests', 'no request waits without a service')
    ) AS c (position, name, well)
    LEFT JOIN summed AS s ON s.check_name = c.name
    ORDER BY c.position
$$;

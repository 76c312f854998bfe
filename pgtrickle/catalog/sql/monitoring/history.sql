-- What refreshes did and what they cost, from the history.

CREATE OR REPLACE FUNCTION pgtrickle.refresh_timeline(max_rows integer DEFAULT 50)
RETURNS TABLE (start_time timestamptz, stream_table text, action text, status text, duration_ms double precision,
               rows_inserted bigint, rows_deleted bigint, initiated_by text, error text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT h.start_time, format('%I.%I', h.pgt_schema, h.pgt_name), h.action, h.status,
           pgtrickle._milliseconds(h.end_time - h.start_time), h.rows_inserted, h.rows_deleted, h.initiated_by, h.error
    FROM (SELECT r.refresh_id FROM pgtrickle.pgt_refresh_history AS r
          ORDER BY r.start_time DESC, r.refresh_id DESC LIMIT max_rows) AS last
    JOIN pgtrickle.pgt_visible_history AS h USING (refresh_id) ORDER BY h.start_time DESC, h.refresh_id DESC
$$;

-- Durations are those of completed refreshes.
CREATE OR REPLACE FUNCTION pgtrickle._refresh_stats(id bigint)
RETURNS TABLE (refreshes bigint, failures bigint, avg_ms double precision, p95_ms double precision,
               max_ms double precision,
               rows_inserted bigint, rows_deleted bigint, last_refresh timestamptz)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT count(*) FILTER (WHERE h.status = 'COMPLETED'), count(*) FILTER (WHERE h.status = 'FAILED'),
           round(avg(d.ms)::numeric, 3)::double precision,
           round((percentile_cont(0.95) WITHIN GROUP (ORDER BY d.ms))::numeric, 3)::double precision, max(d.ms),
           coalesce(sum(h.rows_inserted), 0)::bigint, coalesce(sum(h.rows_deleted), 0)::bigint,
           max(h.end_time) FILTER (WHERE h.status = 'COMPLETED')
    FROM pgtrickle.pgt_refresh_history AS h
    CROSS JOIN LATERAL (SELECT
                        CASE WHEN h.status = 'COMPLETED' THEN pgtrickle._milliseconds(h.end_time - h.start_time) END
                            AS ms) AS d
    WHERE h.pgt_id = id
$$;

CREATE OR REPLACE FUNCTION pgtrickle.st_refresh_stats()
RETURNS TABLE (pgt_schema text, pgt_name text, refreshes bigint, failures bigint, avg_ms double precision,
               p95_ms double precision,
               max_ms double precision, rows_inserted bigint, rows_deleted bigint, last_refresh timestamptz,
               last_action text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT n.pgt_schema, n.pgt_name, r.refreshes, r.failures, r.avg_ms, r.p95_ms, r.max_ms, r.rows_inserted,
           r.rows_deleted,
           r.last_refresh,
           (SELECT h.action FROM pgtrickle.pgt_refresh_history AS h
            WHERE h.pgt_id = n.pgt_id AND h.status = 'COMPLETED' ORDER BY h.refresh_id DESC LIMIT 1)
    FROM pgtrickle._current_names() AS n CROSS JOIN LATERAL pgtrickle._refresh_stats(n.pgt_id) AS r
    ORDER BY 1, 2
$$;

-- The remedy for a kind of failure: see pgtrickle/refresh/failures.py. Only suspended stream tables have to be
-- resumed.
CREATE OR REPLACE FUNCTION pgtrickle._error_remedy(kind text, name text, suspended boolean) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE kind
               WHEN 'lock' THEN 'If it persists, end the transaction that holds the lock (pg_locks shows it).'
               WHEN 'connection' THEN 'If it persists, check that the server is up, accepts '
                                      'connections and is the primary.'
               WHEN 'serialization' THEN 'If it persists, check who else refreshes or writes the stream table.'
               WHEN 'source' THEN 'If it persists, follow the message.'
               WHEN 'disk' THEN 'Free space on the disk of the server, or of Spark.'
               WHEN 'memory' THEN 'The server has too little memory: see its log; lower work_mem '
                                  'or max_connections, or give it more.'
               WHEN 'limit' THEN 'The refresh needs more than a limit allows: raise it (temp_file_limit '
                                 'for the login of the service,'
                                 ' PGTRICKLE_SPARK_MEMORY for Spark), or simplify the query.'
               WHEN 'canceled' THEN 'It exceeded a timeout, or somebody canceled it. Check '
                                    'that the sources have the indexes that the query needs.'
               WHEN 'privilege' THEN 'Grant the privilege to the owner of the stream table, '
                                     'or to the login of the service if the message names it.'
               WHEN 'data' THEN 'A value in a source causes an error in the query: correct the value or the query.'
               WHEN 'definition' THEN
                   format('An object that the query uses has changed. Change it back, or set a query that works:'
                                             ' SELECT pgtrickle.alter_stream_table(%L, query => ...);', name)
               WHEN 'function' THEN 'A function or trigger raised the error: correct it, or the rows that it rejects.'
               WHEN 'fuse' THEN format('Check whether the changes are intended; then SELECT pgtrickle.reset_fuse(%L);',
                                       name)
               ELSE 'See the log of the service, and remove the cause.' END
        || CASE WHEN kind = 'fuse' THEN ''
                WHEN suspended THEN format(' Then SELECT pgtrickle.resume_stream_table(%L);', name)
                ELSE ' A service retries automatically, after growing pauses; manual_refresh() retries at once.'
                    END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.diagnose_errors(name text)
RETURNS TABLE (start_time timestamptz, error text, sqlstate text, kind text, remedy text)
LANGUAGE sql STABLE
AS $$
    SELECT h.start_time, h.error, h.sqlstate, k.kind,
           pgtrickle._error_remedy(k.kind, n.full_name, s.status = 'SUSPENDED')
    FROM pgtrickle._current_names() AS n
    JOIN pgtrickle.pgt_visible_stream_tables AS s ON s.pgt_id = n.pgt_id
    JOIN pgtrickle.pgt_visible_history AS h ON h.pgt_id = n.pgt_id
    CROSS JOIN LATERAL (SELECT coalesce(h.kind, 'other')) AS k (kind) -- earlier versions did not record it
    WHERE n.pgt_id = pgtrickle._require_id(name) AND h.status = 'FAILED'
    ORDER BY h.refresh_id DESC LIMIT 5
$$;

-- A tier that was not set by a user is the one that the scheduler derives, as in queries/tick.sql.
CREATE OR REPLACE VIEW pgtrickle.pg_stat_stream_tables AS
SELECT s.pgt_id, n.pgt_schema, n.pgt_name, s.status, s.refresh_mode,
       pgtrickle._tier(s.tier, s.last_change_at) AS tier,
       s.schedule, s.data_timestamp, f.staleness AS staleness_seconds, r.refreshes, r.failures, r.avg_ms,
       pg_catalog.round(s.last_seconds::numeric * 1000, 3)::double precision AS last_ms, s.consecutive_errors,
       s.last_error
FROM pgtrickle.pgt_visible_stream_tables AS s
JOIN pgtrickle._current_names() AS n USING (pgt_id)
JOIN pgtrickle._freshness() AS f USING (pgt_id)
CROSS JOIN LATERAL pgtrickle._refresh_stats(s.pgt_id) AS r;

-- What refreshes did and what they cost, from the history that is kept.

CREATE OR REPLACE FUNCTION pgtrickle.refresh_timeline(max_rows integer DEFAULT 50)
RETURNS TABLE (start_time timestamptz, stream_table text, action text, status text, duration_ms double precision,
               rows_inserted bigint, rows_deleted bigint, initiated_by text, error text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT h.start_time, format('%I.%I', h.pgt_schema, h.pgt_name), h.action, h.status,
           pgtrickle._milliseconds(h.end_time - h.start_time), h.rows_inserted, h.rows_deleted, h.initiated_by, h.error
    FROM pgtrickle.pgt_refresh_history AS h ORDER BY h.start_time DESC, h.refresh_id DESC LIMIT max_rows
$$;

-- Durations are those of refreshes that were completed.
CREATE OR REPLACE FUNCTION pgtrickle._refresh_stats(id bigint)
RETURNS TABLE (refreshes bigint, failures bigint, avg_ms double precision, p95_ms double precision, max_ms double precision,
               rows_inserted bigint, rows_deleted bigint, last_refresh timestamptz)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT count(*) FILTER (WHERE h.status = 'COMPLETED'), count(*) FILTER (WHERE h.status = 'FAILED'),
           round(avg(d.ms)::numeric, 3)::double precision,
           round((percentile_cont(0.95) WITHIN GROUP (ORDER BY d.ms))::numeric, 3)::double precision, max(d.ms),
           coalesce(sum(h.rows_inserted), 0)::bigint, coalesce(sum(h.rows_deleted), 0)::bigint,
           max(h.end_time) FILTER (WHERE h.status = 'COMPLETED')
    FROM pgtrickle.pgt_refresh_history AS h
    CROSS JOIN LATERAL (SELECT CASE WHEN h.status = 'COMPLETED' THEN pgtrickle._milliseconds(h.end_time - h.start_time) END AS ms) AS d
    WHERE h.pgt_id = id
$$;

CREATE OR REPLACE FUNCTION pgtrickle.st_refresh_stats()
RETURNS TABLE (pgt_schema text, pgt_name text, refreshes bigint, failures bigint, avg_ms double precision, p95_ms double precision,
               max_ms double precision, rows_inserted bigint, rows_deleted bigint, last_refresh timestamptz, last_action text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT n.pgt_schema, n.pgt_name, r.refreshes, r.failures, r.avg_ms, r.p95_ms, r.max_ms, r.rows_inserted, r.rows_deleted,
           r.last_refresh,
           (SELECT h.action FROM pgtrickle.pgt_refresh_history AS h
            WHERE h.pgt_id = n.pgt_id AND h.status = 'COMPLETED' ORDER BY h.refresh_id DESC LIMIT 1)
    FROM pgtrickle._named() AS n CROSS JOIN LATERAL pgtrickle._refresh_stats(n.pgt_id) AS r
    ORDER BY 1, 2
$$;

-- What sort of error it was: by its SQLSTATE, and where that tells nothing (an error of ours or of Spark's) by its words.
CREATE OR REPLACE FUNCTION pgtrickle._error_kind(sqlstate text, error text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE
        WHEN sqlstate IN ('55P03', '40P01') THEN 'lock'
        WHEN sqlstate ~ '^40' THEN 'serialization'
        WHEN sqlstate ~ '^(08|57P)' OR sqlstate IN ('53300', '25006') THEN 'connection'
        WHEN sqlstate IN ('53100', '58030') THEN 'disk'
        WHEN sqlstate ~ '^28' OR sqlstate = '42501' THEN 'privilege'
        WHEN sqlstate ~ '^(21|22|23)' THEN 'data'
        WHEN sqlstate ~ '^(0A|2B|3D|3F|42)' THEN 'definition'
        WHEN sqlstate IS NOT NULL THEN 'other'
        WHEN error ~* 'no space left|disk full' THEN 'disk'
        WHEN error ~* 'permission denied|may not|privilege' THEN 'privilege'
        WHEN error ~* 'connection|server closed|could not connect|terminating' THEN 'connection'
        WHEN error ~* 'another process|took (it )?over|serializ' THEN 'serialization'
        WHEN error ~* '\mlock(ed|s)?\M|deadlock' THEN 'lock'
        WHEN error ~* 'does not exist|dropped|was altered|other columns' THEN 'definition'
        WHEN error ~* 'overflow|out of range|division by zero|invalid input|duplicate key|divide_by_zero|arithmetic' THEN 'data'
        ELSE 'other' END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._error_remedy(kind text, name text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE kind
        WHEN 'lock' THEN 'It is tried again by itself. If it goes on, end the transaction that holds the lock (pg_locks shows it).'
        WHEN 'connection' THEN 'It is tried again by itself. If it goes on, see that the server is up, takes connections and is the primary.'
        WHEN 'serialization' THEN 'It is tried again by itself. If it goes on, see who else refreshes or writes the stream table.'
        WHEN 'definition' THEN format('Something that the query names has changed. Give it a query that works:'
                                      ' SELECT pgtrickle.alter_stream_table(%L, query => ...);', name)
        ELSE format('%s Then SELECT pgtrickle.resume_stream_table(%L);',
                    CASE kind WHEN 'privilege' THEN 'Give the right to the owner of the stream table.'
                              WHEN 'data' THEN 'A value in a source does not suit the query: correct it, or the query.'
                              WHEN 'disk' THEN 'Make room on the disk of the server, or of Spark.'
                              ELSE 'The log of the service tells more. Remove the cause.' END, name) END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.diagnose_errors(name text)
RETURNS TABLE (start_time timestamptz, error text, sqlstate text, kind text, remedy text)
LANGUAGE sql STABLE
AS $$
    SELECT h.start_time, h.error, h.sqlstate, k.kind, pgtrickle._error_remedy(k.kind, n.full_name)
    FROM pgtrickle._named() AS n
    JOIN pgtrickle.pgt_refresh_history AS h ON h.pgt_id = n.pgt_id
    CROSS JOIN LATERAL pgtrickle._error_kind(h.sqlstate, h.error) AS k (kind)
    WHERE n.pgt_id = pgtrickle._get(name) AND h.status = 'FAILED'
    ORDER BY h.refresh_id DESC LIMIT 5
$$;

-- Without a tier set by hand it is the one that the scheduler finds, as in queries/tick.sql.
CREATE OR REPLACE VIEW pgtrickle.pg_stat_stream_tables AS
SELECT s.pgt_id, n.pgt_schema, n.pgt_name, s.status, s.refresh_mode,
       pgtrickle._tier(s.tier, s.last_change_at) AS tier,
       s.schedule, s.data_timestamp, f.staleness AS staleness_seconds, r.refreshes, r.failures, r.avg_ms,
       pg_catalog.round(s.last_seconds::numeric * 1000, 3)::double precision AS last_ms, s.consecutive_errors, s.last_error
FROM pgtrickle.pgt_stream_tables AS s
JOIN pgtrickle._named() AS n USING (pgt_id)
JOIN pgtrickle._freshness() AS f USING (pgt_id)
CROSS JOIN LATERAL pgtrickle._refresh_stats(s.pgt_id) AS r;
GRANT SELECT ON pgtrickle.pg_stat_stream_tables TO PUBLIC;

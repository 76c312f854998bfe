-- The service and its workers, as seen from SQL.

-- One row about the services of this database. A service whose lease has expired is gone.
CREATE OR REPLACE FUNCTION pgtrickle._service_state()
RETURNS TABLE (services integer, scheduler_status text, cache_hit_rate double precision, pending_requests integer,
               oldest_request timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT live.number,
           CASE WHEN pgtrickle._effective_setting('enabled') = 'off' THEN 'DISABLED'
                WHEN live.number = 0 THEN 'STOPPED'
                WHEN pgtrickle.is_paused() THEN 'PAUSED' ELSE 'ACTIVE' END,
           live.hit_rate, waiting.number, waiting.oldest
    FROM (SELECT count(*)::integer AS number,
                 sum(h.plans_found)::double precision / nullif(sum(h.plans_found + h.plans_made), 0)::double precision
                     AS hit_rate
          FROM pgtrickle.pgt_services AS h WHERE h.kind = 'service' AND h.lease_expires > clock_timestamp()) AS live
    CROSS JOIN (SELECT count(*)::integer AS number, min(r.requested_at) AS oldest
                FROM pgtrickle.pgt_requests AS r WHERE r.status IN ('PENDING', 'RUNNING')) AS waiting
$$;

-- A service's pool is for all its databases. Jobs show the workers of this database; the others are reported once per
-- tick.
CREATE OR REPLACE FUNCTION pgtrickle.worker_pool_status()
RETURNS TABLE (active_workers integer, max_workers integer, per_db_cap integer, parallel_mode text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT
           coalesce(sum(running.here + CASE h.kind WHEN 'service' THEN greatest(h.pool_active - running.here, 0)
                                            ELSE 0 END), 0)::integer,
           coalesce(nullif(sum(h.pool_size), 0),
                    pgtrickle._effective_setting('max_dynamic_refresh_workers')::integer)::integer,
           CASE pgtrickle._effective_setting('parallel_refresh_mode') WHEN 'off' THEN 1
                ELSE least(pgtrickle._effective_setting('max_concurrent_refreshes')::integer,
                           nullif(pgtrickle._effective_setting('per_database_worker_quota')::integer, 0)) END,
           pgtrickle._effective_setting('parallel_refresh_mode')
    FROM pgtrickle.pgt_services AS h
    CROSS JOIN LATERAL (SELECT count(*) AS here FROM pgtrickle.pgt_jobs AS j
                        WHERE j.service_id = h.service_id AND j.status = 'RUNNING') AS running
    WHERE h.lease_expires > clock_timestamp()
$$;

-- Unfinished jobs of a service that is gone have failed: another service does the work, in a job of its own.
CREATE OR REPLACE FUNCTION pgtrickle._job_status(max_age_seconds integer)
RETURNS TABLE (job_id bigint, kind text, stream_tables text, status text, enqueued_at timestamptz,
               started_at timestamptz,
               finished_at timestamptz, duration_ms double precision, worker text, worker_pid integer, error text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT j.job_id, j.kind,
           (SELECT string_agg(coalesce(n.full_name, format('(dropped, id %s)', i.id)), ', ' ORDER BY i.position)
            FROM unnest(j.pgt_ids) WITH ORDINALITY AS i (id, position)
            LEFT JOIN pgtrickle._current_names() AS n ON n.pgt_id = i.id),
           CASE WHEN l.lost THEN 'FAILED' ELSE j.status END, j.enqueued_at, j.started_at, e.finished_at,
           pgtrickle._milliseconds(coalesce(e.finished_at, clock_timestamp()) - j.started_at), j.worker, j.worker_pid,
           CASE WHEN l.lost THEN 'its service is gone' WHEN j.error IS NOT NULL THEN pgtrickle._redacted() END
    FROM pgtrickle.pgt_jobs AS j
    LEFT JOIN pgtrickle.pgt_services AS h USING (service_id)
    CROSS JOIN LATERAL (SELECT j.status IN ('QUEUED', 'RUNNING')
                          AND (h.lease_expires > clock_timestamp()) IS NOT TRUE AS lost) AS l
    CROSS JOIN LATERAL (SELECT CASE WHEN l.lost THEN coalesce(h.lease_expires, j.started_at, j.enqueued_at)
                                    WHEN j.status IN ('SUCCEEDED', 'FAILED') THEN
                                        coalesce(j.finished_at, j.started_at, j.enqueued_at)
                                    END AS finished_at) AS e
    WHERE e.finished_at IS NULL OR e.finished_at > clock_timestamp() - make_interval(secs => max_age_seconds)
$$;

-- The views that show messages only to those who may see them: those of jobs, and those that the service sent.
CREATE OR REPLACE VIEW pgtrickle.pgt_visible_jobs WITH (security_barrier) AS
SELECT j.job_id, j.error FROM pgtrickle.pgt_jobs AS j
WHERE pgtrickle._is_administrator()
   -- The messages of a job with several stream tables are visible to owners of all of them, and not if one was
   -- dropped.
   OR (SELECT bool_and(coalesce(pgtrickle._may_see(s.pgt_relid), false))
       FROM unnest(j.pgt_ids) AS i (pgt_id) LEFT JOIN pgtrickle.pgt_stream_tables AS s USING (pgt_id));

CREATE OR REPLACE FUNCTION pgtrickle.parallel_job_status(max_age_seconds integer DEFAULT 300)
RETURNS TABLE (job_id bigint, kind text, stream_tables text, status text, enqueued_at timestamptz,
               started_at timestamptz,
               finished_at timestamptz, duration_ms double precision, worker text, worker_pid integer, error text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT j.job_id, j.kind, j.stream_tables, j.status, j.enqueued_at, j.started_at, j.finished_at, j.duration_ms,
           j.worker, j.worker_pid,
           CASE j.error WHEN pgtrickle._redacted() THEN coalesce(v.error, j.error) ELSE j.error END
    FROM pgtrickle._job_status(max_age_seconds) AS j LEFT JOIN pgtrickle.pgt_visible_jobs AS v USING (job_id)
    ORDER BY j.job_id DESC
$$;

CREATE OR REPLACE FUNCTION pgtrickle._milliseconds(duration interval) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT pg_catalog.round(extract(epoch FROM duration) * 1000, 3)::double precision
$$;

-- The connections of pgtrickle on this server, in all databases, and the processes that have registered in this
-- database. A connection does not show its service; with one service it is known.
CREATE OR REPLACE VIEW pgtrickle.server_worker_inventory AS
SELECT a.datname::text AS database,
       CASE WHEN a.application_name = 'pgtrickle scheduler' THEN 'scheduler'
            WHEN a.application_name LIKE 'pgtrickle worker%' THEN 'worker'
            WHEN a.application_name = 'pgtrickle launcher' THEN 'launcher'
            ELSE 'other' END AS role,
       a.pid, a.application_name AS name, a.backend_start AS started_at, a.state,
       CASE WHEN a.datname = pg_catalog.current_database()
            AND a.application_name ~ '^pgtrickle (scheduler|worker)' THEN
           (SELECT min(h.service_id::text) FROM pgtrickle.pgt_services AS h
            WHERE h.kind = 'service' AND h.lease_expires > pg_catalog.clock_timestamp()
            HAVING count(*) = 1) END AS service
FROM pg_catalog.pg_stat_activity AS a
WHERE a.application_name LIKE 'pgtrickle%'
UNION ALL
SELECT pg_catalog.current_database()::text, 'other', h.pid, pg_catalog.format('%s on %s', h.kind, h.host),
       h.started_at,
       CASE WHEN h.lease_expires > pg_catalog.clock_timestamp() THEN 'live' ELSE 'gone' END, h.service_id::text
FROM pgtrickle.pgt_services AS h;

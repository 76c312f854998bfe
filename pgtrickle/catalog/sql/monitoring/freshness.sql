-- The settings that the service uses, and how fresh stream tables are.

-- The value that the running service uses; without a service, the value that it would find. The caller's session has
-- no influence.
CREATE OR REPLACE FUNCTION pgtrickle._effective_setting(name text) RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce((SELECT h.settings ->> $1 FROM pgtrickle.pgt_services AS h
                     WHERE h.kind = 'service' AND h.lease_expires > clock_timestamp()
                     ORDER BY h.last_seen DESC LIMIT 1),
                    pgtrickle._setting($1))
$$;

-- Stream tables with the current names of their tables.
CREATE OR REPLACE FUNCTION pgtrickle._current_names()
RETURNS TABLE (pgt_id bigint, pgt_schema text, pgt_name text, full_name text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT s.pgt_id, coalesce(n.nspname, s.pgt_schema), coalesce(c.relname, s.pgt_name),
           pg_catalog.format('%I.%I', coalesce(n.nspname, s.pgt_schema), coalesce(c.relname, s.pgt_name))
    FROM pgtrickle.pgt_stream_tables AS s
    LEFT JOIN pg_catalog.pg_class AS c ON c.oid = s.pgt_relid
    LEFT JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
$$;

-- Until when stream tables are complete: a lower bound of the commit time of the oldest change that they lack, or the
-- current time if they lack none (on a standby, the last replayed moment). `pending` and `own_at` are about the tables
-- that they read, as in _has_pending_changes(); `known_at` and `staleness` include what is pending further upstream.
-- For all at once, because separate calls for thousands take a second.
--
-- A change is committed after the cut that does not see it, after its transaction's last captured statement, and after
-- any tick whose snapshot does not see it. A change of a stream table comes from older changes of its sources; its
-- refresh recorded since when these were waiting, which counts for `known_at`.
CREATE OR REPLACE FUNCTION pgtrickle._freshness(ids bigint[] DEFAULT NULL)
RETURNS TABLE (pgt_id bigint, pending boolean, own_at timestamptz, known_at timestamptz, staleness double precision)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    WITH RECURSIVE behind (reader, pgt_id) AS (
        SELECT s.pgt_id, s.pgt_id FROM pgtrickle.pgt_stream_tables AS s WHERE ids IS NULL OR s.pgt_id = ANY (ids)
        UNION
        SELECT b.reader, u.pgt_id FROM behind AS b
        JOIN pgtrickle.pgt_dependencies AS d ON d.pgt_id = b.pgt_id
        JOIN pgtrickle.pgt_stream_tables AS u ON u.pgt_relid = coalesce(d.through, d.source_relid)
    ), present AS MATERIALIZED (
        SELECT clock_timestamp() AS now
    ), ticks AS MATERIALIZED (
        SELECT t.at, t.snapshot, pg_snapshot_xmin(t.snapshot)::text::bigint AS xmin,
               pg_snapshot_xmax(t.snapshot)::text::bigint AS xmax
        FROM pgtrickle.pgt_services AS h
        CROSS JOIN LATERAL (SELECT h.ticked_at, h.tick_snapshot
                            UNION ALL SELECT * FROM unnest(h.earlier_ticks, h.earlier_snapshots)) AS t (at, snapshot)
        WHERE t.snapshot IS NOT NULL
    ), seen AS MATERIALIZED (
        SELECT
               CASE WHEN pg_is_in_recovery() THEN
                    greatest(pg_last_xact_replay_timestamp(), (SELECT max(at) FROM ticks))
                    ELSE p.now END AS until
        FROM present AS p
    ), stream_tables AS MATERIALIZED (
        SELECT s.pgt_id, s.data_timestamp, s.frontier IS NULL OR s.reinit_reason IS NOT NULL OR s.polled AS unprompted,
               -- For other databases only the last poll is known.
               (SELECT min(coalesce(w.looked_at, '-infinity')) FROM pgtrickle.pgt_dependencies AS d
                JOIN pgtrickle.pgt_foreign_tables AS f ON f.relid = d.source_relid
                JOIN pgtrickle.pgt_databases AS w ON w.name = f.database
                WHERE d.pgt_id = s.pgt_id) AS looked_at,
               (SELECT min(b.since) FROM pgtrickle.pgt_behind AS b WHERE b.pgt_id = s.pgt_id) AS behind_since,
               (s.frontier ->> 'snapshot')::pg_snapshot AS snapshot, (s.frontier ->> 'passed')::bigint AS passed
        FROM pgtrickle.pgt_stream_tables AS s WHERE s.pgt_id IN (SELECT b.pgt_id FROM behind AS b)
    ), unseen AS MATERIALIZED (
        SELECT s.pgt_id, a.xid, a.captured_at, a.waiting_since FROM stream_tables AS s
        JOIN pgtrickle.pgt_dependencies AS d USING (pgt_id)
        JOIN (SELECT source_stable_name, xid, coalesce(max(captured_at), '-infinity') AS captured_at,
              min(waiting_since) AS waiting_since
              FROM pgtrickle_changes.pgt_activity GROUP BY 1, 2) AS a USING (source_stable_name)
        WHERE NOT pg_visible_in_snapshot(a.xid::text::xid8, s.snapshot) AND a.xid IS DISTINCT FROM s.passed
    ), lacking AS (
        SELECT pgt_id, min(captured_at) AS captured_since, min(waiting_since) AS waiting_since, min(xid) AS oldest,
               array_agg(xid) AS xids
        FROM unseen GROUP BY 1
    ), judged AS MATERIALIZED (
        SELECT s.pgt_id, s.unprompted OR w.pgt_id IS NOT NULL
               OR s.behind_since IS NOT NULL AS pending, w.waiting_since,
               CASE WHEN s.unprompted THEN s.data_timestamp
                    ELSE greatest(s.data_timestamp, least(
                        CASE WHEN w.pgt_id IS NULL THEN seen.until ELSE greatest(w.captured_since, w.ticked_at) END,
                        coalesce(s.behind_since, s.looked_at))) END AS own_at
        FROM stream_tables AS s CROSS JOIN seen
        LEFT JOIN (
            -- Nearly always the oldest transaction alone shows whether a tick has seen one of them.
            SELECT p.*, (SELECT max(t.at) FROM ticks AS t
                         WHERE p.oldest >= t.xmax
                            OR p.oldest >= t.xmin AND NOT EXISTS (
                                   SELECT FROM unnest(p.xids) AS xid
                                   WHERE xid < t.xmax
                                     AND pg_visible_in_snapshot(xid::text::xid8, t.snapshot))) AS ticked_at
            FROM lacking AS p
        ) AS w USING (pgt_id)
    ), whole AS (
        SELECT b.reader,
               CASE WHEN count(j.own_at) = count(*) THEN min(least(j.own_at, j.waiting_since)) END AS known_at
        FROM behind AS b JOIN judged AS j USING (pgt_id) GROUP BY 1
    )
    SELECT j.pgt_id, j.pending, j.own_at, w.known_at,
           CASE WHEN w.known_at IS NOT NULL THEN greatest(0, extract(epoch FROM p.now - w.known_at))::double precision
                END
    FROM whole AS w JOIN judged AS j ON j.pgt_id = w.reader CROSS JOIN present AS p
$$;

-- Seconds since the commit of the oldest change that a stream table lacks; 0 if it lacks none, NULL before its initial
-- population.
CREATE OR REPLACE FUNCTION pgtrickle._staleness(id bigint) RETURNS double precision
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT f.staleness FROM pgtrickle._freshness(ARRAY[id]) AS f
$$;

-- Stream tables that have waited more than twice as long as their schedule allows. Only their own delay counts: a fast
-- one is not late because it reads a slow one. A refresh under way gets the time that is allowed.
CREATE OR REPLACE FUNCTION pgtrickle._late_stream_tables()
RETURNS TABLE (pgt_id bigint, late boolean, waited double precision, allowed double precision,
               staleness double precision)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    WITH coming AS MATERIALIZED (
        SELECT i.id, max(j.enqueued_at) AS since
        FROM pgtrickle.pgt_jobs AS j JOIN pgtrickle.pgt_services AS h USING (service_id)
        CROSS JOIN unnest(j.pgt_ids) AS i (id)
        WHERE j.status IN ('QUEUED', 'RUNNING') AND h.lease_expires > clock_timestamp()
        GROUP BY 1
    )
    SELECT f.pgt_id,
           coalesce(f.pending AND s.status <> 'SUSPENDED' AND s.tier IS DISTINCT FROM 'frozen' AND t.waited > t.allowed
                    AND (c.since > clock_timestamp() - make_interval(secs => t.allowed)) IS NOT TRUE, false),
           t.waited, t.allowed, f.staleness
    FROM pgtrickle._freshness() AS f
    JOIN pgtrickle.pgt_stream_tables AS s USING (pgt_id)
    LEFT JOIN coming AS c ON c.id = f.pgt_id
    CROSS JOIN LATERAL (
        SELECT extract(epoch FROM clock_timestamp() - coalesce(f.own_at, s.created_at))::double precision AS waited,
               extract(epoch FROM 2 * s.every * s.stretch)::double precision AS allowed
    ) AS t
$$;

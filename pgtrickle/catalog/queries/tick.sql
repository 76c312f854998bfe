-- What is due now: stream tables with requests, with changed sources, or due without a change; and their readers. The
-- cost depends on the work there is, not on the number of idle stream tables. Also stream tables with changes that are
-- due before the next tick, with the time when they are. A reader of a stream table that is due now is refreshed with
-- it, a little early: level by level, it would be late by the time that all levels take.
WITH RECURSIVE active AS MATERIALIZED (
    SELECT DISTINCT '' AS database, source_stable_name, xid FROM pgtrickle_changes.pgt_activity
    UNION ALL
    -- Results of the last poll of other databases.
    SELECT o.database, o.database || '/' || o.name, o.xid
    FROM unnest(%(databases)s::text[], %(names)s::text[], %(xids)s::bigint[]) AS o (database, name, xid)
), newest AS (
    SELECT database, source_stable_name, max(xid) AS xid FROM active GROUP BY 1, 2
), candidate AS (
    SELECT pgt_id, max(asked_at) AS asked_at, bool_or(unprompted) AS unprompted FROM (
        SELECT pgt_id, requested_at AS asked_at, false AS unprompted FROM pgtrickle.pgt_requests
        WHERE status = 'PENDING' AND kind = 'REFRESH'
        UNION ALL
        SELECT d.pgt_id, NULL, false FROM newest JOIN pgtrickle.pgt_dependencies d USING (source_stable_name)
        UNION ALL
        SELECT pgt_id, NULL, true FROM pgtrickle.pgt_stream_tables WHERE polled OR reinit_reason IS NOT NULL
    ) AS each GROUP BY 1
), free AS NOT MATERIALIZED (
    SELECT s.*, s.status IN ('ACTIVE', 'INITIALIZING') AND s.tier IS DISTINCT FROM 'frozen'
               AND s.next_due <= clock_timestamp() + %(ahead)s AS may
    FROM pgtrickle.pgt_stream_tables s
    WHERE (s.claimed_by IS NULL OR s.claimed_by = %(service)s
           OR NOT EXISTS (SELECT FROM pgtrickle.pgt_services h
                          WHERE h.service_id = s.claimed_by AND h.lease_expires > clock_timestamp()))
), due AS (
    SELECT s.pgt_id, s.pgt_relid, a.asked, a.asked OR s.next_due <= clock_timestamp() AS now
    FROM candidate c JOIN free s USING (pgt_id)
    -- A request is served at once; after a failure, only when the pause is over. Another request ends the pause.
    CROSS JOIN LATERAL (SELECT c.asked_at IS NOT NULL AND (s.failed_at IS NULL OR c.asked_at > s.failed_at
                                                           OR s.next_due <= clock_timestamp())) AS a (asked)
    WHERE a.asked
       OR s.may AND (c.unprompted OR EXISTS (
              SELECT FROM pgtrickle.pgt_dependencies d JOIN newest n USING (source_stable_name)
              CROSS JOIN LATERAL (
                  SELECT CASE n.database WHEN '' THEN s.frontier ELSE s.frontier #> ARRAY['databases', n.database] END
              ) AS f (frontier)
              WHERE d.pgt_id = s.pgt_id
                AND (n.xid >= pg_snapshot_xmax((f.frontier ->> 'snapshot')::pg_snapshot)::text::bigint
                         AND n.xid IS DISTINCT FROM (f.frontier ->> 'passed')::bigint
                     OR EXISTS (SELECT FROM active a
                                WHERE a.source_stable_name = d.source_stable_name
                                  AND NOT pg_visible_in_snapshot(a.xid::text::xid8,
                                                                 (f.frontier ->> 'snapshot')::pg_snapshot)
                                  AND a.xid IS DISTINCT FROM (f.frontier ->> 'passed')::bigint))))
), reached AS (
    SELECT pgt_id, pgt_relid FROM due WHERE now
    UNION
    SELECT s.pgt_id, s.pgt_relid
    FROM reached r
    CROSS JOIN LATERAL (
        SELECT source.pgt_id FROM pgtrickle.pgt_dependencies source WHERE source.source_relid = r.pgt_relid
        UNION ALL
        SELECT spread.pgt_id FROM pgtrickle.pgt_dependencies spread WHERE spread.through = r.pgt_relid
    ) AS d
    JOIN free s ON s.pgt_id = d.pgt_id
    WHERE s.may
)
SELECT s.pgt_id, coalesce(due.asked, false) AS asked, s.updated_at, coalesce(s.own_seconds, 0) AS seconds,
       -- The initial population takes a while. The sizes of remote tables are not known here. Sizes come from
       -- statistics, so that a locked table is not waited for.
       s.reinit_reason IS NOT NULL AND coalesce((
           SELECT bool_or(d.source_type IN ('OTHER_DATABASE', 'FOREIGN_TABLE') OR d.through IS NOT NULL)
               OR sum(greatest(c.reltuples, pg_stat_get_live_tuples(c.oid))) > %(small_rows)s
           FROM pgtrickle.pgt_dependencies d CROSS JOIN LATERAL pgtrickle._partition_tree(d.source_relid) AS member
           JOIN pg_class c ON c.oid = member
           WHERE d.pgt_id = s.pgt_id), false) AS fills_long,
       pgtrickle._tier(s.tier, s.last_change_at) AS tier,
       ARRAY(SELECT DISTINCT split_part(d.source_stable_name, '/', 1) FROM pgtrickle.pgt_dependencies d
             WHERE d.pgt_id = s.pgt_id AND d.source_type = 'OTHER_DATABASE' ORDER BY 1) AS databases,
       (SELECT c.relowner::bigint FROM pg_class c WHERE c.oid = s.pgt_relid) AS owner,
       coalesce(extract(epoch FROM s.every * s.stretch)::double precision, 'Infinity') AS every,
       s.own_seconds IS NOT NULL AND s.consecutive_errors = 0 AS proven,
       CASE WHEN reached.pgt_id IS NOT NULL THEN 0
            ELSE greatest(0, extract(epoch FROM s.next_due - clock_timestamp()))::double precision END AS due_in
FROM reached FULL JOIN due USING (pgt_id) JOIN pgtrickle.pgt_stream_tables s USING (pgt_id)
ORDER BY s.pgt_id;

-- The stream table whose comparison with its query is most overdue. A comparison refreshes the stream table: those
-- with a long schedule are compared right after a refresh, or they would be fresh when nobody expects it.
SELECT s.pgt_id, c.relowner::bigint AS owner
FROM pgtrickle.pgt_stream_tables AS s
JOIN pg_class AS c ON c.oid = s.pgt_relid
CROSS JOIN LATERAL (SELECT coalesce(max(v.at), s.created_at) AS at FROM pgtrickle.pgt_verifications AS v
                    WHERE v.pgt_id = s.pgt_id) AS verified
WHERE s.status = 'ACTIVE' AND s.tier IS DISTINCT FROM 'frozen' AND s.frontier IS NOT NULL AND s.reinit_reason IS NULL
  AND s.st_placement = 'local' AND NOT s.pooler_compatibility_mode
  AND verified.at < clock_timestamp() - make_interval(secs => %(every)s)
  AND (s.every <= interval '10 minutes' OR s.data_timestamp > clock_timestamp() - interval '1 minute')
  AND s.pgt_id <> ALL (%(others)s::bigint[])
ORDER BY verified.at LIMIT 1;

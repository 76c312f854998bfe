-- Stream tables whose comparison with their queries was requested in SQL.
SELECT DISTINCT r.pgt_id, c.relowner::bigint AS owner
FROM pgtrickle.pgt_requests AS r
JOIN pgtrickle.pgt_stream_tables AS s USING (pgt_id)
LEFT JOIN pg_class AS c ON c.oid = s.pgt_relid
WHERE r.status = 'PENDING' AND r.kind = 'VERIFY' AND r.pgt_id <> ALL (%(others)s::bigint[]);

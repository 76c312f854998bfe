-- What each stream table reads: stream tables by ID, other tables by name; its owner, and the group it is in.
SELECT DISTINCT s.pgt_id, s.updated_at, s.refresh_group, d.source_stable_name AS source, u.pgt_id AS upstream,
       c.relowner::bigint AS owner
FROM pgtrickle.pgt_stream_tables s
LEFT JOIN pg_class c ON c.oid = s.pgt_relid
LEFT JOIN pgtrickle.pgt_dependencies d USING (pgt_id)
LEFT JOIN pgtrickle.pgt_stream_tables u ON u.pgt_relid = coalesce(d.through, d.source_relid);

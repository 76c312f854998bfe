-- What each stream table reads: stream tables by id, other tables by name; and the group it was put into.
SELECT DISTINCT s.pgt_id, s.updated_at, s.refresh_group, d.source_stable_name AS source, u.pgt_id AS upstream
FROM pgtrickle.pgt_stream_tables s
LEFT JOIN pgtrickle.pgt_dependencies d USING (pgt_id)
LEFT JOIN pgtrickle.pgt_stream_tables u ON u.pgt_relid = coalesce(d.through, d.source_relid);

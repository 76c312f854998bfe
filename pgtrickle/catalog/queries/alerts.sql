-- What an operator should know: growing buffers and stretched schedules. Reads only sources with changes.
SELECT 'buffer ' || t.source_stable_name, 'buffer_growth_warning', NULL::bigint,
       jsonb_build_object('source', t.source_relid::text, 'rows', b.rows, 'threshold', %(rows)s::bigint)
FROM (SELECT DISTINCT source_stable_name FROM pgtrickle_changes.pgt_activity) AS a
JOIN pgtrickle.pgt_change_tracking t USING (source_stable_name)
CROSS JOIN LATERAL (SELECT sum(pg_stat_get_live_tuples(part)) AS rows
                    FROM pgtrickle._partition_tree(t.buffer_relid) AS part) AS b
WHERE b.rows > %(rows)s
UNION ALL
SELECT 'stretch ' || pgt_id, 'scheduler_falling_behind', pgt_id,
       jsonb_build_object('stretch', stretch, 'seconds', last_seconds, 'schedule', schedule)
FROM pgtrickle.pgt_stream_tables WHERE stretch >= 1.5 AND status = 'ACTIVE';

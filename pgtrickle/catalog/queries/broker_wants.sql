-- The sources whose changes databases subscribe to at the broker: the expressions they need, and the snapshot up to
-- which each consumer has stored the changes.
SELECT t.source_stable_name AS stable_name,
       n.nspname AS schema,
       c.relname AS name,
       b.relname AS buffer,
       pg_relation_size(b.oid)
           + coalesce((SELECT sum(pg_relation_size(h.inhrelid)) FROM pg_inherits h WHERE h.inhparent = b.oid),
                      0)::bigint AS buffered,
       w.expressions,
       w.conditions,
       w.settings,
       w.homes,
       coalesce(s.snapshots, '{}') AS snapshots,
       coalesce(s.recent, '{}') AS recent
FROM (
    SELECT e.source_stable_name,
           (array_agg(e.settings ORDER BY e.registered_at))[1] AS settings,
           array_agg(e.home ORDER BY e.home) AS homes,
           (SELECT coalesce(jsonb_object_agg(x.key, x.value), '{}') FROM pgtrickle.pgt_broker_entries o
            CROSS JOIN jsonb_each(o.expressions) AS x
            WHERE o.source_stable_name = e.source_stable_name) AS expressions,
           (SELECT coalesce(jsonb_agg(DISTINCT x), '[]') FROM pgtrickle.pgt_broker_entries o
            CROSS JOIN jsonb_array_elements_text(o.conditions) AS x
            WHERE o.source_stable_name = e.source_stable_name) AS conditions
    FROM pgtrickle.pgt_broker_entries e
    GROUP BY e.source_stable_name
) AS w
JOIN pgtrickle.pgt_change_tracking t USING (source_stable_name)
JOIN pg_class c ON c.oid = t.source_relid
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_class b ON b.oid = t.buffer_relid
LEFT JOIN LATERAL (
    SELECT array_agg(p.consumer || ' ' || p.snapshot) AS snapshots,
           array_agg(p.consumer || ' ' || p.snapshot)
               FILTER (WHERE p.seen_at > clock_timestamp() - interval '1 minute') AS recent
    FROM pgtrickle.pgt_consumers p
    WHERE p.source_stable_name = t.source_stable_name AND p.snapshot IS NOT NULL
      AND substring(p.consumer FROM '^(.*)/[^/]*$') = ANY (w.homes)
) AS s ON true
ORDER BY c.oid;

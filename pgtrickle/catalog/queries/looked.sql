-- A look at another database: who reads it here knows up to when it had no news, or why it cannot be asked.
UPDATE pgtrickle.pgt_databases w
SET problem = l.problem,
    clear_at = CASE WHEN l.problem IS NULL AND NOT EXISTS (
        SELECT FROM unnest(%(active)s::text[], %(names)s::text[], %(xids)s::bigint[]) AS a (database, name, xid)
        JOIN pgtrickle.pgt_dependencies d ON d.source_stable_name = a.database || '/' || a.name
        JOIN pgtrickle.pgt_stream_tables s USING (pgt_id)
        WHERE a.database = w.name
          AND NOT pg_visible_in_snapshot(a.xid::text::xid8, (s.frontier #> ARRAY['databases', w.name] ->> 'snapshot')::pg_snapshot)
    ) THEN to_timestamp(l.at) ELSE w.clear_at END
FROM unnest(%(databases)s::text[], %(times)s::float8[], %(problems)s::text[]) AS l (name, at, problem)
WHERE w.name = l.name;

-- Results of polling other databases: until when their readers are up to date, or why they could not be asked.
WITH looks AS MATERIALIZED (
    SELECT l.name, l.at, l.problem
    FROM unnest(%(databases)s::text[], %(times)s::float8[], %(problems)s::text[]) AS l (name, at, problem)
), behind AS MATERIALIZED (
    SELECT d.pgt_id, a.database, min(to_timestamp(a.since)) AS since
    FROM unnest(%(active)s::text[], %(names)s::text[], %(xids)s::bigint[], %(since)s::float8[])
        AS a (database, name, xid, since)
    JOIN pgtrickle.pgt_databases w ON w.name = a.database
    JOIN pgtrickle.pgt_dependencies d ON d.source_stable_name = a.database || '/' || a.name
    JOIN pgtrickle.pgt_stream_tables s USING (pgt_id)
    CROSS JOIN LATERAL (SELECT s.frontier #> ARRAY['databases', a.database]) AS f (frontier)
    WHERE NOT pg_visible_in_snapshot(a.xid::text::xid8, (f.frontier ->> 'snapshot')::pg_snapshot)
      AND a.xid IS DISTINCT FROM (f.frontier ->> 'passed')::bigint
    GROUP BY 1, 2
), caught_up AS (
    DELETE FROM pgtrickle.pgt_behind b USING looks l
    WHERE b.database = l.name
      AND NOT EXISTS (SELECT FROM behind n WHERE (n.pgt_id, n.database) = (b.pgt_id, b.database))
), fell_behind AS (
    INSERT INTO pgtrickle.pgt_behind AS b (pgt_id, database, since) SELECT n.pgt_id, n.database, n.since FROM behind n
    ON CONFLICT (pgt_id, database) DO UPDATE SET since = excluded.since WHERE b.since <> excluded.since
)
UPDATE pgtrickle.pgt_databases w
SET problem = l.problem, looked_at = CASE WHEN l.problem IS NULL THEN to_timestamp(l.at) ELSE w.looked_at END
FROM looks l WHERE w.name = l.name;

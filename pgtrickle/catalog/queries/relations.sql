-- Every relation that a view reads, directly or through other views, with what the planner needs to know of it.
WITH RECURSIVE reached AS (
    SELECT %(view)s::oid AS oid
    UNION
    SELECT d.refobjid
    FROM reached
    JOIN pg_rewrite r ON r.ev_class = reached.oid
    JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid AND d.refclassid = 'pg_class'::regclass
    WHERE d.refobjid <> reached.oid
)
SELECT c.oid::bigint AS oid,
       n.nspname AS schema,
       c.relname AS name,
       c.relkind::text AS kind,
       CASE WHEN c.relkind = 'v' THEN pg_get_viewdef(c.oid) END AS definition,
       (
           SELECT array_agg(a.attname ORDER BY k.ord)
           FROM pg_index i
           CROSS JOIN LATERAL unnest(i.indkey[0 : i.indnkeyatts - 1]) WITH ORDINALITY AS k(attnum, ord)
           JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.attnum
           WHERE i.indexrelid = (
               SELECT u.indexrelid
               FROM pg_index u
               WHERE u.indrelid = c.oid AND u.indisunique AND u.indimmediate AND u.indisvalid AND u.indpred IS NULL
                 AND u.indexprs IS NULL
                 AND (u.indnullsnotdistinct OR NOT EXISTS (
                     SELECT FROM unnest(u.indkey[0 : u.indnkeyatts - 1]) AS x(attnum)
                     JOIN pg_attribute ua ON ua.attrelid = c.oid AND ua.attnum = x.attnum AND NOT ua.attnotnull))
               ORDER BY u.indisprimary DESC, u.indnkeyatts, u.indexrelid
               LIMIT 1)
             -- A child may repeat its parent's keys.
             AND NOT EXISTS (SELECT FROM pg_inherits h WHERE h.inhparent = c.oid AND c.relkind = 'r')
       ) AS key,
       (
           SELECT jsonb_agg(jsonb_build_object(
                      'name', a.attname, 'attnum', a.attnum, 'type', a.atttypid::bigint, 'typmod', a.atttypmod,
                      'not_null', a.attnotnull,
                      'deterministic', coalesce(l.collisdeterministic, true),
                      'generated', CASE WHEN a.attgenerated = 'v' THEN pg_get_expr(g.adbin, g.adrelid) END)
                  ORDER BY a.attnum)
           FROM pg_attribute a
           LEFT JOIN pg_collation l ON l.oid = a.attcollation
           LEFT JOIN pg_attrdef g ON g.adrelid = a.attrelid AND g.adnum = a.attnum
           WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
       ) AS columns
FROM reached
JOIN pg_class c ON c.oid = reached.oid
JOIN pg_namespace n ON n.oid = c.relnamespace;

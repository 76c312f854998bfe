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
       EXISTS (
           SELECT FROM pg_rewrite r
           JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
             AND d.refclassid = 'pg_operator'::regclass
           WHERE r.ev_class = c.oid
       ) AS own_operators,
       pgtrickle._table_key(c.oid) AS key,
       (
           SELECT jsonb_agg(jsonb_build_object(
                      'name', a.attname, 'attnum', a.attnum, 'type', a.atttypid::bigint, 'typmod', a.atttypmod,
                      'not_null', a.attnotnull,
                      'collation', CASE WHEN l.collname <> 'default' AND a.atttypid <> 'name'::regtype
                                        THEN format('%%I.%%I', ln.nspname, l.collname) ELSE '' END,
                      'deterministic', coalesce(l.collisdeterministic, true),
                      'generated', CASE WHEN a.attgenerated = 'v' THEN pg_get_expr(g.adbin, g.adrelid) END)
                  ORDER BY a.attnum)
           FROM pg_attribute a
           LEFT JOIN pg_collation l ON l.oid = a.attcollation
           LEFT JOIN pg_namespace ln ON ln.oid = l.collnamespace
           LEFT JOIN pg_attrdef g ON g.adrelid = a.attrelid AND g.adnum = a.attnum
           WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
       ) AS columns
FROM reached
JOIN pg_class c ON c.oid = reached.oid
JOIN pg_namespace n ON n.oid = c.relnamespace;

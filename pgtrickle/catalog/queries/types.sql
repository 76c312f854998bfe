-- Types by OID and typmod, with domains resolved to their base types.
WITH RECURSIVE wanted AS (
    SELECT * FROM unnest(%(oids)s::oid[], %(typmods)s::int[]) WITH ORDINALITY AS w(oid, typmod, ord)
), base AS (
    SELECT ord, oid, typmod FROM wanted
    UNION ALL
    SELECT b.ord, t.typbasetype, CASE WHEN t.typtypmod >= 0 THEN t.typtypmod ELSE b.typmod END
    FROM base b
    JOIN pg_type t ON t.oid = b.oid AND t.typtype = 'd'
)
SELECT b.ord,
       t.oid::bigint AS oid,
       b.typmod,
       format_type(t.oid, b.typmod) AS name,
       t.typtype = 'e' AS is_enum,
       t.typtype IN ('e', 'r', 'm', 'c') OR t.typcategory = 'A' OR t.oid = 'bpchar'::regtype OR EXISTS (
           SELECT FROM pg_opclass o
           JOIN pg_am m ON m.oid = o.opcmethod AND m.amname IN ('btree', 'hash')
           WHERE o.opcdefault
             AND (o.opcintype = t.oid OR (o.opcintype = 'text'::regtype AND t.oid = 'varchar'::regtype))
       ) AS groupable,
       -- Through the search path alone, `=` would not find the operator of a type in another schema.
       coalesce((
           SELECT format('OPERATOR(%%I.%%s)', n.nspname, o.oprname)
           FROM pg_opclass c
           JOIN pg_am m ON m.oid = c.opcmethod
           JOIN pg_amop a ON a.amopfamily = c.opcfamily AND a.amoplefttype = c.opcintype
             AND a.amoprighttype = c.opcintype
                AND a.amopstrategy = CASE m.amname WHEN 'btree' THEN 3 WHEN 'hash' THEN 1 END
           JOIN pg_operator o ON o.oid = a.amopopr
           JOIN pg_namespace n ON n.oid = o.oprnamespace
           WHERE c.opcdefault AND c.opcintype = t.oid AND n.nspname <> 'pg_catalog'
           ORDER BY m.amname
           LIMIT 1), '=') AS equals
FROM base b
JOIN pg_type t ON t.oid = b.oid AND t.typtype <> 'd'
ORDER BY b.ord;

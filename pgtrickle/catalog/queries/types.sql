-- Types by OID and typmod, domains resolved to what they are made of.
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
       ) AS groupable
FROM base b
JOIN pg_type t ON t.oid = b.oid AND t.typtype <> 'd'
ORDER BY b.ord;

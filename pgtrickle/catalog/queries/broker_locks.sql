-- The tables here whose rows stream tables of other databases read.
SELECT DISTINCT c.oid::bigint, n.nspname, c.relname
FROM pgtrickle.pgt_consumers p
JOIN pg_class c ON c.oid = p.source_relid
JOIN pg_namespace n ON n.oid = c.relnamespace
ORDER BY 1;

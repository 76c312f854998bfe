-- The members' tables behind tables that stand for one in many databases.
SELECT m.relid::oid::bigint AS relid, t.database_set = '@cluster' AS spread,
       m.member_relid::oid::bigint AS member_relid, f.database, f.source_schema, f.source_name,
       f.source_stable_name, f.columns, nullif(pgtrickle._primary_key(m.member_relid), 'null') AS key
FROM pgtrickle.pgt_shards m JOIN pgtrickle.pgt_sharded_tables t ON t.relid = m.relid
JOIN pgtrickle.pgt_foreign_tables f ON f.relid = m.member_relid
WHERE m.relid = ANY (%(relations)s::oid[])
UNION ALL
-- The rows of a distributed table that the coordinator itself stores.
SELECT t.relid::oid::bigint, true, t.relid::oid::bigint, '', t.source_schema, t.source_name, NULL, NULL, NULL
FROM pgtrickle.pgt_sharded_tables t WHERE t.database_set = '@cluster' AND t.relid = ANY (%(relations)s::oid[])
ORDER BY relid, database;

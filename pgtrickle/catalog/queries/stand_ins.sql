-- The tables behind stand-ins. All of them, because views may read others.
SELECT relid::oid::bigint AS relid, database, source_schema, source_name, source_stable_name, columns,
       nullif(key, 'null') AS key,
       resolved_by IS NOT NULL AS resolved
FROM pgtrickle.pgt_foreign_tables;

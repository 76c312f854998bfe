-- What the tables that stand for those of other databases stand for. All of them: a view goes through others.
SELECT relid::oid::bigint AS relid, database, source_schema, source_name, source_stable_name, columns,
       nullif(key, 'null') AS key,
       resolved_by IS NOT NULL AS resolved
FROM pgtrickle.pgt_foreign_tables;

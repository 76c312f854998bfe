-- Tables of other databases that stream tables read, with the columns they use: by number here and in the other
-- database.
SELECT d.pgt_id,
       f.database,
       f.relid::oid::bigint AS relid,
       f.source_relid AS there,
       f.node,
       f.source_schema AS schema,
       f.source_name AS name,
       f.shape,
       d.through IS NOT NULL AS shard,
       f.resolved_by IS NOT NULL AS resolved,
       f.resolved_by IS NOT NULL
           AND f.resolved_by IS DISTINCT FROM pgtrickle.stable_hash(pgtrickle._foreign_table_target(f.relid)::text)
               AS redirected,
       pgtrickle._database_identity() || '/' || d.pgt_id AS consumer,
       format('%%s, stream table %%I.%%I', current_database(), s.pgt_schema, s.pgt_name) AS label,
       ARRAY(SELECT (c ->> 'attnum')::smallint
             FROM jsonb_array_elements(f.columns) AS c
             JOIN pg_attribute a ON a.attrelid = f.relid AND a.attname = c ->> 'name'
             WHERE a.attnum = ANY (d.columns_used)
             ORDER BY 1) AS columns
FROM pgtrickle.pgt_dependencies d
JOIN pgtrickle.pgt_foreign_tables f ON f.relid = d.source_relid
JOIN pgtrickle.pgt_stream_tables s USING (pgt_id)
WHERE d.pgt_id = ANY (%(ids)s)
ORDER BY f.database, d.pgt_id;

-- The sources of stream tables as the cut sees them, with the state of capture and its markers. Many stream tables
-- share a source.
WITH signed AS MATERIALIZED (
    SELECT t.source_relid, t.source_stable_name, t.buffer_relid,
           pgtrickle._capture_signature(t.source_relid) AS signature
    FROM pgtrickle.pgt_change_tracking t
    WHERE t.source_relid IN (SELECT d.source_relid FROM pgtrickle.pgt_dependencies d WHERE d.pgt_id = ANY (%(ids)s))
)
SELECT d.pgt_id,
       d.source_relid::oid::bigint AS relid,
       d.source_schema AS schema,
       d.source_name AS name,
       d.source_type,
       coalesce(d.through = d.source_relid, false) AS spread,
       f.database,
       d.capture_signature AS known_signature,
       t.signature,
       b.relname AS buffer,
       coalesce(pg_relation_size(b.oid), 0)
           + coalesce((SELECT sum(pg_relation_size(h.inhrelid)) FROM pg_inherits h WHERE h.inhparent = b.oid),
                      0)::bigint AS buffered,
       t.source_stable_name AS stable_name,
       c.oid IS NOT NULL AS present
FROM pgtrickle.pgt_dependencies d
LEFT JOIN signed t ON t.source_relid = d.source_relid AND d.source_type <> 'DISTRIBUTED'
LEFT JOIN pg_class b ON b.oid = t.buffer_relid
LEFT JOIN pg_class c ON c.oid = d.source_relid
LEFT JOIN pgtrickle.pgt_foreign_tables f ON f.relid = d.source_relid
WHERE d.pgt_id = ANY (%(ids)s);

-- The sources of stream tables as the cut sees them, with their capture and what it noticed.
SELECT d.pgt_id,
       d.source_relid::oid::bigint AS relid,
       d.source_schema AS schema,
       d.source_name AS name,
       d.source_type,
       d.capture_signature AS known_signature,
       CASE WHEN t.source_relid IS NOT NULL THEN pgtrickle._capture_signature(d.source_relid) END AS signature,
       b.relname AS buffer,
       t.source_stable_name AS stable_name,
       c.oid IS NOT NULL AS present
FROM pgtrickle.pgt_dependencies d
LEFT JOIN pgtrickle.pgt_change_tracking t ON t.source_relid = d.source_relid
LEFT JOIN pg_class b ON b.oid = t.buffer_relid
LEFT JOIN pg_class c ON c.oid = d.source_relid
WHERE d.pgt_id = ANY (%(ids)s);

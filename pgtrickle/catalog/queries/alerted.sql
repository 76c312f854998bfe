-- What to report about a stream table whose refresh failed, and whether the last event already reported it. No row if
-- the stream table is locked: another failure will follow.
WITH was AS (
    SELECT pgt_id, alerted FROM pgtrickle.pgt_stream_tables WHERE pgt_id = %(id)s FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE pgtrickle.pgt_stream_tables AS s
SET alerted = CASE WHEN s.fuse_blown_at IS NOT NULL THEN 'fuse' WHEN s.status = 'SUSPENDED' THEN s.status
                   ELSE %(kind)s END
FROM was WHERE s.pgt_id = was.pgt_id
RETURNING was.alerted IS DISTINCT FROM s.alerted, s.alerted, s.status_reason,
          pgtrickle._error_remedy(%(kind)s, format('%%I.%%I', s.pgt_schema, s.pgt_name), s.status = 'SUSPENDED');

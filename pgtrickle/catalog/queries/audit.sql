-- Among a few stream tables, those whose sources were altered without a change of their rows: partitions attached or
-- detached, triggers disabled. The caller rotates through the stream tables, because auditing all of them would slow
-- down every tick.
SELECT s.pgt_id
FROM pgtrickle.pgt_stream_tables s
WHERE s.pgt_id = ANY (%(ids)s) AND s.status = 'ACTIVE' AND s.reinit_reason IS NULL
  AND (s.consecutive_errors = 0 OR s.next_due <= clock_timestamp())
  AND EXISTS (SELECT FROM pgtrickle.pgt_dependencies d
              JOIN pgtrickle.pgt_change_tracking t ON t.source_relid = d.source_relid
              WHERE d.pgt_id = s.pgt_id
                AND d.capture_signature IS DISTINCT FROM pgtrickle._capture_signature(d.source_relid));

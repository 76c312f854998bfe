-- Claims stream tables for a refresh. Each claim has its own token; an apply with an older one is refused.
UPDATE pgtrickle.pgt_stream_tables s
SET claimed_by = %(service)s, fencing_token = s.fencing_token + 1
WHERE s.pgt_id IN (
    SELECT t.pgt_id
    FROM pgtrickle.pgt_stream_tables t
    WHERE t.pgt_id = ANY (%(ids)s)
      AND (t.claimed_by IS NULL OR t.claimed_by = %(service)s
           OR NOT EXISTS (SELECT FROM pgtrickle.pgt_services h
                          WHERE h.service_id = t.claimed_by AND h.lease_expires > clock_timestamp()))
    ORDER BY t.pgt_id
    -- A request that refers to the row holds it FOR KEY SHARE and does not conflict.
    FOR NO KEY UPDATE SKIP LOCKED)
RETURNING s.pgt_id, s.fencing_token;

-- Deletes what nobody will ask for again.
WITH history AS (
    DELETE FROM pgtrickle.pgt_refresh_history WHERE start_time < now() - make_interval(days => %(days)s)
), events AS (
    DELETE FROM pgtrickle.pgt_events WHERE at < now() - make_interval(days => %(days)s)
), verifications AS (
    -- The last row of each stream table is kept.
    DELETE FROM pgtrickle.pgt_verifications v WHERE v.at < now() - make_interval(days => %(days)s)
      AND EXISTS (SELECT FROM pgtrickle.pgt_verifications n WHERE n.pgt_id = v.pgt_id AND n.at > v.at)
), requests AS (
    DELETE FROM pgtrickle.pgt_requests WHERE status IN ('DONE', 'FAILED') AND finished_at < now() - interval '1 day'
), abandoned AS (
    UPDATE pgtrickle.pgt_jobs j SET status = 'FAILED', finished_at = clock_timestamp(), error = 'its service is gone'
    WHERE j.status IN ('QUEUED', 'RUNNING') AND NOT EXISTS (
        SELECT FROM pgtrickle.pgt_services h WHERE h.service_id = j.service_id AND h.lease_expires > clock_timestamp())
), locks AS (
    -- Processes that died long ago; their work is taken over much earlier, when the lease has expired.
    UPDATE pgtrickle.pgt_stream_tables s SET claimed_by = NULL
    WHERE s.claimed_by IS NOT NULL AND NOT EXISTS (
        SELECT FROM pgtrickle.pgt_services h WHERE h.service_id = s.claimed_by
        AND h.lease_expires > clock_timestamp() - make_interval(secs => pgtrickle._setting('lock_timeout')::integer))
), jobs AS (
    DELETE FROM pgtrickle.pgt_jobs WHERE finished_at < now() - interval '1 hour'
)
DELETE FROM pgtrickle.pgt_services WHERE lease_expires < now() - interval '1 hour';

-- Changes here that stream tables of other databases read: by which transactions, and for how many seconds they have
-- been waiting at most.
SELECT a.source_stable_name, a.xid, extract(epoch FROM clock_timestamp() - max(a.captured_at))::double precision
FROM pgtrickle_changes.pgt_activity AS a
WHERE a.source_stable_name IN (SELECT c.source_stable_name FROM pgtrickle.pgt_consumers AS c)
GROUP BY 1, 2;

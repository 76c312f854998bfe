-- What the broker's scan found.
WITH ticked AS (
    UPDATE pgtrickle.pgt_broker SET tick = tick + 1 WHERE service_id = %(service)s RETURNING tick
)
UPDATE pgtrickle.pgt_broker_entries e
SET pending_rows = f.pending, upper_bound = f.bound, last_tick = ticked.tick
FROM ticked, unnest(%(homes)s::text[], %(names)s::text[], %(pending)s::bigint[], %(bounds)s::bigint[])
    AS f (home, name, pending, bound)
WHERE e.home = f.home AND e.source_stable_name = f.name;

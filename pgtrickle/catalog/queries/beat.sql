-- The service's heartbeat: it renews its claims and stores the settings it uses.
UPDATE pgtrickle.pgt_services
SET last_seen = clock_timestamp(), lease_expires = clock_timestamp() + %(lease)s,
    ticked_at = statement_timestamp(), -- a change that the snapshot does not see is committed later
    tick_snapshot = pg_current_snapshot(), earlier_ticks = %(ticks)s::timestamptz[],
    earlier_snapshots = %(snapshots)s::text[]::pg_snapshot[],
    pool_size = %(pool_size)s, pool_active = %(pool_active)s,
    plans_found = %(plans_found)s, plans_made = %(plans_made)s, settings = %(settings)s
WHERE service_id = %(service)s
RETURNING ticked_at, tick_snapshot::text,
    EXISTS (SELECT FROM pgtrickle.pgt_services AS o
            WHERE o.kind = 'service' AND o.service_id <> %(service)s AND o.lease_expires > clock_timestamp());

-- The lease under which this process holds its claims.
INSERT INTO pgtrickle.pgt_services AS s (service_id, kind, host, pid, version, lease_expires)
VALUES (%(service)s, %(kind)s, %(host)s, %(pid)s, %(version)s, clock_timestamp() + %(lease)s)
ON CONFLICT (service_id) DO UPDATE SET last_seen = clock_timestamp(), lease_expires = excluded.lease_expires;

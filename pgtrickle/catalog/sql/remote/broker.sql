-- The refresh broker in the catalog: its lease and its subscriptions.

-- Become the broker, or stay it; returns who it is. The row's lock makes it only one.
CREATE OR REPLACE FUNCTION pgtrickle._elect_broker(service uuid, address text, token text, lease interval) RETURNS uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    elected uuid;
BEGIN
    INSERT INTO pgtrickle.pgt_broker AS b (service_id, address, token, lease_expires)
    VALUES (service, _elect_broker.address, _elect_broker.token, clock_timestamp() + lease)
    ON CONFLICT ON CONSTRAINT pgt_broker_pkey DO UPDATE
    SET service_id = excluded.service_id, address = excluded.address, token = excluded.token,
        lease_expires = excluded.lease_expires,
        elected_at = CASE WHEN b.service_id = excluded.service_id THEN b.elected_at ELSE clock_timestamp() END
    WHERE b.service_id = excluded.service_id OR b.lease_expires < clock_timestamp()
    RETURNING b.service_id INTO elected;
    RETURN coalesce(elected, (SELECT b.service_id FROM pgtrickle.pgt_broker AS b));
END
$$;

-- Subscribes a database to these expressions of a source's changes. False if the registry is full.
CREATE OR REPLACE FUNCTION pgtrickle._register_interest(
    home text, database text, stable_name text, expressions jsonb, conditions jsonb, settings jsonb)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    capacity CONSTANT integer := 4096;
BEGIN
    PERFORM pgtrickle._require_administrator('use the refresh broker');
    IF NOT EXISTS (SELECT FROM pgtrickle.pgt_broker_entries AS e
                   WHERE e.home = _register_interest.home AND e.source_stable_name = stable_name)
       AND (SELECT count(*) FROM pgtrickle.pgt_broker_entries) >= capacity THEN
        RETURN false;
    END IF;
    INSERT INTO pgtrickle.pgt_broker_entries
        AS e (home, database, source_stable_name, expressions, conditions, settings)
    VALUES (_register_interest.home, _register_interest.database, stable_name, _register_interest.expressions,
            _register_interest.conditions, _register_interest.settings)
    ON CONFLICT ON CONSTRAINT pgt_broker_entries_pkey DO UPDATE
    SET database = excluded.database, settings = excluded.settings,
        expressions = e.expressions || excluded.expressions,
        conditions = (SELECT coalesce(jsonb_agg(DISTINCT c), '[]')
                      FROM jsonb_array_elements(e.conditions || excluded.conditions) AS c);
    RETURN true;
END
$$;

-- Databases that subscribe to the changes of sources here, and what the last scan found for each.
CREATE OR REPLACE FUNCTION pgtrickle.broker_status()
RETURNS TABLE (database text, source text, pending_rows bigint, upper_bound bigint, last_tick bigint, broker uuid,
               broker_alive boolean)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT e.database, coalesce(t.source_relid::text, e.source_stable_name), e.pending_rows, e.upper_bound,
           e.last_tick,
           b.service_id, coalesce(b.lease_expires > clock_timestamp(), false)
    FROM pgtrickle.pgt_broker_entries AS e
    LEFT JOIN pgtrickle.pgt_change_tracking AS t USING (source_stable_name)
    LEFT JOIN pgtrickle.pgt_broker AS b ON true
    ORDER BY 1, 2
$$;

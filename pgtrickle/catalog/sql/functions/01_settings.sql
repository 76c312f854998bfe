-- The settings pg_trickle.*: where a value comes from, and who may change it.

CREATE OR REPLACE FUNCTION pgtrickle.stable_hash(value text) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
AS $$
    -- Not md5(): a server in FIPS mode refuses it.
    SELECT pg_catalog.lpad(pg_catalog.to_hex(pg_catalog.hashtextextended(value COLLATE pg_catalog."C", 0)), 16, '0')
$$;

CREATE OR REPLACE FUNCTION pgtrickle._known_settings()
RETURNS TABLE (name text, default_value text, pattern text, meaning text)
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    VALUES
        ('enabled', 'on', '^(on|off)$', 'on or off'),
        ('placement', 'auto', '^(auto|spark)$', 'auto or spark'),
        ('max_buffer_rows', '1000000', '^[1-9][0-9]{4,11}$', 'a number of rows, at least 10000'),
        ('lock_timeout_ms', '5000', '^[1-9][0-9]{0,6}$', 'milliseconds, from 1 to 9999999')
$$;

-- ALTER ROLE and ALTER DATABASE … SET are read from the catalog: what an open session sees of them is stale.
-- A value that is not allowed counts as not there, for this also runs inside a writer's statement.
CREATE OR REPLACE FUNCTION pgtrickle._setting(name text) RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT found.value
    FROM pgtrickle._known_settings() AS known
    CROSS JOIN LATERAL (
        SELECT CASE WHEN s.setrole <> 0 AND s.setdatabase <> 0 THEN 1 WHEN s.setrole <> 0 THEN 2 ELSE 3 END AS rank,
               substr(entry, strpos(entry, '=') + 1) AS value
        FROM pg_db_role_setting AS s CROSS JOIN unnest(s.setconfig) AS entry
        WHERE s.setdatabase IN (0, (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database()))
          AND (s.setrole = 0 OR s.setrole = (SELECT r.oid FROM pg_roles AS r JOIN pgtrickle.pgt_settings AS p
                                             ON p.name = 'service_role' AND p.value = r.rolname))
          AND lower(split_part(entry, '=', 1)) = 'pg_trickle.' || known.name
        UNION ALL
        SELECT 4, current_setting('pg_trickle.' || known.name, true)
        UNION ALL
        SELECT 5, p.value FROM pgtrickle.pgt_settings AS p WHERE p.name = known.name
        UNION ALL
        SELECT 6, known.default_value
    ) AS found
    WHERE known.name = $1 AND found.value ~ known.pattern
    ORDER BY found.rank
    LIMIT 1
$$;

-- Who called, seen from inside a SECURITY DEFINER function, where current_user is that function's owner.
CREATE OR REPLACE FUNCTION pgtrickle._caller() RETURNS name
LANGUAGE sql STABLE
AS $$
    SELECT coalesce(nullif(pg_catalog.current_setting('role'), 'none'), session_user)::name
$$;

CREATE OR REPLACE FUNCTION pgtrickle._service_role() RETURNS name
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT value::name FROM pgtrickle.pgt_settings WHERE name = 'service_role'
$$;

CREATE OR REPLACE FUNCTION pgtrickle._require_administrator(action text) RETURNS void
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    caller name := pgtrickle._caller();
BEGIN
    IF NOT (pg_has_role(caller, (SELECT nspowner FROM pg_namespace WHERE nspname = 'pgtrickle'), 'MEMBER')
            OR pg_has_role(caller, (SELECT datdba FROM pg_database WHERE datname = current_database()), 'MEMBER')
            OR caller = pgtrickle._service_role()) THEN
        RAISE EXCEPTION 'role % may not %', quote_ident(caller), action
            USING ERRCODE = 'insufficient_privilege',
                  HINT = 'Ask the owner of the database or the role that installed pgtrickle.';
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.set(name text, value text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    short text := regexp_replace(lower(name), '^pg_trickle\.', '');
    known record;
BEGIN
    PERFORM pgtrickle._require_administrator(format('change the setting pg_trickle.%s', short));
    SELECT * INTO known FROM pgtrickle._known_settings() AS k WHERE k.name = short;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no setting %', quote_literal(set.name)
            USING ERRCODE = 'undefined_object',
                  HINT = 'Known settings: '
                         || (SELECT string_agg(k.name, ', ' ORDER BY k.name) FROM pgtrickle._known_settings() AS k) || '.';
    END IF;
    IF value IS NULL THEN
        DELETE FROM pgtrickle.pgt_settings AS p WHERE p.name = short;
    ELSIF value !~ known.pattern THEN
        RAISE EXCEPTION 'setting % cannot be %', short, quote_literal(value)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'It takes ' || known.meaning || '.';
    ELSE
        INSERT INTO pgtrickle.pgt_settings AS p (name, value, set_by) VALUES (short, value, pgtrickle._caller())
        ON CONFLICT ON CONSTRAINT pgt_settings_pkey
        DO UPDATE SET value = excluded.value, set_at = now(), set_by = excluded.set_by;
    END IF;
    IF short = 'max_buffer_rows' THEN
        PERFORM pgtrickle._spread_buffer_limit();
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.version() RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT value FROM pgtrickle.pgt_settings WHERE name = 'release'
$$;

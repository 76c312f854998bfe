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
        ('enabled', 'on', 'boolean', 'on or off'),
        ('placement', 'auto', '^(auto|spark)$', 'auto or spark'),
        ('max_buffer_rows', '1000000', '^[1-9][0-9]{4,11}$', 'a number of rows, at least 10000'),
        ('lock_timeout', '600', '^[1-9][0-9]{0,5}$', 'seconds, from 1 to 999999'),
        ('lock_timeout_ms', '5000', '^[1-9][0-9]{0,6}$', 'milliseconds, from 1 to 9999999'),
        ('scheduler_interval_ms', '1000', '^[1-9][0-9]{1,5}$', 'milliseconds, from 10 to 999999'),
        ('event_driven_wake', 'on', 'boolean', 'on or off'),
        ('default_schedule_seconds', '1', '^[1-9][0-9]{0,5}$', 'seconds, from 1 to 999999'),
        ('tiered_scheduling', 'on', 'boolean', 'on or off'),
        ('parallel_refresh_mode', 'on', 'boolean', 'on or off'),
        ('max_dynamic_refresh_workers', '4', '^([1-9]|[1-5][0-9]|6[0-4])$', 'a number of workers, from 1 to 64'),
        ('max_concurrent_refreshes', '4', '^([1-9]|[1-5][0-9]|6[0-4])$', 'a number of workers, from 1 to 64'),
        ('per_database_worker_quota', '0', '^([0-9]|[1-5][0-9]|6[0-4])$',
         'a number of workers, up to 64; 0 for no quota'),
        ('max_databases', '0', '^[0-9]{1,5}$', 'a number of databases; 0 for no limit'),
        ('merge_work_mem_mb', '64', '^[1-9][0-9]{0,5}$', 'megabytes, from 1 to 999999'),
        ('delta_work_mem_cap_mb', '0', '^[0-9]{1,6}$', 'megabytes; 0 for no cap'),
        ('max_consecutive_errors', '3', '^[1-9][0-9]{0,3}$', 'a number of errors, from 1 to 9999'),
        ('auto_backoff', 'on', 'boolean', 'on or off'),
        ('fuse_default_ceiling', '0', '^[0-9]{1,15}$', 'a number of changes; 0 for no fuse'),
        ('buffer_alert_threshold', '1000000', '^[1-9][0-9]{0,11}$', 'a number of rows, at least 1'),
        ('history_retention_days', '90', '^[1-9][0-9]{0,4}$', 'days, from 1 to 99999'),
        ('verify_interval', '1d', '^(0|[1-9][0-9]{0,3}[smhd])$',
         'a number followed by s, m, h or d, such as 12h; 0 for never'),
        ('verify_budget_percent', '1', '^([1-9]|[1-9][0-9]|100)$', 'percent, from 1 to 100'),
        ('drain_timeout', '60', '^[1-9][0-9]{0,4}$', 'seconds, from 1 to 99999'),
        ('enable_refresh_broker', 'off', 'boolean', 'on or off'),
        ('foreign_table_polling', 'off', 'boolean', 'on or off'),
        ('citus_read', 'direct', '^(direct|coordinator)$', 'direct or coordinator'),
        ('connection_pooler_mode', 'off', '^(off|session|transaction)$', 'off, session or transaction')
$$;

-- A value in its normal form, or NULL if the setting does not allow it.
CREATE OR REPLACE FUNCTION pgtrickle._normal_value(value text, pattern text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT CASE WHEN pattern <> 'boolean' THEN CASE WHEN lower(value) ~ pattern THEN lower(value) END
                WHEN lower(value) IN ('on', 'true', 'yes', '1') THEN 'on'
                WHEN lower(value) IN ('off', 'false', 'no', '0') THEN 'off' END
$$;

-- Sources of a setting's values; the first allowed value counts. ALTER ROLE and ALTER DATABASE … SET are read from the
-- catalog, because an open session has old values.
CREATE OR REPLACE FUNCTION pgtrickle._setting_sources(wanted text DEFAULT NULL)
RETURNS TABLE (name text, rank integer, origin text, raw text, value text, meaning text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT known.name, found.rank, found.origin, found.raw, pgtrickle._normal_value(found.raw, known.pattern),
           known.meaning
    FROM pgtrickle._known_settings() AS known
    CROSS JOIN LATERAL (
        SELECT CASE WHEN s.setrole <> 0 AND s.setdatabase <> 0 THEN 1 WHEN s.setrole <> 0 THEN 2
                    WHEN s.setdatabase <> 0 THEN 3 ELSE 4 END,
               CASE WHEN s.setrole <> 0 THEN 'role' ELSE 'database' END, substr(entry, strpos(entry, '=') + 1)
        FROM pg_db_role_setting AS s CROSS JOIN unnest(s.setconfig) AS entry
        WHERE s.setdatabase IN (0, (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database()))
          AND (s.setrole = 0 OR s.setrole = (SELECT r.oid FROM pg_roles AS r JOIN pgtrickle.pgt_settings AS p
                                             ON p.name = 'service_role' AND p.value = r.rolname))
          AND lower(split_part(entry, '=', 1)) = 'pg_trickle.' || known.name
        UNION ALL
        -- A line removed from postgresql.conf leaves an empty value in sessions that had read it. Every role can set
        -- such a name in its own session, and the origin of a value is not recorded: so it counts only in sessions of
        -- administrators.
        SELECT 5, 'server', CASE WHEN has_function_privilege(session_user, 'pgtrickle._administer()', 'EXECUTE')
                                 THEN nullif(current_setting('pg_trickle.' || known.name, true), '') END
        UNION ALL
        SELECT 6, 'pgtrickle.set', p.value FROM pgtrickle.pgt_settings AS p WHERE p.name = known.name
        UNION ALL
        SELECT 7, 'default', known.default_value
    ) AS found (rank, origin, raw)
    WHERE (wanted IS NULL OR known.name = wanted) AND found.raw IS NOT NULL
$$;

-- Values that are not allowed are ignored, because this also runs inside a writer's statement.
CREATE OR REPLACE FUNCTION pgtrickle._setting(name text) RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT s.value FROM pgtrickle._setting_sources($1) AS s WHERE s.value IS NOT NULL ORDER BY s.rank LIMIT 1
$$;

CREATE OR REPLACE FUNCTION pgtrickle._service_role() RETURNS name
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT value::name FROM pgtrickle.pgt_settings WHERE name = 'service_role'
$$;

-- Notifies services that there is something to do. Behind a pooler in transaction mode nobody receives it: services
-- find out at their next tick.
CREATE OR REPLACE FUNCTION pgtrickle._notify_services(reason text) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pg_notify('pgtrickle_wake', reason) WHERE pgtrickle._setting('connection_pooler_mode') <> 'transaction'
$$;

-- Notifies listeners that stream tables, or what they read, have changed.
CREATE OR REPLACE FUNCTION pgtrickle._signal_dag_rebuild() RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pg_notify('pg_trickle_dag_rebuild', '') WHERE pgtrickle._setting('connection_pooler_mode') <> 'transaction'
$$;

CREATE OR REPLACE FUNCTION pgtrickle._set(name text, value text, changed_by name) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    short text := regexp_replace(lower(name), '^pg_trickle\.', '');
    known record;
BEGIN
    SELECT * INTO known FROM pgtrickle._known_settings() AS k WHERE k.name = short;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no setting %', quote_literal(_set.name)
            USING ERRCODE = 'undefined_object',
                  HINT = 'Known settings: '
                         || (SELECT string_agg(k.name, ', ' ORDER BY k.name) FROM pgtrickle._known_settings() AS k)
                             || '.';
    END IF;
    IF value IS NULL THEN
        DELETE FROM pgtrickle.pgt_settings AS p WHERE p.name = short;
    ELSIF pgtrickle._normal_value(value, known.pattern) IS NULL THEN
        RAISE EXCEPTION 'setting % cannot be %', short, quote_literal(value)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'It takes ' || known.meaning || '.';
    ELSE
        INSERT INTO pgtrickle.pgt_settings AS p (name, value, set_by)
        VALUES (short, pgtrickle._normal_value(value, known.pattern), changed_by)
        ON CONFLICT ON CONSTRAINT pgt_settings_pkey
        DO UPDATE SET value = excluded.value, set_at = now(), set_by = excluded.set_by;
    END IF;
    IF short = 'max_buffer_rows' THEN
        PERFORM pgtrickle._update_buffer_limits();
    ELSIF short = 'default_schedule_seconds' THEN
        PERFORM pgtrickle._update_intervals();
    END IF;
    PERFORM pgtrickle._notify_services('setting ' || short);
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.set(name text, value text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pgtrickle._require_administrator(format('change the setting %s', name));
    PERFORM pgtrickle._set(name, value, current_user);
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.version() RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT value FROM pgtrickle.pgt_settings WHERE name = 'release'
$$;

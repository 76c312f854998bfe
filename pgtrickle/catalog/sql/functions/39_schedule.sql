-- Schedules: durations ('500ms', '1h30m'), cron expressions, and 'calculated', which is as often as dependents need it.

-- NULL where the schedule is no duration.
CREATE OR REPLACE FUNCTION pgtrickle._duration(schedule text) RETURNS interval
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN schedule ~ '^([0-9]+(ms|s|m|h|d|w))+$' THEN (
        SELECT make_interval(secs => sum(part[1]::numeric * CASE part[2] WHEN 'ms' THEN 0.001 WHEN 's' THEN 1 WHEN 'm' THEN 60
                                         WHEN 'h' THEN 3600 WHEN 'd' THEN 86400 ELSE 604800 END)::double precision)
        FROM regexp_matches(schedule, '([0-9]+)(ms|s|m|h|d|w)', 'g') AS part) END
$$;

-- Which stream tables come first: set by hand, or by how lately their sources changed.
CREATE OR REPLACE FUNCTION pgtrickle._tier(by_hand text, last_change_at timestamptz) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
AS $$
    SELECT coalesce(by_hand, CASE WHEN last_change_at > pg_catalog.now() - interval '1 minute' THEN 'hot'
                                  WHEN last_change_at > pg_catalog.now() - interval '10 minutes' THEN 'warm' ELSE 'cold' END)
$$;

-- How often each stream table is due. Those that are calculated are as fresh as the ones that read them, and without
-- such as fresh as the setting says. Called when any schedule or dependency changed.
CREATE OR REPLACE FUNCTION pgtrickle._settle_schedules() RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    WITH RECURSIVE needed (pgt_id, every) AS (
        SELECT s.pgt_id, pgtrickle._duration(s.schedule) FROM pgtrickle.pgt_stream_tables AS s
        WHERE s.schedule <> 'calculated' AND pgtrickle._duration(s.schedule) IS NOT NULL
        UNION
        SELECT u.pgt_id, n.every FROM needed AS n
        JOIN pgtrickle.pgt_dependencies AS d ON d.pgt_id = n.pgt_id
        JOIN pgtrickle.pgt_stream_tables AS u ON u.pgt_relid = coalesce(d.through, d.source_relid)
        WHERE u.schedule = 'calculated'
    ), settled AS (
        -- The setting is read once: looking for one in all its places takes as long as a hundred stream tables here.
        SELECT s.pgt_id, coalesce(min(n.every), CASE WHEN s.schedule = 'calculated' THEN (
                   SELECT make_interval(secs => pgtrickle._setting('default_schedule_seconds')::integer)) END) AS every
        FROM pgtrickle.pgt_stream_tables AS s LEFT JOIN needed AS n USING (pgt_id)
        GROUP BY s.pgt_id
    )
    UPDATE pgtrickle.pgt_stream_tables AS s SET every = n.every
    FROM settled AS n WHERE n.pgt_id = s.pgt_id AND s.every IS DISTINCT FROM n.every
$$;
REVOKE ALL ON FUNCTION pgtrickle._settle_schedules() FROM PUBLIC;

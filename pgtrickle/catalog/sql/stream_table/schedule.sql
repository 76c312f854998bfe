-- Schedules: durations ('500ms', '1h30m'), cron expressions, and 'calculated', which is as often as readers need it.

-- NULL if the schedule is not a duration, or is zero or more than ten years.
CREATE OR REPLACE FUNCTION pgtrickle._parse_duration(schedule text) RETURNS interval
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN length(schedule) <= 500 AND schedule ~ '^([0-9]{1,9}(ms|s|m|h|d|w))+$' THEN (
        SELECT make_interval(secs => sum(seconds)::double precision)
        FROM regexp_matches(schedule, '([0-9]+)(ms|s|m|h|d|w)', 'g') AS part
        CROSS JOIN LATERAL (SELECT part[1]::numeric *
                            CASE part[2] WHEN 'ms' THEN 0.001 WHEN 's' THEN 1 WHEN 'm' THEN 60
                                                      WHEN 'h' THEN 3600 WHEN 'd' THEN 86400
                                                      ELSE 604800 END) AS each (seconds)
        HAVING sum(seconds) > 0 AND sum(seconds) <= 3650 * 86400) END
$$;

-- The priority of a stream table: set by a user, or derived from the time of the last change of its sources.
CREATE OR REPLACE FUNCTION pgtrickle._tier(by_hand text, last_change_at timestamptz) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
AS $$
    SELECT coalesce(by_hand, CASE WHEN last_change_at > pg_catalog.now() - interval '1 minute' THEN 'hot'
                                  WHEN last_change_at > pg_catalog.now() - interval '10 minutes' THEN 'warm'
                                  ELSE 'cold' END)
$$;

-- Computes the intervals of stream tables. Calculated ones are as fresh as their readers, and without readers as fresh
-- as the setting says. Creating or altering a stream table updates only that one and leaves the rows of others
-- unlocked: the service updates those when it sees the change. Locked rows are skipped; the result says whether there
-- were any.
CREATE OR REPLACE FUNCTION pgtrickle._update_intervals(only_id bigint DEFAULT NULL) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    WITH RECURSIVE needed (pgt_id, every) AS (
        SELECT s.pgt_id, pgtrickle._parse_duration(s.schedule) FROM pgtrickle.pgt_stream_tables AS s
        WHERE s.schedule <> 'calculated' AND pgtrickle._parse_duration(s.schedule) IS NOT NULL
        UNION
        SELECT u.pgt_id, n.every FROM needed AS n
        JOIN pgtrickle.pgt_dependencies AS d ON d.pgt_id = n.pgt_id
        JOIN pgtrickle.pgt_stream_tables AS u ON u.pgt_relid = coalesce(d.through, d.source_relid)
        WHERE u.schedule = 'calculated'
    ), settled AS (
        -- The setting is read once: searching all its origins takes as long as a hundred stream tables here.
        SELECT s.pgt_id, coalesce(min(n.every), CASE WHEN s.schedule = 'calculated' THEN (
                   SELECT make_interval(secs => pgtrickle._setting('default_schedule_seconds')::integer)) END) AS every
        FROM pgtrickle.pgt_stream_tables AS s LEFT JOIN needed AS n USING (pgt_id)
        GROUP BY s.pgt_id
    ), changed AS (
        SELECT s.pgt_id, n.every FROM pgtrickle.pgt_stream_tables AS s JOIN settled AS n ON n.pgt_id = s.pgt_id
        WHERE s.every IS DISTINCT FROM n.every AND (only_id IS NULL OR s.pgt_id = only_id)
    ), unlocked AS (
        SELECT s.pgt_id FROM pgtrickle.pgt_stream_tables AS s WHERE s.pgt_id IN (SELECT c.pgt_id FROM changed AS c)
        FOR NO KEY UPDATE SKIP LOCKED
    ), written AS (
        UPDATE pgtrickle.pgt_stream_tables AS s SET every = c.every
        FROM changed AS c WHERE c.pgt_id = s.pgt_id AND c.pgt_id IN (SELECT u.pgt_id FROM unlocked AS u)
    )
    SELECT EXISTS (SELECT FROM changed AS c WHERE c.pgt_id NOT IN (SELECT u.pgt_id FROM unlocked AS u))
$$;

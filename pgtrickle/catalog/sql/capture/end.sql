-- The end of capture: for sources that nobody reads any more, or for all at once.

CREATE OR REPLACE FUNCTION pgtrickle._inert_body() RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT 'BEGIN RETURN NULL; END'
$$;

-- Locks the source's row until the end of the transaction, so that the answer stays true: whoever begins to use a
-- source waits for that row. If the row is already locked, the source counts as used.
CREATE OR REPLACE FUNCTION pgtrickle._is_unused(stable_name text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    source oid;
BEGIN
    SELECT source_relid INTO source FROM pgtrickle.pgt_change_tracking AS t
    WHERE t.source_stable_name = stable_name FOR UPDATE SKIP LOCKED;
    RETURN FOUND AND NOT EXISTS (SELECT FROM pgtrickle.pgt_dependencies AS d WHERE d.source_relid = source)
        AND NOT EXISTS (SELECT FROM pgtrickle.pgt_dependencies AS d WHERE d.through = source)
        AND NOT EXISTS (SELECT FROM pgtrickle.pgt_consumers AS c WHERE c.source_relid = source);
END
$$;

-- Ends the capture of one source. If its table cannot be locked at once, the function is replaced with one that does
-- nothing, which needs no lock; false is returned, and the next call tries the rest again. The caller sets
-- lock_timeout: at most 500 ms for all sources together, which is shorter than deadlock_timeout, because another
-- session may hold a table and wait for a lock of the caller.
CREATE OR REPLACE FUNCTION pgtrickle._end_capture(stable_name text, only_unused boolean) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
BEGIN
    BEGIN
        IF NOT only_unused THEN
            PERFORM pgtrickle._drop_capture_function(stable_name);
        ELSIF pgtrickle._is_unused(stable_name) THEN
            PERFORM pgtrickle._forget_source(stable_name);
        END IF;
        RETURN true;
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        IF NOT only_unused OR pgtrickle._is_unused(stable_name) THEN
            PERFORM pgtrickle._write_capture_function(stable_name, pgtrickle._inert_body());
        END IF;
        RETURN false;
    END;
END
$$;

-- Ends the capture of sources without a stream table; returns those whose triggers still exist. It locks them until
-- the end of the transaction, so the caller must be their owner or an administrator; the service does it for others.
CREATE OR REPLACE FUNCTION pgtrickle._untrack_unused() RETURNS SETOF regclass
LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT left_over::oid::regclass
    FROM jsonb_array_elements_text(pgtrickle._gate('untrack_unused', '{}')) AS left_over
$$;

CREATE OR REPLACE FUNCTION pgtrickle._untrack(caller name) RETURNS SETOF regclass
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    former text := current_setting('lock_timeout');
    tracking record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RETURN; -- an old snapshot does not see who has begun to use a source
    END IF;
    PERFORM set_config('lock_timeout', '500ms', true);
    FOR tracking IN
        SELECT t.source_relid, t.source_stable_name FROM pgtrickle.pgt_change_tracking AS t
        WHERE NOT EXISTS (SELECT FROM pgtrickle.pgt_dependencies AS d WHERE d.source_relid = t.source_relid)
          AND NOT EXISTS (SELECT FROM pgtrickle.pgt_dependencies AS d WHERE d.through = t.source_relid)
          AND NOT EXISTS (SELECT FROM pgtrickle.pgt_consumers AS c WHERE c.source_relid = t.source_relid)
          AND (has_function_privilege(caller, 'pgtrickle._administer()', 'EXECUTE')
               OR coalesce((SELECT pgtrickle._acts_for(caller, r.relowner) FROM pg_class AS r
                            WHERE r.oid = t.source_relid), true))
    LOOP
        IF NOT pgtrickle._end_capture(tracking.source_stable_name, true) THEN
            PERFORM set_config('lock_timeout', '1ms', true);
            RETURN NEXT tracking.source_relid;
        END IF;
    END LOOP;
    PERFORM set_config('lock_timeout', former, true);
END
$$;

-- Ends all capture now. Stream tables keep their contents and are suspended until resume_capture(). Returns the
-- sources whose triggers could not be dropped because the table is locked; those triggers do nothing any more.
CREATE OR REPLACE FUNCTION pgtrickle._stop_capture() RETURNS SETOF regclass
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    former text := current_setting('lock_timeout');
    tracking record;
BEGIN
    -- Locks all rows at once and holds nothing while waiting: the applies of a group lock rows in another order.
    LOCK TABLE pgtrickle.pgt_stream_tables IN SHARE ROW EXCLUSIVE MODE;
    UPDATE pgtrickle.pgt_stream_tables
    SET status = 'SUSPENDED',
        status_reason = CASE WHEN status = 'SUSPENDED' THEN status_reason ELSE 'emergency stop' END,
        reinit_reason = 'emergency stop', updated_at = now();
    PERFORM set_config('lock_timeout', '500ms', true);
    FOR tracking IN SELECT source_relid, source_stable_name FROM pgtrickle.pgt_change_tracking LOOP
        IF NOT pgtrickle._end_capture(tracking.source_stable_name, false) THEN
            PERFORM set_config('lock_timeout', '1ms', true);
            RETURN NEXT tracking.source_relid;
        END IF;
    END LOOP;
    PERFORM set_config('lock_timeout', former, true);
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.emergency_stop() RETURNS SETOF regclass
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pgtrickle._require_administrator('stop the capture of changes');
    RETURN QUERY SELECT pgtrickle._stop_capture();
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._resume_stopped() RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    -- Only those whose sources all have their capture function again.
    UPDATE pgtrickle.pgt_stream_tables AS s
    SET status = CASE WHEN s.frontier IS NULL THEN 'INITIALIZING' ELSE 'ACTIVE' END,
        status_reason = NULL, reinit_reason = 'emergency stop', updated_at = now()
    WHERE s.status = 'SUSPENDED' AND s.status_reason = 'emergency stop'
      AND NOT EXISTS (
          SELECT FROM pgtrickle.pgt_dependencies AS d
          JOIN pgtrickle.pgt_change_tracking AS t ON t.source_relid = d.source_relid
          LEFT JOIN pg_proc AS p
              ON p.oid = to_regprocedure(format('pgtrickle_changes.capture_%s()', t.source_stable_name))
          LEFT JOIN pg_trigger AS g ON g.tgrelid = t.source_relid AND g.tgfoid = p.oid
          WHERE d.pgt_id = s.pgt_id AND (g.oid IS NULL OR p.prosrc = pgtrickle._inert_body()))
$$;

-- After an emergency stop. Triggers are created with the caller's rights: returns what remains to be run, each
-- statement by a role with the TRIGGER privilege on the source.
CREATE OR REPLACE FUNCTION pgtrickle.resume_capture() RETURNS SETOF text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tracking record;
BEGIN
    FOR tracking IN
        SELECT t.source_relid, t.tracked_columns FROM pgtrickle.pgt_change_tracking AS t
        JOIN pg_class AS c ON c.oid = t.source_relid
    LOOP
        BEGIN
            PERFORM pgtrickle._attach(tracking.source_relid, tracking.tracked_columns);
        EXCEPTION WHEN insufficient_privilege OR lock_not_available THEN
            RETURN NEXT format('SELECT pgtrickle.resume_capture(); -- as a role that may create triggers on %s: %s',
                               tracking.source_relid, SQLERRM);
        END;
    END LOOP;
    PERFORM pgtrickle._resume_stopped();
END
$$;

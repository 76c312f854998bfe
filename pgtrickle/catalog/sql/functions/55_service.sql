-- The running service seen from SQL: what it tells, and how it is told to pause, to resume, to hurry.

CREATE OR REPLACE FUNCTION pgtrickle._emit(event text, about bigint, details jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    told jsonb := jsonb_build_object('event', event, 'at', clock_timestamp())
        || coalesce((SELECT jsonb_build_object('pgt_id', s.pgt_id, 'stream_table', format('%I.%I', s.pgt_schema, s.pgt_name))
                     FROM pgtrickle.pgt_stream_tables AS s WHERE s.pgt_id = about), '{}')
        || coalesce(details, '{}');
BEGIN
    PERFORM pgtrickle._require_administrator('send events');
    INSERT INTO pgtrickle.pgt_events (event, pgt_id, payload) VALUES (_emit.event, about, told);
    -- A pooler in transaction mode gives the listener's connection to somebody else. A payload has 8,000 bytes at most.
    IF pgtrickle._setting('connection_pooler_mode') <> 'transaction'
       AND NOT EXISTS (SELECT FROM pgtrickle.pgt_stream_tables AS s WHERE s.pgt_id = about AND s.pooler_compatibility_mode) THEN
        PERFORM pg_notify('pgtrickle_alert', CASE WHEN octet_length(told::text) < 7900 THEN told
                                                  ELSE told - 'reason' - 'error' END::text);
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.events(since timestamptz DEFAULT now() - interval '1 hour')
RETURNS TABLE (at timestamptz, channel text, event text, pgt_id bigint, payload jsonb)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT e.at, 'pgtrickle_alert', e.event, e.pgt_id, e.payload FROM pgtrickle.pgt_events AS e WHERE e.at >= since
    UNION ALL
    SELECT h.end_time, 'pg_trickle_refresh', CASE h.status WHEN 'COMPLETED' THEN 'refresh_completed' ELSE 'refresh_failed' END,
           h.pgt_id, pgtrickle._refresh_payload(h)
    FROM pgtrickle.pgt_refresh_history AS h WHERE h.start_time >= since AND h.end_time IS NOT NULL
    ORDER BY 1
$$;

-- Why a service could not look after this database when it last tried; nothing if one has since.
CREATE OR REPLACE FUNCTION pgtrickle._not_served() RETURNS TABLE (reason text, lately boolean)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT e.payload ->> 'reason', e.at > now() - interval '10 minutes'
    FROM pgtrickle.pgt_events AS e
    -- One that crashes again and again is seen in between.
    WHERE e.event = 'not_served'
      AND e.at > coalesce((SELECT max(h.last_seen) FROM pgtrickle.pgt_services AS h WHERE h.kind = 'service'), '-infinity')
                 - interval '1 minute'
    ORDER BY e.at DESC LIMIT 1
$$;

CREATE OR REPLACE FUNCTION pgtrickle._refresh_payload(h pgtrickle.pgt_refresh_history) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_strip_nulls(jsonb_build_object(
        'event', CASE h.status WHEN 'COMPLETED' THEN 'refresh_completed' ELSE 'refresh_failed' END, 'at', h.end_time,
        'pgt_id', h.pgt_id, 'stream_table', format('%I.%I', h.pgt_schema, h.pgt_name), 'refresh_id', h.refresh_id,
        'action', h.action, 'initiated_by', h.initiated_by, 'rows_inserted', h.rows_inserted, 'rows_deleted', h.rows_deleted,
        'seconds', round(extract(epoch FROM h.end_time - h.start_time), 6), 'error', left(h.error, 500)))
$$;

-- Nothing new is started in this database until resume(); what runs is finished, and changes go on being captured.
CREATE OR REPLACE FUNCTION pgtrickle.pause() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pgtrickle._require_administrator('pause refreshes');
    INSERT INTO pgtrickle.pgt_settings (name, value, set_by) VALUES ('paused', 'on', pgtrickle._caller())
    ON CONFLICT ON CONSTRAINT pgt_settings_pkey DO NOTHING;
    PERFORM pgtrickle._wake('paused');
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.resume() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pgtrickle._require_administrator('resume refreshes');
    DELETE FROM pgtrickle.pgt_settings WHERE name = 'paused';
    PERFORM pgtrickle._wake('resumed');
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.is_paused() RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM pgtrickle.pgt_settings WHERE name = 'paused')
$$;

CREATE OR REPLACE FUNCTION pgtrickle.is_drained() RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pgtrickle.is_paused() AND NOT EXISTS (
        SELECT FROM pgtrickle.pgt_stream_tables AS s JOIN pgtrickle.pgt_services AS h ON h.service_id = s.claimed_by
        WHERE h.lease_expires > clock_timestamp())
$$;

-- Pauses and returns when nothing runs any more. No SET here: a procedure that commits cannot have it.
CREATE OR REPLACE PROCEDURE pgtrickle.drain(timeout interval DEFAULT NULL)
LANGUAGE plpgsql
AS $$
DECLARE
    deadline timestamptz := pg_catalog.clock_timestamp()
        + coalesce(timeout, pg_catalog.make_interval(secs => pgtrickle._setting('drain_timeout')::integer));
BEGIN
    PERFORM pgtrickle.pause();
    COMMIT;
    WHILE NOT pgtrickle.is_drained() LOOP
        COMMIT;
        IF pg_catalog.clock_timestamp() >= deadline THEN
            RAISE EXCEPTION 'refreshes are still running'
                USING ERRCODE = 'query_canceled',
                      HINT = 'Nothing new is started. CALL pgtrickle.drain() waits again, pgtrickle.resume() goes on.';
        END IF;
        PERFORM pg_catalog.pg_sleep(0.05);
    END LOOP;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.resume_stream_table(name text) RETURNS void
LANGUAGE sql
AS $$
    SELECT pgtrickle.alter_stream_table(name, status => 'ACTIVE')
$$;

CREATE OR REPLACE FUNCTION pgtrickle._reset_fuse(id bigint, action text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pgtrickle._require_owner((SELECT pgt_relid FROM pgtrickle.pgt_stream_tables WHERE pgt_id = id), 'reset the fuse of');
    IF action = 'skip_changes' THEN
        RAISE EXCEPTION 'changes cannot be skipped: the stream table would no longer be what its query says'
            USING ERRCODE = 'feature_not_supported', HINT = 'Undo the changes in the source and apply, or reinitialize.';
    ELSIF action NOT IN ('apply', 'reinitialize') THEN
        RAISE EXCEPTION 'action cannot be %', quote_literal(action)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'It is apply or reinitialize.';
    END IF;
    UPDATE pgtrickle.pgt_stream_tables
    SET fuse_blown_at = NULL, fuse_passes = true, status = 'ACTIVE', status_reason = NULL, next_due = '-infinity',
        reinit_reason = CASE action WHEN 'reinitialize' THEN 'the fuse was reset by starting over' ELSE reinit_reason END
    WHERE pgt_id = id AND fuse_blown_at IS NOT NULL;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the fuse of stream table % is not blown', (SELECT s.pgt_relid FROM pgtrickle.pgt_stream_tables AS s WHERE s.pgt_id = id)
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'SELECT * FROM pgtrickle.fuse_status() lists all fuses.';
    END IF;
    PERFORM pgtrickle._wake(format('altered %s', id));
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.reset_fuse(name text, action text DEFAULT 'apply') RETURNS void
LANGUAGE sql
AS $$
    SELECT pgtrickle._reset_fuse(pgtrickle._get(name), action)
$$;

CREATE OR REPLACE FUNCTION pgtrickle.fuse_status()
RETURNS TABLE (pgt_schema text, pgt_name text, fuse_ceiling bigint, blown_at timestamptz, reason text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT s.pgt_schema, s.pgt_name, coalesce(s.fuse_ceiling, pgtrickle._setting('fuse_default_ceiling')::bigint), s.fuse_blown_at,
           CASE WHEN s.fuse_blown_at IS NOT NULL THEN s.status_reason END
    FROM pgtrickle.pgt_stream_tables AS s ORDER BY 1, 2
$$;

-- Whether a stream table has not seen a change that was committed before this statement.
CREATE OR REPLACE FUNCTION pgtrickle._pending(id bigint) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT s.frontier IS NULL OR s.reinit_reason IS NOT NULL OR s.polled OR EXISTS (
        SELECT FROM pgtrickle.pgt_dependencies AS d
        JOIN pgtrickle_changes.pgt_activity AS a USING (source_stable_name)
        WHERE d.pgt_id = id AND NOT pg_visible_in_snapshot(a.xid::text::xid8, (s.frontier ->> 'snapshot')::pg_snapshot)
          AND a.xid IS DISTINCT FROM (s.frontier ->> 'passed')::bigint)
    FROM pgtrickle.pgt_stream_tables AS s WHERE s.pgt_id = id
$$;
REVOKE ALL ON FUNCTION pgtrickle._pending(bigint) FROM PUBLIC;

-- A stream table and those behind it, sources first.
CREATE OR REPLACE FUNCTION pgtrickle._upstream(id bigint) RETURNS TABLE (pgt_id bigint, depth integer)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    WITH RECURSIVE up (pgt_id, depth) AS (
        SELECT id, 0
        UNION
        SELECT u.pgt_id, up.depth + 1 FROM up
        JOIN pgtrickle.pgt_dependencies AS d ON d.pgt_id = up.pgt_id
        JOIN pgtrickle.pgt_stream_tables AS u ON u.pgt_relid = coalesce(d.through, d.source_relid)
    )
    SELECT up.pgt_id, max(up.depth) FROM up GROUP BY 1 ORDER BY 2 DESC, 1
$$;

-- Asks for a refresh of a stream table behind one that the caller may read, if it has not seen everything; else NULL.
CREATE OR REPLACE FUNCTION pgtrickle._ask_for_changes(reader bigint, id bigint) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    request bigint;
BEGIN
    IF NOT has_table_privilege(pgtrickle._caller(), (SELECT s.pgt_relid FROM pgtrickle.pgt_stream_tables AS s WHERE s.pgt_id = reader), 'SELECT')
       OR id NOT IN (SELECT u.pgt_id FROM pgtrickle._upstream(reader) AS u) THEN
        RAISE EXCEPTION 'role % may not read stream table %', quote_ident(pgtrickle._caller()),
                (SELECT s.pgt_relid FROM pgtrickle.pgt_stream_tables AS s WHERE s.pgt_id = reader)
            USING ERRCODE = 'insufficient_privilege', HINT = 'Whoever may SELECT from it may wait for it: ask its owner for GRANT SELECT.';
    END IF;
    IF NOT pgtrickle._pending(id) THEN
        RETURN NULL;
    END IF;
    INSERT INTO pgtrickle.pgt_requests (pgt_id, requested_by) VALUES (id, pgtrickle._caller()) RETURNING request_id INTO request;
    PERFORM pgtrickle._wake(format('request %s', request));
    RETURN request;
END
$$;

-- Returns when the stream table includes everything that was committed before the call: read your own writes.
CREATE OR REPLACE PROCEDURE pgtrickle.wait_until_fresh(name text, timeout interval DEFAULT '1 minute')
LANGUAGE plpgsql
AS $$
DECLARE
    reader bigint := pgtrickle._get(name);
    behind bigint[] := ARRAY(SELECT u.pgt_id FROM pgtrickle._upstream(reader) AS u);
    deadline timestamptz := pg_catalog.clock_timestamp() + timeout;
    id bigint;
    request bigint;
BEGIN
    FOREACH id IN ARRAY behind LOOP
        COMMIT;
        request := pgtrickle._ask_for_changes(reader, id);
        IF request IS NOT NULL THEN
            PERFORM pgtrickle._warn_without_service();
            COMMIT;
            CALL pgtrickle._await(name, request, deadline, timeout);
        END IF;
    END LOOP;
END
$$;

-- The running service as seen from SQL: its events, and how to pause and resume it.

CREATE OR REPLACE FUNCTION pgtrickle._emit_event(event text, about bigint, details jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    told jsonb := jsonb_build_object('event', event, 'at', clock_timestamp())
        ||
            coalesce((SELECT jsonb_build_object('pgt_id', s.pgt_id,
                                                'stream_table', format('%I.%I', s.pgt_schema, s.pgt_name))
                     FROM pgtrickle.pgt_stream_tables AS s WHERE s.pgt_id = about), '{}')
        || coalesce(details, '{}');
BEGIN
    INSERT INTO pgtrickle.pgt_events (event, pgt_id, payload) VALUES (_emit_event.event, about, told);
    -- A pooler in transaction mode hands the listener's connection to another client. A payload has at most 8,000
    -- bytes.
    IF pgtrickle._setting('connection_pooler_mode') <> 'transaction'
       AND NOT EXISTS (SELECT FROM pgtrickle.pgt_stream_tables AS s
                       WHERE s.pgt_id = about AND s.pooler_compatibility_mode) THEN
        -- Everybody can listen, so messages, which may quote data, are not sent. events() shows them to those who may
        -- see them.
        PERFORM pg_notify('pgtrickle_alert', left((told - 'reason' - 'error')::text, 7900));
    END IF;
END
$$;

CREATE OR REPLACE VIEW pgtrickle.pgt_visible_events WITH (security_barrier) AS
SELECT e.at, e.event, e.pgt_id,
       CASE WHEN pgtrickle._may_see(s.pgt_relid) THEN e.payload ELSE e.payload - 'reason' - 'error' END AS payload
FROM pgtrickle.pgt_events AS e LEFT JOIN pgtrickle.pgt_stream_tables AS s USING (pgt_id);

CREATE OR REPLACE FUNCTION pgtrickle.events(since timestamptz DEFAULT now() - interval '1 hour')
RETURNS TABLE (at timestamptz, channel text, event text, pgt_id bigint, payload jsonb)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT e.at, 'pgtrickle_alert', e.event, e.pgt_id, e.payload FROM pgtrickle.pgt_visible_events AS e
    WHERE e.at >= since
    UNION ALL
    -- Failures are sent on the other channel, once for all of the same kind; the history has each of them.
    SELECT h.end_time, 'pg_trickle_refresh', 'refresh_completed', h.pgt_id, pgtrickle._refresh_payload(h)
    FROM pgtrickle.pgt_visible_history AS h WHERE h.start_time >= since AND h.status = 'COMPLETED'
    ORDER BY 1
$$;

-- Why a service could not serve this database when it last tried; no row if one has since.
CREATE OR REPLACE FUNCTION pgtrickle._not_served() RETURNS TABLE (reason text, lately boolean)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT e.payload ->> 'reason', e.at > now() - interval '10 minutes'
    FROM pgtrickle.pgt_events AS e
    -- A service that keeps crashing is seen in between.
    WHERE e.event = 'not_served'
      AND e.at > coalesce((SELECT max(h.last_seen) FROM pgtrickle.pgt_services AS h WHERE h.kind = 'service'),
                          '-infinity')
                 - interval '1 minute'
    ORDER BY e.at DESC LIMIT 1
$$;

-- The payload sent after a successful refresh.
CREATE OR REPLACE FUNCTION pgtrickle._refresh_payload(h pgtrickle.pgt_visible_history) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_strip_nulls(jsonb_build_object(
        'event', 'refresh_completed', 'at', h.end_time,
        'pgt_id', h.pgt_id, 'stream_table', format('%I.%I', h.pgt_schema, h.pgt_name), 'refresh_id', h.refresh_id,
        'action', h.action, 'initiated_by', h.initiated_by, 'rows_inserted', h.rows_inserted, 'rows_deleted',
        h.rows_deleted,
        'seconds', round(extract(epoch FROM h.end_time - h.start_time), 6)))
$$;

-- Nothing new is started in this database until resume(); running refreshes finish, and changes are still captured.
CREATE OR REPLACE FUNCTION pgtrickle._pause(paused boolean, changed_by name) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF paused THEN
        INSERT INTO pgtrickle.pgt_settings (name, value, set_by) VALUES ('paused', 'on', changed_by)
        ON CONFLICT ON CONSTRAINT pgt_settings_pkey DO NOTHING;
    ELSE
        DELETE FROM pgtrickle.pgt_settings WHERE name = 'paused';
    END IF;
    PERFORM pgtrickle._notify_services(CASE WHEN paused THEN 'paused' ELSE 'resumed' END);
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.pause() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pgtrickle._require_administrator('pause refreshes');
    PERFORM pgtrickle._pause(true, current_user);
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.resume() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pgtrickle._require_administrator('resume refreshes');
    PERFORM pgtrickle._pause(false, current_user);
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

-- Pauses, and returns when nothing is running. No SET here: a procedure that commits cannot have one.
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
                      HINT = 'No new refreshes start. CALL pgtrickle.drain() waits again; '
                             'pgtrickle.resume() resumes them.';
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

CREATE OR REPLACE FUNCTION pgtrickle._reset_fuse(caller name, id bigint, action text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pgtrickle._require_owner(caller, id, 'reset the fuse of');
    IF action = 'skip_changes' THEN
        RAISE EXCEPTION 'changes cannot be skipped: the stream table would no longer match its query'
            USING ERRCODE = 'feature_not_supported',
                  HINT = 'Undo the changes in the source and apply, or reinitialize.';
    ELSIF action NOT IN ('apply', 'reinitialize') THEN
        RAISE EXCEPTION 'action cannot be %', quote_literal(action)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'It is apply or reinitialize.';
    END IF;
    UPDATE pgtrickle.pgt_stream_tables
    SET fuse_blown_at = NULL, fuse_passes = true, alerted = NULL, consecutive_errors = 0, counted_errors = 0,
        status = 'ACTIVE', status_reason = NULL,
        last_error = NULL, next_due = '-infinity',
        reinit_reason = CASE action WHEN 'reinitialize' THEN 'the fuse was reset with re-initialization'
                             ELSE reinit_reason END
    WHERE pgt_id = id AND fuse_blown_at IS NOT NULL;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the fuse of stream table % is not blown', (SELECT s.pgt_relid
                                                                    FROM pgtrickle.pgt_stream_tables AS s
                                                                    WHERE s.pgt_id = id)
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'SELECT * FROM pgtrickle.fuse_status() lists all fuses.';
    END IF;
    PERFORM pgtrickle._notify_services(format('altered %s', id));
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.reset_fuse(name text, action text DEFAULT 'apply') RETURNS void
LANGUAGE sql
AS $$
    SELECT pgtrickle._gate('reset_fuse',
                           pg_catalog.jsonb_build_object('id', pgtrickle._require_id(name), 'action', action))
$$;

CREATE OR REPLACE FUNCTION pgtrickle.fuse_status()
RETURNS TABLE (pgt_schema text, pgt_name text, fuse_ceiling bigint, blown_at timestamptz, reason text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT s.pgt_schema, s.pgt_name, coalesce(s.fuse_ceiling, pgtrickle._setting('fuse_default_ceiling')::bigint),
           s.fuse_blown_at,
           CASE WHEN s.fuse_blown_at IS NOT NULL THEN s.status_reason END
    FROM pgtrickle.pgt_visible_stream_tables AS s ORDER BY 1, 2
$$;

-- Whether a stream table lacks a change that was committed before this statement.
CREATE OR REPLACE FUNCTION pgtrickle._has_pending_changes(id bigint) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT s.frontier IS NULL OR s.reinit_reason IS NOT NULL OR s.polled OR EXISTS (
        SELECT FROM pgtrickle.pgt_dependencies AS d
        JOIN pgtrickle_changes.pgt_activity AS a USING (source_stable_name)
        WHERE d.pgt_id = id AND NOT pg_visible_in_snapshot(a.xid::text::xid8, (s.frontier ->> 'snapshot')::pg_snapshot)
          AND a.xid IS DISTINCT FROM (s.frontier ->> 'passed')::bigint)
    FROM pgtrickle.pgt_stream_tables AS s WHERE s.pgt_id = id
$$;

-- A stream table and those upstream of it, sources first.
CREATE OR REPLACE FUNCTION pgtrickle._upstream_ids(id bigint) RETURNS TABLE (pgt_id bigint, depth integer)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    WITH RECURSIVE up (pgt_id, depth) AS (
        SELECT id, 0
        UNION
        SELECT u.pgt_id, up.depth + 1 FROM up -- the catalog refuses cycles; this ends even if there is one
        JOIN pgtrickle.pgt_dependencies AS d ON d.pgt_id = up.pgt_id
        JOIN pgtrickle.pgt_stream_tables AS u ON u.pgt_relid = coalesce(d.through, d.source_relid)
        WHERE up.depth < 1000
    )
    SELECT up.pgt_id, max(up.depth) FROM up GROUP BY 1 ORDER BY 2 DESC, 1
$$;

-- Requests a refresh of a stream table upstream of one that the caller may read, if it has pending changes; otherwise
-- NULL.
CREATE OR REPLACE FUNCTION pgtrickle._ask_for_changes(caller name, reader bigint, id bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    request bigint;
BEGIN
    IF NOT has_table_privilege(caller, (SELECT s.pgt_relid FROM pgtrickle.pgt_stream_tables AS s
                                        WHERE s.pgt_id = reader), 'SELECT')
       OR id NOT IN (SELECT u.pgt_id FROM pgtrickle._upstream_ids(reader) AS u) THEN
        RAISE EXCEPTION 'role % may not read stream table %', quote_ident(caller),
                (SELECT s.pgt_relid FROM pgtrickle.pgt_stream_tables AS s WHERE s.pgt_id = reader)
            USING ERRCODE = 'insufficient_privilege',
                  HINT = 'Whoever may SELECT from it may wait for it: ask its owner for GRANT SELECT.';
    END IF;
    IF NOT pgtrickle._has_pending_changes(id) THEN
        RETURN NULL;
    END IF;
    IF EXISTS (SELECT FROM pgtrickle.pgt_stream_tables AS s LEFT JOIN pg_class AS c ON c.oid = s.pgt_relid
               WHERE s.pgt_id = id AND s.status = 'SUSPENDED'
                 AND NOT coalesce(pgtrickle._acts_for(caller, c.relowner), false)) THEN
        RAISE EXCEPTION 'stream table % is suspended',
                        (SELECT s.pgt_relid FROM pgtrickle.pgt_stream_tables AS s WHERE s.pgt_id = id)
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Its owner can refresh or resume it.';
    END IF;
    PERFORM pgtrickle._require_room(caller);
    INSERT INTO pgtrickle.pgt_requests (pgt_id, requested_by) VALUES (id, caller) RETURNING request_id INTO request;
    PERFORM pgtrickle._notify_services(format('request %s', request));
    RETURN request;
END
$$;

-- Returns when the stream table includes everything that was committed before the call: read your own writes.
CREATE OR REPLACE PROCEDURE pgtrickle.wait_until_fresh(name text, timeout interval DEFAULT '1 minute')
LANGUAGE plpgsql
AS $$
DECLARE
    reader bigint := pgtrickle._require_id(name);
    behind bigint[] := ARRAY(SELECT u.pgt_id FROM pgtrickle._upstream_ids(reader) AS u);
    deadline timestamptz := pg_catalog.clock_timestamp() + timeout;
    id bigint;
    request bigint;
BEGIN
    FOREACH id IN ARRAY behind LOOP
        COMMIT;
        request := pgtrickle._gate('ask_for_changes',
                                   pg_catalog.jsonb_build_object('reader', reader, 'id', id))::bigint;
        IF request IS NOT NULL THEN
            PERFORM pgtrickle._warn_without_service();
            COMMIT;
            CALL pgtrickle._await(name, request, deadline, timeout);
        END IF;
    END LOOP;
END
$$;

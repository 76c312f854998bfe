-- Requests for refreshes: the service does the work.

-- Limits the waiting requests of a role, and those that are kept for their keys.
CREATE OR REPLACE FUNCTION pgtrickle._require_room(caller name) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    most_waiting CONSTANT integer := 1000;
BEGIN
    IF (SELECT count(*)
        FROM (SELECT FROM pgtrickle.pgt_requests AS r
              WHERE r.requested_by = caller AND r.status IN ('PENDING', 'RUNNING')
                              LIMIT most_waiting) AS waiting) >= most_waiting THEN
        RAISE EXCEPTION 'role % has % waiting requests', quote_ident(caller), most_waiting
            USING ERRCODE = 'program_limit_exceeded',
                  HINT = 'Wait until some are done. Is a service running (`pgtrickle run`)?';
    END IF;
END
$$;

-- A key that the same role has used before means the same request; a failed one is filed again.
CREATE OR REPLACE FUNCTION pgtrickle._file_request(caller name, id bigint, key text, kind text) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    request bigint;
BEGIN
    PERFORM pgtrickle._require_owner(caller, id, lower(kind));
    PERFORM pgtrickle._require_room(caller);
    INSERT INTO pgtrickle.pgt_requests AS r (pgt_id, requested_by, request_key, kind) VALUES (id, caller, key, kind)
    ON CONFLICT (pgt_id, requested_by, request_key) WHERE request_key IS NOT NULL DO UPDATE
    SET status = CASE r.status WHEN 'FAILED' THEN 'PENDING' ELSE r.status END,
        error = CASE r.status WHEN 'FAILED' THEN NULL ELSE r.error END,
        requested_at = CASE r.status WHEN 'FAILED' THEN clock_timestamp() ELSE r.requested_at END,
        finished_at = CASE r.status WHEN 'FAILED' THEN NULL ELSE r.finished_at END
    RETURNING request_id INTO request;
    PERFORM pgtrickle._notify_services(format('request %s', request));
    RETURN request;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._warn_without_service() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pgtrickle.pgt_services
                   WHERE kind = 'service' AND last_seen > clock_timestamp() - interval '1 minute') THEN
        RAISE WARNING 'no pgtrickle service has been seen in the last minute'
            USING HINT = 'Start one with `pgtrickle run`, or serve waiting requests with `pgtrickle run --once`.';
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._request(id bigint, key text DEFAULT NULL, kind text DEFAULT 'REFRESH')
RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    request bigint;
BEGIN
    IF pg_is_in_recovery() THEN
        RAISE EXCEPTION 'a standby cannot refresh stream tables'
            USING ERRCODE = 'read_only_sql_transaction',
                  HINT = 'Send the request to the primary; the result arrives here by replication.';
    END IF;
    request := pgtrickle._gate('request', jsonb_build_object('id', id, 'key', key, 'kind', kind))::bigint;
    PERFORM pgtrickle._warn_without_service();
    RETURN request;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.refresh_stream_table(name text) RETURNS bigint
LANGUAGE sql
AS $$
    SELECT pgtrickle._request(pgtrickle._require_id(name))
$$;

-- For external orchestrators: a second call with the same key (the run of a job, for example) is the same request.
CREATE OR REPLACE FUNCTION pgtrickle.manual_refresh(stream_table_name text, request_key text DEFAULT NULL)
RETURNS bigint
LANGUAGE sql
AS $$
    SELECT pgtrickle._request(pgtrickle._require_id(stream_table_name), request_key)
$$;

-- The requests of the current role. The view reads with the rights of its owner.
CREATE OR REPLACE VIEW pgtrickle.pgt_own_requests WITH (security_barrier) AS
SELECT r.request_id, format('%I.%I', s.pgt_schema, s.pgt_name) AS stream_table, r.status, r.requested_at,
       r.finished_at,
       CASE WHEN pgtrickle._may_see(s.pgt_relid) THEN r.error
            WHEN r.error IS NOT NULL THEN pgtrickle._redacted() END AS error
FROM pgtrickle.pgt_requests AS r JOIN pgtrickle.pgt_stream_tables AS s USING (pgt_id)
WHERE r.requested_by = current_user;

-- The status of one of the caller's requests.
CREATE OR REPLACE FUNCTION pgtrickle.request_status(request bigint)
RETURNS TABLE (stream_table text, status text, error text, requested_at timestamptz, finished_at timestamptz)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT r.stream_table, r.status, r.error, r.requested_at, r.finished_at FROM pgtrickle.pgt_own_requests AS r
    WHERE r.request_id = request
$$;

CREATE OR REPLACE FUNCTION pgtrickle._request_state(request bigint) RETURNS TABLE (status text, error text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT r.status, r.error FROM pgtrickle.pgt_own_requests AS r WHERE r.request_id = request
$$;

-- Returns when a request is done. No SET here: a procedure that commits cannot have one.
CREATE OR REPLACE PROCEDURE pgtrickle._await(name text, request bigint, deadline timestamptz, timeout interval,
                                             what text DEFAULT 'refresh')
LANGUAGE plpgsql
AS $$
DECLARE
    pause double precision := 0.01;
    state record;
BEGIN
    LOOP
        SELECT * INTO state FROM pgtrickle._request_state(request);
        -- Ends the snapshot: waiting must not hold back vacuum.
        COMMIT;
        IF state.status = 'DONE' THEN
            RETURN;
        ELSIF state.status = 'FAILED' THEN
            RAISE EXCEPTION 'the % of % failed: %', what, name, state.error
                USING ERRCODE = 'external_routine_exception',
                      HINT = CASE what
                                  WHEN 'refresh' THEN
                                      pg_catalog.format('SELECT * FROM pgtrickle.get_refresh_history(%L) tells more.',
                                                        name)
                                  ELSE '`pgtrickle verify` shows the rows.' END;
        ELSIF state.status IS NULL THEN
            RAISE EXCEPTION 'stream table % was dropped before its %', name, what USING ERRCODE = 'undefined_table';
        ELSIF pg_catalog.clock_timestamp() >= deadline THEN
            RAISE EXCEPTION 'the % of % did not finish within %', what, name, timeout
                USING ERRCODE = 'query_canceled',
                      HINT = 'The request is still waiting. Is a service running (`pgtrickle run`)?';
        END IF;
        PERFORM pg_catalog.pg_sleep(pause);
        pause := LEAST(pause OPERATOR(pg_catalog.*) 1.5::double precision, 0.2);
    END LOOP;
END
$$;

-- Files a request, commits it, and returns when it is done.
CREATE OR REPLACE PROCEDURE pgtrickle.refresh_and_wait(name text, timeout interval DEFAULT '1 minute',
                                                       request_key text DEFAULT NULL)
LANGUAGE plpgsql
AS $$
DECLARE
    request bigint := pgtrickle.manual_refresh(name, request_key);
BEGIN
    COMMIT;
    CALL pgtrickle._await(name, request, pg_catalog.clock_timestamp() + timeout, timeout);
END
$$;

-- Requests a comparison of the stream table with its query; the result is in pgtrickle.pgt_verifications.
CREATE OR REPLACE FUNCTION pgtrickle.verify(name text) RETURNS bigint
LANGUAGE sql
AS $$
    SELECT pgtrickle._request(pgtrickle._require_id(name), kind => 'VERIFY')
$$;

-- Returns if they are equal; otherwise raises the difference.
CREATE OR REPLACE PROCEDURE pgtrickle.verify_and_wait(name text, timeout interval DEFAULT '10 minutes')
LANGUAGE plpgsql
AS $$
DECLARE
    request bigint := pgtrickle.verify(name);
BEGIN
    COMMIT;
    CALL pgtrickle._await(name, request, pg_catalog.clock_timestamp() + timeout, timeout, 'comparison');
END
$$;

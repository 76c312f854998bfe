-- Who acts. Inside a SECURITY DEFINER function current_user is the function's owner, and the session user may be
-- anybody: the service, while it runs an owner's code. So no definer function asks who called it. PostgreSQL decides,
-- by the privileges of current_user at the moment of the call:
--
-- * Administrators have EXECUTE on functions that others lack.
-- * Everybody else uses the gate, a view: current_user in a view is the role that queries the view. See gate.sql.
--
-- Everything in this file is SECURITY INVOKER, and correct only if its caller is.

-- Does nothing. Roles that may execute it are administrators: the role that installed pgtrickle, the service's role,
-- and the owner of the database.
CREATE OR REPLACE FUNCTION pgtrickle._administer() RETURNS void
LANGUAGE sql
AS $$
    SELECT
$$;

CREATE OR REPLACE FUNCTION pgtrickle._is_administrator() RETURNS boolean
LANGUAGE sql STABLE
AS $$
    SELECT pg_catalog.has_function_privilege(current_user, 'pgtrickle._administer()', 'EXECUTE')
$$;

-- A clear error for roles that lack the privilege; the following statements need it anyway.
CREATE OR REPLACE FUNCTION pgtrickle._require_administrator(action text) RETURNS void
LANGUAGE plpgsql STABLE
AS $$
BEGIN
    IF NOT pgtrickle._is_administrator() THEN
        RAISE EXCEPTION 'role % may not %', pg_catalog.quote_ident(current_user), action
            USING ERRCODE = 'insufficient_privilege',
                  HINT = 'Ask the owner of the database or the role that installed pgtrickle.';
    END IF;
END
$$;

-- Whether a role has the privileges of another, or can SET ROLE to it. Since PostgreSQL 16 a member may be able to do
-- neither.
CREATE OR REPLACE FUNCTION pgtrickle._acts_for(role name, other oid) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN coalesce(pg_has_role(role, other, 'USAGE')
        OR pg_has_role(role, other,
                       CASE WHEN current_setting('server_version_num')::integer >= 160000 THEN 'SET'
                            ELSE 'MEMBER' END), false);
END
$$;

-- The text shown instead of a message that the reader may not see.
CREATE OR REPLACE FUNCTION pgtrickle._redacted() RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT 'shown to the owner of the stream table and to administrators'
$$;

-- Whether the current role may see messages about a stream table, and its query: they quote data. Of a dropped stream
-- table only administrators may see them.
CREATE OR REPLACE FUNCTION pgtrickle._may_see(storage regclass) RETURNS boolean
LANGUAGE sql STABLE
AS $$
    SELECT pgtrickle._is_administrator()
        OR coalesce((SELECT pg_catalog.pg_has_role(current_user, c.relowner, 'USAGE') FROM pg_catalog.pg_class AS c
                     WHERE c.oid OPERATOR(pg_catalog.=) storage::oid), false)
$$;

-- Everybody may see status; only the owner and administrators may see messages and queries. These views read with the
-- rights of their owner and know who queries them. A stream table whose last refresh failed has status ERROR until a
-- refresh succeeds.
CREATE OR REPLACE VIEW pgtrickle.pgt_visible_stream_tables WITH (security_barrier) AS
SELECT t.pgt_id, t.pgt_schema, t.pgt_name, t.pgt_relid, t.view_relid, t.schedule, t.refresh_mode, t.effective_mode,
       CASE WHEN (t.last_error IS NOT NULL OR t.consecutive_errors > 0) AND t.status <> 'SUSPENDED' THEN 'ERROR'
            ELSE t.status END AS status, t.key_columns,
       t.frontier, t.data_timestamp, t.st_placement, t.placement, t.pooler_compatibility_mode, t.session_settings,
       t.consecutive_errors,
       t.created_at, t.updated_at, t.fencing_token, t.tier, t.last_change_at, t.last_seconds, t.full_seconds,
       t.row_seconds, t.fuse_ceiling,
       t.fuse_blown_at, t.fuse_passes, t.lost_members, t.output_distribution_column, t.polled, t.has_former_row_ids,
       CASE WHEN v.visible THEN t.defining_query END AS defining_query,
       CASE WHEN v.visible THEN t.mode_reason END AS mode_reason,
       CASE WHEN v.visible THEN t.status_reason
            WHEN t.status_reason IS NOT NULL THEN pgtrickle._redacted() END AS status_reason,
       CASE WHEN v.visible THEN t.reinit_reason
            WHEN t.reinit_reason IS NOT NULL THEN pgtrickle._redacted() END AS reinit_reason,
       CASE WHEN v.visible THEN t.last_error
            WHEN t.last_error IS NOT NULL THEN pgtrickle._redacted() END AS last_error,
       t.error_kind
FROM pgtrickle.pgt_stream_tables AS t
CROSS JOIN LATERAL (SELECT pgtrickle._may_see(t.pgt_relid) AS visible OFFSET 0) AS v;

CREATE OR REPLACE VIEW pgtrickle.pgt_visible_history WITH (security_barrier) AS
SELECT h.refresh_id, h.pgt_id, h.pgt_schema, h.pgt_name, h.start_time, h.end_time, h.status, h.action, h.initiated_by,
       CASE WHEN v.visible THEN h.reason END AS reason, h.rows_in, h.rows_inserted, h.rows_updated, h.rows_deleted,
       h.phases,
       CASE WHEN v.visible THEN h.error WHEN h.error IS NOT NULL THEN pgtrickle._redacted() END AS error, h.sqlstate,
       h.frontier, h.kind
FROM pgtrickle.pgt_refresh_history AS h
LEFT JOIN pgtrickle.pgt_stream_tables AS s USING (pgt_id)
CROSS JOIN LATERAL (SELECT pgtrickle._may_see(s.pgt_relid) AS visible OFFSET 0) AS v;

-- Serializes transactions until the end of this one. A transaction that is left open is not waited for forever.
CREATE OR REPLACE FUNCTION pgtrickle._lock(name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    former text := current_setting('lock_timeout');
BEGIN
    PERFORM set_config('lock_timeout', pgtrickle._setting('lock_timeout_ms') || 'ms', true);
    BEGIN
        INSERT INTO pgtrickle.pgt_locks AS l (name) VALUES (_lock.name) ON CONFLICT DO NOTHING;
        PERFORM FROM pgtrickle.pgt_locks AS l WHERE l.name = _lock.name FOR UPDATE;
    EXCEPTION WHEN lock_not_available THEN
        RAISE EXCEPTION 'another transaction that creates or alters a stream table has not ended: held by %',
                coalesce((SELECT string_agg(format('process %s (role %s)', a.pid, a.usename), ', ')
                          FROM pg_stat_activity AS a
                          WHERE a.pid = ANY (ARRAY(SELECT l.pid FROM pg_lock_status() AS l
                                                   WHERE l.relation = 'pgtrickle.pgt_locks'::regclass
                                                     AND l.mode = 'RowExclusiveLock'
                                                     AND l.pid <> pg_backend_pid()))), 'a process that has ended')
            USING ERRCODE = 'lock_not_available',
                  HINT = 'Try again when it has, or raise the setting lock_timeout_ms.';
    END;
    PERFORM set_config('lock_timeout', former, true);
END
$$;

-- Whether a row of a catalog was written by this transaction.
CREATE OR REPLACE FUNCTION pgtrickle._is_of_this_transaction(written_by xid) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    -- Among visible rows, only this transaction's own have transaction IDs that are in progress or later than the
    -- snapshot: subtransactions have IDs of their own. Much later ones are in fact very old, because a row stores 32
    -- bits of the ID.
    SELECT w.xid >= 3
           AND CASE WHEN near.xid BETWEEN 3
                    AND s.xmax - 1 THEN coalesce(pg_xact_status(near.xid::text::xid8) = 'in progress', false)
                               ELSE near.xid BETWEEN s.xmax AND s.xmax + 16777216 END
    FROM (SELECT written_by::text::bigint) AS w (xid), (SELECT pg_current_xact_id()::text::bigint) AS now (xid),
         LATERAL (SELECT now.xid + (w.xid - now.xid % 4294967296 + 6442450944) % 4294967296 - 2147483648)
             AS near (xid),
         (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint) AS s (xmax)
$$;

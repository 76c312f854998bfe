-- What writes the catalog. Each function checks, by OID, that the caller may act for the owner of what it is about.

CREATE OR REPLACE FUNCTION pgtrickle._require_owner(relation regclass, action text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    owner oid := (SELECT relowner FROM pg_class WHERE oid = relation);
BEGIN
    IF owner IS NOT NULL AND NOT pg_has_role(pgtrickle._caller(), owner, 'MEMBER') THEN
        RAISE EXCEPTION 'role % may not % stream table %', quote_ident(pgtrickle._caller()), action, relation
            USING ERRCODE = 'insufficient_privilege', HINT = format('It belongs to role %s.', owner::regrole);
    END IF;
END
$$;

-- An id whose names in pgtrickle_views are free: anybody may create objects there, and an id can be guessed.
CREATE OR REPLACE FUNCTION pgtrickle._new_id() RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    id bigint;
BEGIN
    LOOP
        id := nextval(pg_get_serial_sequence('pgtrickle.pgt_stream_tables', 'pgt_id'));
        EXIT WHEN to_regclass('pgtrickle_views.q_' || id) IS NULL
            AND NOT EXISTS (SELECT FROM pg_proc WHERE pronamespace = 'pgtrickle_views'::regnamespace
                            AND proname IN ('read_' || id, 'write_' || id));
    END LOOP;
    RETURN id;
END
$$;

-- What is wrong with the owners of a stream table's parts; NULL if all is well. Its functions run with their owner's
-- rights, so they must be the stream table's owner's own.
CREATE OR REPLACE FUNCTION pgtrickle._ownership_problem(id bigint) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE
        WHEN c.oid IS NULL THEN format('its table %I.%I was dropped', s.pgt_schema, s.pgt_name)
        WHEN v.oid IS NULL THEN 'its query view was dropped, together with something it reads'
        WHEN f.number IS DISTINCT FROM 2 THEN format('its functions read_%1$s and write_%1$s in pgtrickle_views were dropped', id)
        WHEN v.relowner <> c.relowner OR NOT f.same_owner
        THEN format('it belongs to %s, but its view and functions in pgtrickle_views do not', c.relowner::regrole)
        END
    FROM pgtrickle.pgt_stream_tables AS s
    LEFT JOIN pg_class AS c ON c.oid = s.pgt_relid
    LEFT JOIN pg_class AS v ON v.oid = s.view_relid
    LEFT JOIN LATERAL (
        SELECT count(*) AS number, bool_and(p.proowner = c.relowner AND p.prosecdef) AS same_owner FROM pg_proc AS p
        WHERE p.oid IN (to_regprocedure(format('pgtrickle_views.read_%s(text)', id)),
                        to_regprocedure(format('pgtrickle_views.write_%s(text, text[])', id)))
    ) AS f ON true
    WHERE s.pgt_id = id
$$;

-- The columns of sources that the owner of a stream table may not read (any more), as text; NULL if there are none.
-- Tables behind another role's view are that role's to read. Every refresh asks: where no view lies between, which is
-- nearly always, the recorded columns answer in a tenth of the time, and PL/pgSQL keeps its plans.
CREATE OR REPLACE FUNCTION pgtrickle._privilege_problem(id bigint) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (
        SELECT FROM pgtrickle.pgt_stream_tables AS s
        JOIN pg_class AS v ON v.oid = s.view_relid
        JOIN pg_rewrite AS r ON r.ev_class = v.oid
        JOIN pg_depend AS d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid AND d.refclassid = 'pg_class'::regclass
        JOIN pg_class AS c ON c.oid = d.refobjid
        WHERE s.pgt_id = id AND c.relkind = 'v' AND c.oid <> v.oid
    ) AND NOT EXISTS (
        SELECT FROM pgtrickle.pgt_stream_tables AS s
        JOIN pg_class AS v ON v.oid = s.view_relid
        JOIN pgtrickle.pgt_dependencies AS d USING (pgt_id)
        WHERE s.pgt_id = id
          AND (has_any_column_privilege(v.relowner, d.source_relid, 'SELECT') IS NOT TRUE
               OR EXISTS (SELECT FROM unnest(d.columns_used) AS a
                          WHERE has_column_privilege(v.relowner, d.source_relid, a, 'SELECT') IS NOT TRUE))
    ) THEN
        RETURN NULL;
    END IF;
    RETURN (SELECT string_agg(format('role %s may not read %s of %s', role::regrole,
                             coalesce('column ' || pgtrickle._column_names(source.relation, missing.columns), 'any column'),
                             source.relation), '; ')
    FROM pgtrickle.pgt_stream_tables AS s
    CROSS JOIN LATERAL pgtrickle._sources(s.view_relid) AS source
    CROSS JOIN LATERAL unnest(source.checked_as) AS role
    CROSS JOIN LATERAL (
        SELECT array_agg(a) AS columns FROM unnest(source.columns) AS a
        WHERE NOT has_column_privilege(role, source.relation, a, 'SELECT')
    ) AS missing
    WHERE s.pgt_id = id AND (missing.columns IS NOT NULL OR NOT has_any_column_privilege(role, source.relation, 'SELECT')));
END
$$;

-- What the query computes of changed rows runs with its owner's rights, on the columns that the owner may read anyway.
CREATE OR REPLACE FUNCTION pgtrickle._grant_buffers(id bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    source record;
BEGIN
    FOR source IN
        SELECT t.buffer_relid, c.relowner::regrole AS owner,
               (SELECT string_agg(quote_ident(a.attname), ', ') FROM pg_attribute AS a
                WHERE a.attrelid = t.buffer_relid AND a.attnum > 0 AND NOT a.attisdropped
                  AND (a.attname IN ('__pgt_xid', '__pgt_w')
                       OR a.attname IN (SELECT 'c' || u FROM unnest(d.columns_used) AS u))) AS columns
        FROM pgtrickle.pgt_dependencies AS d
        JOIN pgtrickle.pgt_stream_tables AS s USING (pgt_id)
        JOIN pg_class AS c ON c.oid = s.pgt_relid
        JOIN pgtrickle.pgt_change_tracking AS t ON t.source_relid = d.source_relid
        WHERE d.pgt_id = id AND d.source_type <> 'DISTRIBUTED'
    LOOP
        EXECUTE format('GRANT SELECT (%s) ON %s TO %s', source.columns, source.buffer_relid, source.owner);
    END LOOP;
END
$$;
REVOKE ALL ON FUNCTION pgtrickle._grant_buffers(bigint) FROM PUBLIC;

-- The tables that a query reads: of one in many databases those of the members, but for those that the coordinator reads as they are.
CREATE OR REPLACE FUNCTION pgtrickle._behind(view regclass, through_coordinator boolean DEFAULT false) RETURNS TABLE (relation regclass, columns smallint[], through regclass)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT r.relation, coalesce(array_agg(DISTINCT c ORDER BY c) FILTER (WHERE c IS NOT NULL), '{}'), max(r.through::oid)::regclass
    FROM (SELECT s.relation, s.columns, NULL::regclass AS through
          FROM pgtrickle._sources(view) AS s
          WHERE NOT EXISTS (SELECT FROM pgtrickle.pgt_sharded_tables AS t
                            WHERE t.relid = s.relation AND NOT (through_coordinator AND t.database_set = '@cluster'))
          UNION ALL
          SELECT m.member_relid,
                 ARRAY(SELECT a.attnum FROM pg_attribute AS a JOIN pg_attribute AS u ON u.attname = a.attname
                       WHERE a.attrelid = m.member_relid AND NOT a.attisdropped AND u.attrelid = s.relation AND u.attnum = ANY (s.columns)),
                 m.relid
          FROM pgtrickle._sources(view) AS s JOIN pgtrickle.pgt_shards AS m ON m.relid = s.relation
          JOIN pgtrickle.pgt_sharded_tables AS t ON t.relid = m.relid AND NOT (through_coordinator AND t.database_set = '@cluster')
          UNION ALL
          -- What the coordinator has of a distributed table is read here, as the table itself.
          SELECT s.relation, s.columns, s.relation
          FROM pgtrickle._sources(view) AS s JOIN pgtrickle.pgt_sharded_tables AS t ON t.relid = s.relation AND t.database_set = '@cluster'
          WHERE NOT through_coordinator) AS r
    LEFT JOIN LATERAL unnest(r.columns) AS c ON true
    GROUP BY r.relation
$$;

CREATE OR REPLACE FUNCTION pgtrickle._register_sources(id bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    own regclass := (SELECT pgt_relid FROM pgtrickle.pgt_stream_tables WHERE pgt_id = id);
    whole boolean := (SELECT through_coordinator FROM pgtrickle.pgt_stream_tables WHERE pgt_id = id);
    reader regclass := own;
    readers jsonb;
    signatures jsonb;
    path text;
BEGIN
    SELECT jsonb_object_agg(source_relid::oid, capture_signature) INTO signatures FROM pgtrickle.pgt_dependencies WHERE pgt_id = id;
    DELETE FROM pgtrickle.pgt_dependencies WHERE pgt_id = id;
    INSERT INTO pgtrickle.pgt_dependencies
        (pgt_id, source_relid, source_schema, source_name, source_type, columns_used, source_stable_name, capture_signature, through,
         source_placement)
    SELECT id, source.relation, n.nspname, c.relname,
           CASE WHEN whole AND pgtrickle._is_distributed(source.relation) THEN 'DISTRIBUTED'
                WHEN EXISTS (SELECT FROM pgtrickle.pgt_stream_tables AS u WHERE u.pgt_relid = source.relation) THEN 'STREAM_TABLE'
                WHEN f.relid IS NOT NULL THEN 'OTHER_DATABASE'
                WHEN NOT pgtrickle._can_capture(source.relation) THEN CASE c.relkind WHEN 'm' THEN 'MATVIEW' ELSE 'FOREIGN_TABLE' END
                WHEN c.relkind = 'p' THEN 'PARTITIONED' ELSE 'TABLE' END,
           source.columns,
           coalesce(f.database || '/' || f.source_stable_name,
                    (SELECT t.source_stable_name FROM pgtrickle.pgt_change_tracking AS t WHERE t.source_relid = source.relation),
                    pgtrickle.stable_hash(format('%I.%I', n.nspname, c.relname))),
           signatures ->> source.relation::oid::text, source.through,
           pgtrickle._citus_placement(coalesce(source.through, source.relation))
    FROM pgtrickle._behind((SELECT view_relid FROM pgtrickle.pgt_stream_tables WHERE pgt_id = id), whole) AS source
    JOIN pg_class AS c ON c.oid = source.relation
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    LEFT JOIN pgtrickle.pgt_foreign_tables AS f ON f.relid = source.relation;
    SELECT format('%I.%I.%I', f.database, f.source_schema, f.source_name) INTO path
    FROM pgtrickle.pgt_dependencies AS d JOIN pgtrickle.pgt_foreign_tables AS f ON f.relid = d.source_relid
    WHERE d.pgt_id = id GROUP BY f.database, f.source_relid, f.source_schema, f.source_name HAVING count(*) > 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the query names table % in two ways', path
            USING ERRCODE = 'feature_not_supported', HINT = 'Use one name for it: its own in three parts, or one foreign table.';
    END IF;

    PERFORM pgtrickle._grant_buffers(id);
    -- For each table behind it one that reads it; there was no cycle before, so these lead back to where they began.
    WITH RECURSIVE upstream (relation, reader) AS (
        SELECT coalesce(through, source_relid), own FROM pgtrickle.pgt_dependencies WHERE pgt_id = id
        UNION
        SELECT coalesce(d.through, d.source_relid), s.pgt_relid FROM upstream AS u
        JOIN pgtrickle.pgt_stream_tables AS s ON s.pgt_relid = u.relation
        JOIN pgtrickle.pgt_dependencies AS d ON d.pgt_id = s.pgt_id
    )
    SELECT jsonb_object_agg(u.relation::oid, u.reader::oid) INTO readers FROM upstream AS u;
    IF readers ? own::oid::text THEN
        LOOP
            path := concat_ws(', which reads ', reader::text, path);
            reader := (readers ->> reader::oid::text)::oid::regclass;
            EXIT WHEN reader = own;
        END LOOP;
        RAISE EXCEPTION 'stream table % would read itself: it reads %', own, path
            USING ERRCODE = 'invalid_object_definition', HINT = 'Take it, and the stream tables that read it, out of the query.';
    END IF;
END
$$;
REVOKE ALL ON FUNCTION pgtrickle._register_sources(bigint) FROM PUBLIC;

CREATE OR REPLACE FUNCTION pgtrickle._register(
    id bigint, storage regclass, view regclass, query text, schedule text, refresh_mode text,
    pooler_compatibility_mode boolean, placement text, key_columns text[], session_settings jsonb)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    problem text;
BEGIN
    PERFORM pgtrickle._require_owner(storage, 'register');
    IF view <> to_regclass('pgtrickle_views.q_' || id)
       OR id > (SELECT last_value FROM pgtrickle.pgt_stream_tables_pgt_id_seq) THEN
        RAISE EXCEPTION 'no stream table can have id %', id
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use pgtrickle.create_stream_table().';
    END IF;
    INSERT INTO pgtrickle.pgt_stream_tables (
        pgt_id, pgt_schema, pgt_name, pgt_relid, view_relid, defining_query, schedule, refresh_mode,
        pooler_compatibility_mode, placement, key_columns, session_settings)
    OVERRIDING SYSTEM VALUE
    SELECT id, n.nspname, c.relname, storage, view, query, _register.schedule, _register.refresh_mode,
           _register.pooler_compatibility_mode, _register.placement, _register.key_columns, _register.session_settings
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = storage;
    problem := pgtrickle._ownership_problem(id);
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION 'stream table % cannot be registered: %', storage, problem
            USING ERRCODE = 'invalid_object_definition', HINT = 'Use pgtrickle.create_stream_table().';
    END IF;
    PERFORM pgtrickle._register_sources(id);
    PERFORM pgtrickle._settle_schedules(), pgtrickle._signal_dag_rebuild();
END
$$;

-- NULL leaves a value as it is.
CREATE OR REPLACE FUNCTION pgtrickle._change(
    id bigint, query text, schedule text, refresh_mode text, status text, pooler_compatibility_mode boolean, placement text,
    session_settings jsonb, tier text, fuse_ceiling bigint, lost_members text)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    PERFORM pgtrickle._require_owner((SELECT pgt_relid FROM pgtrickle.pgt_stream_tables WHERE pgt_id = id), 'alter');
    IF _change.query IS NOT NULL AND EXISTS (SELECT FROM pgtrickle.pgt_stream_tables AS s
                                             WHERE s.pgt_id = id AND s.status_reason = pgtrickle._ownership_problem(id)) THEN
        status := coalesce(_change.status, 'ACTIVE'); -- it was suspended for want of a query
    END IF;
    UPDATE pgtrickle.pgt_stream_tables AS s SET
        defining_query = coalesce(_change.query, s.defining_query),
        view_relid = coalesce(to_regclass('pgtrickle_views.q_' || id), s.view_relid),
        session_settings = coalesce(_change.session_settings, s.session_settings),
        schedule = coalesce(_change.schedule, s.schedule),
        refresh_mode = coalesce(_change.refresh_mode, s.refresh_mode),
        pooler_compatibility_mode = coalesce(_change.pooler_compatibility_mode, s.pooler_compatibility_mode),
        placement = coalesce(_change.placement, s.placement),
        status = coalesce(CASE WHEN _change.status = 'ACTIVE' AND s.frontier IS NULL THEN 'INITIALIZING' ELSE _change.status END, s.status),
        status_reason = CASE _change.status WHEN 'SUSPENDED' THEN 'by request' WHEN 'ACTIVE' THEN NULL ELSE s.status_reason END,
        consecutive_errors = CASE _change.status WHEN 'ACTIVE' THEN 0 ELSE s.consecutive_errors END,
        fuse_blown_at = CASE _change.status WHEN 'ACTIVE' THEN NULL ELSE s.fuse_blown_at END,
        tier = CASE _change.tier WHEN 'auto' THEN NULL ELSE coalesce(_change.tier, s.tier) END,
        fuse_ceiling = coalesce(_change.fuse_ceiling, s.fuse_ceiling),
        lost_members = coalesce(_change.lost_members, s.lost_members),
        -- Looked at anew, at once.
        next_due = '-infinity', stretch = 1,
        reinit_reason = CASE WHEN _change.query IS NOT NULL AND s.frontier IS NOT NULL THEN 'query changed' ELSE s.reinit_reason END,
        -- What was decided for another query or mode is decided anew.
        effective_mode = CASE WHEN coalesce(_change.query, _change.refresh_mode) IS NULL THEN s.effective_mode END,
        mode_reason = CASE WHEN coalesce(_change.query, _change.refresh_mode) IS NULL THEN s.mode_reason END,
        updated_at = now()
    WHERE s.pgt_id = id;
    IF _change.query IS NOT NULL THEN
        PERFORM pgtrickle._register_sources(id);
    END IF;
    PERFORM pgtrickle._settle_schedules(), pgtrickle._signal_dag_rebuild();
END
$$;

-- Removes what is left of stream tables whose table was dropped by hand. The views and functions are their former
-- owners', but in a schema of ours.
CREATE OR REPLACE FUNCTION pgtrickle._forget_dropped() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    gone record;
BEGIN
    FOR gone IN
        DELETE FROM pgtrickle.pgt_stream_tables AS s
        WHERE NOT EXISTS (SELECT FROM pg_class AS c WHERE c.oid = s.pgt_relid)
        RETURNING s.pgt_id
    LOOP
        EXECUTE format('DROP VIEW IF EXISTS pgtrickle_views.%I', 'q_' || gone.pgt_id);
        EXECUTE format('DROP TABLE IF EXISTS pgtrickle_views.%I', 'state_' || gone.pgt_id);
        EXECUTE format('DROP FUNCTION IF EXISTS pgtrickle_views.%I(text)', 'read_' || gone.pgt_id);
        EXECUTE format('DROP FUNCTION IF EXISTS pgtrickle_views.%I(text, text[])', 'write_' || gone.pgt_id);
    END LOOP;
    IF FOUND THEN
        PERFORM pgtrickle._settle_schedules(), pgtrickle._signal_dag_rebuild();
    END IF;
END
$$;

-- Under a key that its author has used before it is the same request; one that failed is filed again.
CREATE OR REPLACE FUNCTION pgtrickle._file_request(id bigint, key text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    request bigint;
BEGIN
    PERFORM pgtrickle._require_owner((SELECT pgt_relid FROM pgtrickle.pgt_stream_tables WHERE pgt_id = id), 'refresh');
    INSERT INTO pgtrickle.pgt_requests AS r (pgt_id, requested_by, request_key) VALUES (id, pgtrickle._caller(), key)
    ON CONFLICT (pgt_id, requested_by, request_key) WHERE request_key IS NOT NULL DO UPDATE
    SET status = CASE r.status WHEN 'FAILED' THEN 'PENDING' ELSE r.status END,
        error = CASE r.status WHEN 'FAILED' THEN NULL ELSE r.error END,
        requested_at = CASE r.status WHEN 'FAILED' THEN clock_timestamp() ELSE r.requested_at END,
        finished_at = CASE r.status WHEN 'FAILED' THEN NULL ELSE r.finished_at END
    RETURNING request_id INTO request;
    PERFORM pgtrickle._wake(format('request %s', request));
    RETURN request;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._warn_without_service() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pgtrickle.pgt_services WHERE kind = 'service' AND last_seen > clock_timestamp() - interval '1 minute') THEN
        RAISE WARNING 'no pgtrickle service seen in the last minute'
            USING HINT = 'Start one with `pgtrickle run`, or serve what is waiting with `pgtrickle run --once`.';
    END IF;
END
$$;

-- Refuses changes of a stream table that are not its refresh. Only the service can write apply_xid.
CREATE OR REPLACE FUNCTION pgtrickle._guard() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pgtrickle.pgt_stream_tables
                   WHERE pgt_relid = TG_RELID AND apply_xid = pg_current_xact_id_if_assigned()) THEN
        RAISE EXCEPTION 'stream table %.% cannot be changed directly (%)', quote_ident(TG_TABLE_SCHEMA), quote_ident(TG_TABLE_NAME), TG_OP
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'It follows its defining query: change the tables that the query reads.';
    END IF;
    RETURN NULL;
END
$$;

-- Functions that write the catalog. They run behind the gate, which knows the caller; each checks that the caller may
-- act for the owner.

-- The tables that a query reads: for a table of a set those of the members, except tables that the coordinator reads
-- as a whole.
CREATE OR REPLACE FUNCTION pgtrickle._resolved_sources(view regclass, through_coordinator boolean DEFAULT false)
RETURNS TABLE (relation regclass, columns smallint[], through regclass)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT r.relation, coalesce(array_agg(DISTINCT c ORDER BY c) FILTER (WHERE c IS NOT NULL), '{}'),
           max(r.through::oid)::regclass
    FROM (SELECT s.relation, s.columns, NULL::regclass AS through
          FROM pgtrickle._sources(view) AS s
          WHERE NOT EXISTS (SELECT FROM pgtrickle.pgt_sharded_tables AS t
                            WHERE t.relid = s.relation AND NOT (through_coordinator AND t.database_set = '@cluster'))
          UNION ALL
          SELECT m.member_relid,
                 ARRAY(SELECT a.attnum FROM pg_attribute AS a JOIN pg_attribute AS u ON u.attname = a.attname
                       WHERE a.attrelid = m.member_relid AND NOT a.attisdropped AND u.attrelid = s.relation
                         AND u.attnum = ANY (s.columns)),
                 m.relid
          FROM pgtrickle._sources(view) AS s JOIN pgtrickle.pgt_shards AS m ON m.relid = s.relation
          JOIN pgtrickle.pgt_sharded_tables AS t ON t.relid = m.relid
            AND NOT (through_coordinator AND t.database_set = '@cluster')
          UNION ALL
          -- The coordinator's own rows of a distributed table are read here, as the table itself.
          SELECT s.relation, s.columns, s.relation
          FROM pgtrickle._sources(view) AS s JOIN pgtrickle.pgt_sharded_tables AS t ON t.relid = s.relation
              AND t.database_set = '@cluster'
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
    SELECT jsonb_object_agg(source_relid::oid, capture_signature) INTO signatures FROM pgtrickle.pgt_dependencies
    WHERE pgt_id = id;
    DELETE FROM pgtrickle.pgt_dependencies WHERE pgt_id = id;
    INSERT INTO pgtrickle.pgt_dependencies
        (pgt_id, source_relid, source_schema, source_name, source_type, columns_used, source_stable_name,
         capture_signature, through,
         source_placement)
    SELECT id, source.relation, n.nspname, c.relname,
           CASE WHEN whole AND pgtrickle._is_distributed(source.relation) THEN 'DISTRIBUTED'
                WHEN EXISTS (SELECT FROM pgtrickle.pgt_stream_tables AS u WHERE u.pgt_relid = source.relation) THEN
                    'STREAM_TABLE'
                WHEN f.relid IS NOT NULL THEN 'OTHER_DATABASE'
                WHEN NOT pgtrickle._can_capture(source.relation) THEN
                    CASE c.relkind WHEN 'm' THEN 'MATVIEW' ELSE 'FOREIGN_TABLE' END
                WHEN c.relkind = 'p' THEN 'PARTITIONED' ELSE 'TABLE' END,
           source.columns,
           coalesce(f.database || '/' || f.source_stable_name, pgtrickle._stable_name(source.relation)),
           signatures ->> source.relation::oid::text, source.through,
           pgtrickle._citus_placement(coalesce(source.through, source.relation))
    FROM pgtrickle._resolved_sources((SELECT view_relid FROM pgtrickle.pgt_stream_tables WHERE pgt_id = id), whole)
        AS source
    JOIN pg_class AS c ON c.oid = source.relation
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    LEFT JOIN pgtrickle.pgt_foreign_tables AS f ON f.relid = source.relation;
    SELECT format('%I.%I.%I', f.database, f.source_schema, f.source_name) INTO path
    FROM pgtrickle.pgt_dependencies AS d JOIN pgtrickle.pgt_foreign_tables AS f ON f.relid = d.source_relid
    WHERE d.pgt_id = id GROUP BY f.database, f.source_relid, f.source_schema, f.source_name HAVING count(*) > 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the query uses two names for table %', path
            USING ERRCODE = 'feature_not_supported',
                  HINT = 'Use one name for it: its own in three parts, or one foreign table.';
    END IF;

    -- For each upstream table one of its readers; there was no cycle before, so these lead back to the start.
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
            USING ERRCODE = 'invalid_object_definition',
                  HINT = 'Remove it, and the stream tables that read it, from the query.';
    END IF;
END
$$;

-- All parts belong to one role, and only that role can have caused that: this proves its consent.
CREATE OR REPLACE FUNCTION pgtrickle._register(
    caller name, id bigint, storage regclass, view regclass, query text, schedule text, refresh_mode text,
    pooler_compatibility_mode boolean, placement text, key_columns text[], session_settings jsonb)
RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    problem text;
BEGIN
    IF NOT pgtrickle._acts_for(caller, (SELECT c.relowner FROM pg_class AS c
                                        WHERE c.oid = storage AND c.relkind = 'r')) THEN
        RAISE EXCEPTION 'role % may not register %', quote_ident(caller), coalesce(storage::text, 'NULL')
            USING ERRCODE = 'insufficient_privilege';
    ELSIF (SELECT c.oid FROM pg_class AS c WHERE c.relnamespace = 'pgtrickle_views'::regnamespace
             AND c.relname = 'q_' || id AND c.relkind = 'v')
              IS DISTINCT FROM view::oid
       -- Assigned by _next_id() in this session: an earlier ID may have messages of another role.
       OR id IS DISTINCT FROM currval('pgtrickle.pgt_stream_tables_pgt_id_seq') THEN
        RAISE EXCEPTION 'no stream table can have id %', id
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use pgtrickle.create_stream_table().';
    END IF;
    IF EXISTS (SELECT FROM unnest(key_columns) AS k WHERE k IS NULL OR NOT EXISTS (
                   SELECT FROM pg_attribute AS a WHERE a.attrelid = view AND a.attnum > 0 AND a.attname = k)) THEN
        RAISE EXCEPTION 'key columns % are not columns of the query', key_columns
            USING ERRCODE = 'undefined_column', HINT = 'Use pgtrickle.create_stream_table().';
    END IF;
    -- A stream table that was renamed since has freed its name.
    UPDATE pgtrickle.pgt_stream_tables AS s SET pgt_schema = n.nspname, pgt_name = c.relname
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace, pg_class AS new
    JOIN pg_namespace AS m ON m.oid = new.relnamespace
    WHERE c.oid = s.pgt_relid AND new.oid = storage AND (s.pgt_schema, s.pgt_name) = (m.nspname, new.relname);
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
    PERFORM pgtrickle._close_views(caller);
    PERFORM pgtrickle._update_intervals(id), pgtrickle._signal_dag_rebuild();
END
$$;

-- NULL keeps a value.
CREATE OR REPLACE FUNCTION pgtrickle._update_stream_table(
    caller name, id bigint, query text, schedule text, refresh_mode text, status text,
    pooler_compatibility_mode boolean, placement text,
    session_settings jsonb, tier text, fuse_ceiling bigint, lost_members text)
RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    PERFORM pgtrickle._require_owner(caller, id, 'alter');
    IF _update_stream_table.query IS NOT NULL THEN
        -- An old snapshot does not see what others have begun to read, and two such transactions do not see each
        -- other: there could be cycles.
        IF current_setting('transaction_isolation') <> 'read committed' THEN
            RAISE EXCEPTION 'the query of a stream table cannot be changed in a % transaction',
                    current_setting('transaction_isolation')
                USING ERRCODE = 'active_sql_transaction', HINT = 'Use a READ COMMITTED transaction.';
        END IF;
        PERFORM pgtrickle._lock('queries');
    END IF;
    IF _update_stream_table.query IS NOT NULL AND EXISTS (SELECT FROM pgtrickle.pgt_stream_tables AS s
                                             WHERE s.pgt_id = id
                                               AND s.status_reason = pgtrickle._ownership_problem(id)) THEN
        status := coalesce(_update_stream_table.status, 'ACTIVE'); -- it was suspended because its query was missing
    END IF;
    UPDATE pgtrickle.pgt_stream_tables AS s SET
        defining_query = coalesce(_update_stream_table.query, s.defining_query),
        view_relid = coalesce(to_regclass('pgtrickle_views.q_' || id), s.view_relid),
        session_settings = coalesce(_update_stream_table.session_settings, s.session_settings),
        schedule = coalesce(_update_stream_table.schedule, s.schedule),
        refresh_mode = coalesce(_update_stream_table.refresh_mode, s.refresh_mode),
        pooler_compatibility_mode = coalesce(_update_stream_table.pooler_compatibility_mode,
                                             s.pooler_compatibility_mode),
        placement = coalesce(_update_stream_table.placement, s.placement),
        status = coalesce(CASE WHEN _update_stream_table.status = 'ACTIVE' AND s.frontier IS NULL THEN 'INITIALIZING'
                               ELSE _update_stream_table.status END, s.status),
        status_reason = CASE _update_stream_table.status WHEN 'SUSPENDED' THEN 'by request' WHEN 'ACTIVE' THEN NULL
                             ELSE s.status_reason END,
        consecutive_errors = CASE _update_stream_table.status WHEN 'ACTIVE' THEN 0 ELSE s.consecutive_errors END,
        last_error = CASE _update_stream_table.status WHEN 'ACTIVE' THEN NULL ELSE s.last_error END,
        counted_errors = CASE _update_stream_table.status WHEN 'ACTIVE' THEN 0 ELSE s.counted_errors END,
        alerted = CASE _update_stream_table.status WHEN 'ACTIVE' THEN NULL ELSE s.alerted END,
        fuse_blown_at = CASE _update_stream_table.status WHEN 'ACTIVE' THEN NULL ELSE s.fuse_blown_at END,
        tier = CASE _update_stream_table.tier WHEN 'auto' THEN NULL
                    ELSE coalesce(_update_stream_table.tier, s.tier) END,
        fuse_ceiling = coalesce(_update_stream_table.fuse_ceiling, s.fuse_ceiling),
        lost_members = coalesce(_update_stream_table.lost_members, s.lost_members),
        -- Due at once.
        next_due = '-infinity', stretch = 1,
        reinit_reason = CASE WHEN _update_stream_table.query IS NOT NULL
                             AND s.frontier IS NOT NULL THEN 'query changed' ELSE s.reinit_reason END,
        -- Reset the mode if the query changed, or if the new mode rules it out; the next refresh decides.
        effective_mode = CASE WHEN _update_stream_table.query IS NULL
                              AND coalesce(_update_stream_table.refresh_mode, 'AUTO') IN ('AUTO',
                                      s.effective_mode) THEN s.effective_mode END,
        mode_reason = CASE WHEN coalesce(_update_stream_table.query, _update_stream_table.refresh_mode) IS NULL THEN
                           s.mode_reason END,
        updated_at = now()
    WHERE s.pgt_id = id;
    IF _update_stream_table.query IS NOT NULL THEN
        PERFORM pgtrickle._register_sources(id);
        PERFORM pgtrickle._close_views(caller);
    END IF;
    PERFORM pgtrickle._update_intervals(id), pgtrickle._signal_dag_rebuild();
END
$$;

-- How a new stream table will be maintained, determined at creation; the service confirms it at every refresh.
CREATE OR REPLACE FUNCTION pgtrickle._record_mode(caller name, id bigint, mode text, reason text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pgtrickle._require_owner(caller, id, 'set the mode of');
    UPDATE pgtrickle.pgt_stream_tables AS s SET effective_mode = mode, mode_reason = reason WHERE s.pgt_id = id;
END
$$;

-- Removes the rest of stream tables whose table was dropped by hand. Their views and functions belong to the former
-- owners, but are in a schema of the catalog. Locked ones are left for the next call.
CREATE OR REPLACE FUNCTION pgtrickle._forget_dropped() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
    SET lock_timeout = '200ms'
AS $$
DECLARE
    gone bigint;
BEGIN
    FOR gone IN
        SELECT s.pgt_id FROM pgtrickle.pgt_stream_tables AS s
        WHERE NOT EXISTS (SELECT FROM pg_class AS c WHERE c.oid = s.pgt_relid) FOR UPDATE SKIP LOCKED
    LOOP
        BEGIN
            BEGIN
                EXECUTE format('DROP VIEW IF EXISTS pgtrickle_views.%I', 'q_' || gone);
            EXCEPTION WHEN dependent_objects_still_exist OR wrong_object_type THEN
                NULL; -- a view of somebody's on it, or something else of that name: it stays, and stops nobody else
            END;
            EXECUTE format('DROP TABLE IF EXISTS pgtrickle_views.%I', 'state_' || gone);
            -- of an earlier version
            EXECUTE format('DROP FUNCTION IF EXISTS pgtrickle_views.%I(text)', 'read_' || gone);
            EXECUTE format('DROP FUNCTION IF EXISTS pgtrickle_views.%I(text, text[])', 'read_' || gone);
            EXECUTE format('DROP FUNCTION IF EXISTS pgtrickle_views.%I(text, text[])', 'write_' || gone);
            DELETE FROM pgtrickle.pgt_stream_tables AS s WHERE s.pgt_id = gone;
            PERFORM pgtrickle._signal_dag_rebuild();
        EXCEPTION
            WHEN lock_not_available THEN
                RETURN; -- the holder of one lock may hold many: do not wait for each
            WHEN dependent_objects_still_exist OR wrong_object_type THEN
                NULL;
        END;
    END LOOP;
END
$$;

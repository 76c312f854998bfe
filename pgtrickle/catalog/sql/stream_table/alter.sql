-- Finding, altering and replacing stream tables.

-- The ID of a stream table by its name in the caller's search_path; NULL if there is none. A renamed table is found by
-- its new name, one that was dropped by hand by its former name. Operators are schema-qualified: the caller's search
-- path may contain better matches.
CREATE OR REPLACE FUNCTION pgtrickle._find_id(name text) RETURNS bigint
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    parts text[] := pg_catalog.parse_ident(name);
    relation regclass := pg_catalog.to_regclass(
        (SELECT pg_catalog.string_agg(pg_catalog.quote_ident(part), '.' ORDER BY n)
         FROM pg_catalog.unnest(parts) WITH ORDINALITY AS p (part, n)));
    id bigint;
BEGIN
    SELECT s.pgt_id INTO id FROM pgtrickle.pgt_stream_tables AS s
    WHERE s.pgt_relid::oid OPERATOR(pg_catalog.=) relation::oid;
    IF NOT FOUND AND relation IS NULL THEN
        SELECT s.pgt_id INTO id FROM pgtrickle.pgt_stream_tables AS s
        WHERE s.pgt_name = parts[pg_catalog.cardinality(parts)]
          AND CASE pg_catalog.cardinality(parts) WHEN 1 THEN s.pgt_schema = ANY (pg_catalog.current_schemas(false))
                   ELSE s.pgt_schema = parts[pg_catalog.cardinality(parts) - 1] END
          AND NOT EXISTS (SELECT FROM pg_catalog.pg_class AS c WHERE c.oid OPERATOR(pg_catalog.=) s.pgt_relid::oid)
        ORDER BY pg_catalog.array_position(pg_catalog.current_schemas(false), s.pgt_schema::name)
        LIMIT 1;
    END IF;
    RETURN id;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._require_id(name text) RETURNS bigint
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    id bigint := pgtrickle._find_id(name);
BEGIN
    IF id IS NULL THEN
        RAISE EXCEPTION 'there is no stream table %', name
            USING ERRCODE = 'undefined_table', HINT = 'SELECT * FROM pgtrickle.pgt_status() lists those there are.';
    END IF;
    RETURN id;
END
$$;

-- Replaces the query by one with the same columns: the table, its indexes, grants and comments stay.
CREATE OR REPLACE FUNCTION pgtrickle._replace_query(id bigint, query text, query_path text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    stream_table record;
    view regclass;
    old_columns text;
    new_columns text;
    former text := pgtrickle._disable_ddl_propagation();
BEGIN
    SELECT s.pgt_relid, s.through_coordinator INTO STRICT stream_table FROM pgtrickle.pgt_stream_tables AS s
    WHERE s.pgt_id = id;
    old_columns := pgtrickle._column_list(stream_table.pgt_relid);
    query := pgtrickle._without_row_ids(pgtrickle._localized_query(query), query_path);
    PERFORM pgtrickle._gate('begin_alter', jsonb_build_object('id', id));
    view := pgtrickle._write_view('CREATE VIEW', 'new_' || id, query, query_path);
    new_columns := pgtrickle._column_list(view);
    IF old_columns IS DISTINCT FROM new_columns THEN
        RAISE EXCEPTION 'the new query of stream table % has different columns: % instead of %',
                stream_table.pgt_relid,
                new_columns, old_columns
            USING ERRCODE = 'invalid_table_definition',
                  HINT = 'Drop the stream table and create it again, or make the query return the same columns.';
    END IF;
    PERFORM pgtrickle._check_query(view);
    EXECUTE format('DROP VIEW %s', view);
    -- A new view if the old one was dropped together with something it read.
    view := pgtrickle._write_view('CREATE OR REPLACE VIEW', 'q_' || id, query, query_path);
    PERFORM pgtrickle._warn_time_dependent(view, stream_table.pgt_relid);
    PERFORM pgtrickle._make_owner_functions(id); -- also if the service has a new role
    PERFORM pgtrickle._attach_sources(view, stream_table.through_coordinator);
    PERFORM set_config('citus.enable_ddl_propagation', former, true) WHERE former IS NOT NULL;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._column_list(relation regclass) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT string_agg(concat_ws(' ', quote_ident(a.attname), format_type(a.atttypid, a.atttypmod),
                                'COLLATE ' || (SELECT quote_ident(c.collname) FROM pg_collation AS c
                                               WHERE c.oid = a.attcollation AND c.oid <> t.typcollation)), ', '
                                               ORDER BY a.attnum)
    FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
    WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped AND a.attname <> '__pgt_row_id'
$$;

CREATE OR REPLACE FUNCTION pgtrickle._alter(
    id bigint, schedule text, refresh_mode text, status text, pooler_compatibility_mode boolean, placement text,
    query text,
    query_path text, tier text DEFAULT NULL, fuse_ceiling bigint DEFAULT NULL, lost_members text DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on
AS $$
BEGIN
    refresh_mode := upper(refresh_mode);
    tier := lower(tier);
    PERFORM pgtrickle._check_options(schedule, refresh_mode, placement, upper(status), tier, fuse_ceiling,
                                     lost_members);
    IF query IS NOT NULL THEN
        PERFORM pgtrickle._replace_query(id, query, query_path);
    END IF;
    PERFORM pgtrickle._gate('update', jsonb_build_object(
        'id', id, 'query', query, 'schedule', schedule, 'refresh_mode', refresh_mode, 'status', upper(status),
        'pooler_compatibility_mode', pooler_compatibility_mode, 'placement', placement, 'tier', tier, 'fuse_ceiling',
        fuse_ceiling,
        'session_settings', CASE WHEN query IS NOT NULL THEN pgtrickle._session_settings(query_path) END,
        'lost_members', lost_members));
    IF query IS NOT NULL OR refresh_mode IS NOT NULL THEN
        PERFORM pgtrickle._check_polled(s.view_relid, s.refresh_mode) FROM pgtrickle.pgt_stream_tables AS s
        WHERE s.pgt_id = id;
    END IF;
    PERFORM pgtrickle._untrack_unused();
    PERFORM pgtrickle._notify_services(format('altered %s', id));
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.alter_stream_table(
    name text, schedule text DEFAULT NULL, refresh_mode text DEFAULT NULL, status text DEFAULT NULL,
    pooler_compatibility_mode boolean DEFAULT NULL, placement text DEFAULT NULL, query text DEFAULT NULL,
    tier text DEFAULT NULL, fuse_ceiling bigint DEFAULT NULL, lost_members text DEFAULT NULL)
RETURNS void
LANGUAGE sql
AS $$
    SELECT pgtrickle._alter(pgtrickle._require_id(name), schedule, refresh_mode, status, pooler_compatibility_mode,
                            placement, query,
                            pg_catalog.current_setting('search_path'), tier, fuse_ceiling, lost_members)
$$;

CREATE OR REPLACE FUNCTION pgtrickle._replace(
    id bigint, query text, schedule text, refresh_mode text, pooler_compatibility_mode boolean, placement text,
    key_columns text[], query_path text)
RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    old record;
    new_query text;
    new_key text[];
BEGIN
    SELECT * INTO STRICT old FROM pgtrickle.pgt_visible_stream_tables WHERE pgt_id = id;
    schedule := coalesce(schedule, 'calculated');
    IF (old.defining_query, old.session_settings ->> 'search_path') IS DISTINCT FROM (query, query_path) THEN
        new_query := query;
    END IF;
    IF new_query IS NULL AND (old.schedule, old.refresh_mode, old.pooler_compatibility_mode, old.placement)
        IS NOT DISTINCT FROM (schedule, upper(refresh_mode), pooler_compatibility_mode, placement) THEN
        RETURN id;
    END IF;
    PERFORM pgtrickle._alter(id, schedule, refresh_mode, NULL, pooler_compatibility_mode, placement, new_query,
                             query_path);
    -- If no key is given, the one found for the query is used. A stream table without a key accepts any query.
    SELECT coalesce(_replace.key_columns, pgtrickle._find_key(s.view_relid)) INTO new_key
    FROM pgtrickle.pgt_stream_tables AS s WHERE s.pgt_id = id;
    IF new_query IS NOT NULL AND old.key_columns IS DISTINCT FROM new_key
       AND (key_columns IS NOT NULL OR old.key_columns IS NOT NULL) THEN
        RAISE EXCEPTION 'the new query of stream table % has a different key: % instead of %', old.pgt_relid,
                coalesce(new_key::text, 'none'), coalesce(old.key_columns::text, 'none')
            USING ERRCODE = 'invalid_table_definition', HINT = 'Drop the stream table and create it again.';
    END IF;
    RETURN id;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.create_or_replace_stream_table(
    name text, query text, schedule text DEFAULT 'calculated', refresh_mode text DEFAULT 'AUTO',
    initialize boolean DEFAULT true,
    pooler_compatibility_mode boolean DEFAULT false, placement text DEFAULT NULL, key_columns text[] DEFAULT NULL)
RETURNS bigint
LANGUAGE sql
AS $$
    SELECT CASE WHEN pgtrickle._find_id(name) IS NULL
        THEN pgtrickle.create_stream_table(name, query, schedule, refresh_mode, initialize, pooler_compatibility_mode,
                                           placement, key_columns)
        ELSE pgtrickle._replace(pgtrickle._find_id(name), query, schedule, refresh_mode, pooler_compatibility_mode,
                                placement,
                                key_columns, pg_catalog.current_setting('search_path')) END
$$;

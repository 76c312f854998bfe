-- Creation of a stream table: the query as a view, the table, its guard, and capture of its sources; all in the
-- caller's transaction.

-- Names of stream tables, as [schema, name].
CREATE OR REPLACE FUNCTION pgtrickle._parse_name(name text, default_schema text) RETURNS text[]
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    parts text[];
BEGIN
    BEGIN
        parts := parse_ident(name);
    EXCEPTION WHEN invalid_parameter_value THEN
        RAISE EXCEPTION '% is not a valid name', quote_literal(name)
            USING ERRCODE = 'invalid_name',
                  HINT = 'Write it as in SQL: name or schema.name, with double quotes where SQL needs them.';
    END;
    IF cardinality(parts) = 1 THEN
        parts := default_schema || parts;
    END IF;
    IF cardinality(parts) <> 2 OR parts[1] IS NULL THEN
        RAISE EXCEPTION '% does not name a table in a schema', quote_literal(name)
            USING ERRCODE = 'invalid_name',
                  HINT = 'Write schema.name; without a schema the first one of search_path that exists is meant.';
    ELSIF octet_length(parts[2]) > 63 OR octet_length(parts[1]) > 63 THEN
        RAISE EXCEPTION 'name % is longer than 63 bytes', quote_literal(name)
            USING ERRCODE = 'name_too_long', HINT = 'Choose a shorter one.';
    ELSIF parts[2] LIKE '\_\_pgt\_%' OR parts[1] IN ('pgtrickle', 'pgtrickle_changes', 'pgtrickle_views')
          OR parts[1] LIKE 'pg\_%' OR parts[1] = 'information_schema' THEN
        RAISE EXCEPTION 'name %.% is reserved', quote_ident(parts[1]), quote_ident(parts[2])
            USING ERRCODE = 'reserved_name',
                  HINT = 'Use a schema of your own and a name that does not begin with __pgt_.';
    END IF;
    RETURN parts;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._check_options(
    schedule text, refresh_mode text, placement text, status text DEFAULT NULL, tier text DEFAULT NULL,
    fuse_ceiling bigint DEFAULT NULL,
    lost_members text DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF refresh_mode NOT IN ('AUTO', 'DIFFERENTIAL', 'FULL') THEN
        RAISE EXCEPTION 'refresh_mode cannot be %', quote_literal(refresh_mode)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'It is AUTO, DIFFERENTIAL or FULL.';
    ELSIF placement NOT IN ('auto', 'spark') THEN
        RAISE EXCEPTION 'placement cannot be %', quote_literal(placement)
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'It is auto or spark; NULL follows the setting pg_trickle.placement.';
    ELSIF status NOT IN ('ACTIVE', 'SUSPENDED') THEN
        RAISE EXCEPTION 'status cannot be set to %', quote_literal(status)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'It can be set to ACTIVE or SUSPENDED.';
    ELSIF schedule !~ '^(calculated|([0-9]{1,9}(ms|s|m|h|d|w))+|(CRON_TZ=\S+ +)?(@(hourly|daily'
                      '|weekly|monthly|yearly)|[-0-9*/,]+( +[-0-9a-zA-Z*/,#]+){4}))$'
          OR schedule ~ '^(0+(ms|s|m|h|d|w))+$' OR length(schedule) > 500 THEN
        RAISE EXCEPTION 'schedule cannot be %', quote_literal(schedule)
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'It is a duration such as 500ms, 30s or 1h30m, a cron expression '
                         'such as */5 * * * * (CRON_TZ=Area/City before'
                         ' it names a time zone), or calculated.';
    ELSIF schedule ~ '^[0-9]+[mshdw]' AND pgtrickle._parse_duration(schedule) IS NULL THEN
        RAISE EXCEPTION 'schedule cannot be %', quote_literal(schedule)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'A duration is at most ten years, which are 3650d.';
    ELSIF coalesce(starts_with(schedule, 'CRON_TZ='), false) AND NOT EXISTS (
              SELECT FROM pg_timezone_names AS z
              WHERE z.name = split_part(substr(schedule, 9), ' ', 1) AND z.name ~ '^[A-Za-z0-9_+/-]+$') THEN
        RAISE EXCEPTION 'schedule cannot be %: there is no time zone %', quote_literal(schedule),
                quote_literal(split_part(substr(schedule, 9), ' ', 1))
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'pg_timezone_names lists them; upper and lower case matter.';
    ELSIF tier NOT IN ('hot', 'warm', 'cold', 'frozen', 'auto') THEN
        RAISE EXCEPTION 'tier cannot be %', quote_literal(tier)
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'It is hot, warm, cold or frozen; auto leaves it to the service.';
    ELSIF fuse_ceiling < 0 THEN
        RAISE EXCEPTION 'fuse_ceiling cannot be %', fuse_ceiling
            USING ERRCODE = 'invalid_parameter_value', HINT = 'It is a number of changes; 0 switches the fuse off.';
    ELSIF lost_members NOT IN ('wait', 'keep') THEN
        RAISE EXCEPTION 'lost_members cannot be %', quote_literal(lost_members)
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'It is wait, or keep: go on with the others, with what was last read '
                         'of those that cannot be reached.';
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._session_settings(query_path text) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_object_agg(name, current_setting(name)) || jsonb_build_object('search_path', query_path)
    FROM unnest(ARRAY['TimeZone', 'DateStyle', 'IntervalStyle', 'lc_monetary', 'lc_numeric', 'lc_time']) AS name
$$;

-- The service sets these in its sessions: no others are kept.
CREATE OR REPLACE FUNCTION pgtrickle._known_session_settings(settings jsonb) RETURNS jsonb
LANGUAGE sql STABLE STRICT SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(jsonb_object_agg(s.key, s.value), '{}') FROM jsonb_each_text(settings) AS s
    WHERE s.key IN ('TimeZone', 'DateStyle', 'IntervalStyle', 'lc_monetary', 'lc_numeric', 'lc_time', 'search_path')
$$;

-- Stores the query as a view, analyzed with the caller's search_path.
CREATE OR REPLACE FUNCTION pgtrickle._write_view(command text, view_name text, query text, query_path text)
RETURNS regclass
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    single CONSTANT refcursor := '__pgt_check';
BEGIN
    PERFORM set_config('search_path', query_path, true);
    BEGIN
        -- A cursor accepts one statement only, and one that returns rows.
        OPEN single FOR EXECUTE query;
        CLOSE single;
    EXCEPTION
        WHEN insufficient_privilege THEN
            NULL; -- _check_query() raises a better message
        WHEN feature_not_supported OR internal_error THEN
            -- It is one query, and was analyzed; Citus cannot plan every join, and need not. Callers that need a plan
            -- raise the error again.
            IF NOT pgtrickle._has_citus() THEN
                RAISE;
            END IF;
        WHEN invalid_cursor_definition THEN
            RAISE EXCEPTION 'the defining query must be one query: %', SQLERRM
                USING ERRCODE = 'syntax_error', HINT = 'Give one SELECT, VALUES or WITH statement.';
    END;
    BEGIN
        EXECUTE format('%s pgtrickle_views.%I AS ', command, view_name) || query;
    EXCEPTION
        WHEN duplicate_column THEN
            RAISE EXCEPTION 'the columns of the defining query need different names: %', SQLERRM
                USING ERRCODE = 'duplicate_column',
                      HINT = CASE WHEN SQLERRM LIKE '%\_\_pgt\_row\_id%' THEN
                                  'Name the columns of the stream tables instead of *.' ELSE 'Name them with AS.' END;
        WHEN invalid_table_definition THEN
            IF SQLERRM LIKE '%temporary%' THEN
                RAISE EXCEPTION 'the defining query reads a temporary table'
                    USING ERRCODE = 'feature_not_supported',
                          HINT = 'Only this session sees it. Use an ordinary table.';
            END IF;
            RAISE;
    END;
    PERFORM set_config('search_path', 'pg_catalog, pg_temp', true);
    RETURN to_regclass('pgtrickle_views.' || view_name);
END
$$;

-- The text of a query as it is stored. Row IDs of stream tables that `*` would include are left out, because they are
-- not data; naming one is an error. Other errors in the query are reported when it is stored.
CREATE OR REPLACE FUNCTION pgtrickle._without_row_ids(written text, query_path text) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    single CONSTANT refcursor := '__pgt_check';
    shown text;
    has_row_id boolean;
BEGIN
    IF written NOT LIKE '%*%' OR written LIKE '%\_\_pgt\_%' OR NOT EXISTS (
            SELECT FROM pgtrickle.pgt_stream_tables AS s
            JOIN pg_attribute AS a ON a.attrelid = s.pgt_relid AND a.attname = '__pgt_row_id') THEN
        RETURN written;
    END IF;
    PERFORM set_config('search_path', query_path, true);
    OPEN single FOR EXECUTE written; -- accepts one statement only
    CLOSE single;
    EXECUTE 'CREATE TEMP VIEW pgt_shown AS ' || written;
    PERFORM set_config('search_path', 'pg_catalog, pg_temp', true);
    SELECT string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum) FILTER (WHERE a.attname <> '__pgt_row_id'),
           bool_or(a.attname = '__pgt_row_id')
    INTO shown, has_row_id FROM pg_attribute AS a WHERE a.attrelid = 'pg_temp.pgt_shown'::regclass AND a.attnum > 0;
    EXECUTE 'DROP VIEW pg_temp.pgt_shown';
    IF has_row_id THEN
        written := format(E'SELECT %s FROM (%s\n) AS q', shown, rtrim(written, E' \t\r\n;'));
    END IF;
    RETURN written;
EXCEPTION WHEN OTHERS THEN
    RETURN written;
END
$$;

-- Tables without triggers cannot be captured, nor tables with such a partition or child.
CREATE OR REPLACE FUNCTION pgtrickle._can_capture(source regclass) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT bool_and(relkind IN ('r', 'p')) FROM pg_class WHERE oid IN (SELECT pgtrickle._partition_tree(source))
$$;

-- In the order of their OIDs, so that concurrent creations do not deadlock.
CREATE OR REPLACE FUNCTION pgtrickle._attach_sources(view regclass, through_coordinator boolean) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    source record;
BEGIN
    FOR source IN
        SELECT s.relation, s.columns FROM pgtrickle._sources(view) AS s
        WHERE pgtrickle._can_capture(s.relation)
          AND (NOT pgtrickle._is_stand_in(s.relation) OR pgtrickle._is_read_from_nodes(s.relation))
          AND NOT (through_coordinator AND pgtrickle._is_distributed(s.relation))
        ORDER BY s.relation::oid
    LOOP
        PERFORM pgtrickle._attach(source.relation, source.columns);
    END LOOP;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._create_storage(
    storage text, view regclass, key_columns text[], st_placement text, distribution_column text) RETURNS regclass
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    unknown text;
    listed text := (SELECT string_agg(quote_ident(k), ', ' ORDER BY n)
                    FROM unnest(key_columns) WITH ORDINALITY AS u (k, n));
BEGIN
    SELECT string_agg(quote_ident(k), ', ') INTO unknown FROM unnest(key_columns || distribution_column) AS k
    WHERE k IS NOT NULL AND NOT EXISTS (SELECT FROM pg_attribute WHERE attrelid = view AND attname = k AND attnum > 0);
    IF unknown IS NOT NULL THEN
        RAISE EXCEPTION 'key column % is not a column of the query', unknown
            USING ERRCODE = 'undefined_column',
                  HINT = 'Key columns, and one to distribute by, are named as in the result of the query.';
    END IF;
    IF key_columns IS NULL OR st_placement <> 'local' THEN
        EXECUTE format('CREATE TABLE %s AS SELECT *, NULL::uuid AS __pgt_row_id FROM %s WITH NO DATA', storage, view);
        EXECUTE format('ALTER TABLE %s ALTER COLUMN __pgt_row_id SET NOT NULL', storage);
    ELSE
        -- Leaves room for new versions of rows on the same page: an update then touches neither another page nor an
        -- index.
        EXECUTE format('CREATE TABLE %s WITH (fillfactor = 90) AS SELECT * FROM %s WITH NO DATA', storage, view);
    END IF;
    IF key_columns IS NULL OR distribution_column IS NOT NULL AND distribution_column <> ALL (key_columns) THEN
        EXECUTE format('CREATE INDEX ON %s (__pgt_row_id)', storage);
    ELSIF st_placement <> 'local' THEN
        -- Citus allows no NULL in a distribution column, and no unique index without that column: rows are identified
        -- by a hash of their key.
        EXECUTE format('CREATE UNIQUE INDEX ON %s (%s)', storage,
                       concat_ws(', ', quote_ident(distribution_column), '__pgt_row_id'));
        IF listed IS NOT NULL THEN
            EXECUTE format('CREATE INDEX ON %s (%s)', storage, listed);
        END IF;
    ELSE
        -- Without key columns the result is always one row.
        EXECUTE format('CREATE UNIQUE INDEX ON %s (%s) NULLS NOT DISTINCT', storage, coalesce(listed, '(true)'));
    END IF;
    IF st_placement = 'local' THEN -- a trigger on shards could not recognize an apply
        EXECUTE format('CREATE TRIGGER pgtrickle_guard BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON %s'
                       ' FOR EACH STATEMENT EXECUTE FUNCTION pgtrickle._guard()', storage);
    END IF;
    RETURN storage::regclass;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._create(
    name text, query text, schedule text, refresh_mode text, initialize boolean, pooler_compatibility_mode boolean,
    placement text, key_columns text[], query_path text, default_schema text, st_placement text,
    output_distribution_column text)
RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on
AS $$
DECLARE
    parts text[] := pgtrickle._parse_name(name, default_schema);
    storage_name text := format('%I.%I', parts[1], parts[2]);
    id bigint;
    view regclass;
    storage regclass;
    former text := pgtrickle._disable_ddl_propagation();
    whole boolean;
BEGIN
    schedule := coalesce(schedule, 'calculated');
    refresh_mode := upper(refresh_mode);
    PERFORM pgtrickle._check_options(schedule, refresh_mode, placement);
    PERFORM pgtrickle._forget_dropped();
    IF to_regclass(storage_name) IS NOT NULL THEN
        RAISE EXCEPTION '% % already exists',
                CASE WHEN EXISTS (SELECT FROM pgtrickle.pgt_stream_tables WHERE pgt_relid = to_regclass(storage_name))
                     THEN 'stream table' ELSE 'relation' END, storage_name
            USING ERRCODE = 'duplicate_table',
                  HINT = 'Choose another name, or use create_or_replace_stream_table() to change a stream table.';
    END IF;
    id := pgtrickle._gate('begin_create', '{}')::bigint;
    view := pgtrickle._write_view('CREATE VIEW', 'q_' || id,
                                  pgtrickle._without_row_ids(pgtrickle._localized_query(query), query_path),
                                  query_path);
    PERFORM pgtrickle._check_query(view);
    key_columns := coalesce(key_columns, pgtrickle._find_key(view));
    PERFORM pgtrickle._check_polled(view, refresh_mode);
    whole := pgtrickle._is_read_through_coordinator(view, refresh_mode);
    -- Finds remaining errors. A query over distributed tables is never run as a whole, unless the coordinator computes
    -- it.
    IF whole OR NOT EXISTS (SELECT FROM pgtrickle._sources(view) AS s WHERE pgtrickle._is_distributed(s.relation)) THEN
        BEGIN
            EXECUTE format('SELECT * FROM %s LIMIT 0', view);
        EXCEPTION WHEN undefined_table OR undefined_function OR undefined_object OR invalid_schema_name THEN
            RAISE EXCEPTION 'a function of the query cannot be run: %', SQLERRM
                USING ERRCODE = SQLSTATE,
                      HINT = format('A refresh runs the functions of a query with search_path '
                                    '= pg_catalog, pg_temp. Schema-qualify the names in them, '
                                    'or ALTER FUNCTION ... SET search_path = %s;', query_path);
        END;
    END IF;
    st_placement := pgtrickle._choose_st_placement(view, st_placement, output_distribution_column);
    storage := pgtrickle._create_storage(storage_name, view, key_columns, st_placement, output_distribution_column);
    PERFORM pgtrickle._make_owner_functions(id);
    PERFORM pgtrickle._attach_sources(view, whole);
    PERFORM pgtrickle._gate('register', jsonb_build_object(
        'id', id, 'storage', storage::oid, 'view', view::oid, 'query', query, 'schedule', schedule, 'refresh_mode',
        refresh_mode,
        'pooler_compatibility_mode', coalesce(pooler_compatibility_mode, false), 'placement', placement, 'key_columns',
        key_columns,
        'session_settings', pgtrickle._session_settings(query_path)));
    IF whole THEN
        PERFORM pgtrickle._gate('record_coordinator', jsonb_build_object('id', id));
    END IF;
    PERFORM pgtrickle._distribute_stream_table(id, st_placement, output_distribution_column);
    -- Not earlier: a former capture of the same table would be dropped and created in one transaction, which Citus
    -- does not support.
    PERFORM pgtrickle._untrack_unused();
    PERFORM set_config('citus.enable_ddl_propagation', former, true) WHERE former IS NOT NULL;
    IF initialize THEN
        PERFORM pgtrickle._gate('request', jsonb_build_object('id', id));
    END IF;
    PERFORM pgtrickle._warn_time_dependent(view, storage);
    PERFORM pgtrickle._warn_without_service();
    RETURN id;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.create_stream_table(
    name text, query text, schedule text DEFAULT 'calculated', refresh_mode text DEFAULT 'AUTO',
    initialize boolean DEFAULT true,
    pooler_compatibility_mode boolean DEFAULT false, placement text DEFAULT NULL, key_columns text[] DEFAULT NULL,
    st_placement text DEFAULT NULL, output_distribution_column text DEFAULT NULL)
RETURNS bigint
LANGUAGE sql
AS $$
    SELECT pgtrickle._create(name, query, schedule, refresh_mode, initialize, pooler_compatibility_mode, placement,
                             key_columns,
                             pg_catalog.current_setting('search_path'), pg_catalog.current_schema(), st_placement,
                             output_distribution_column)
$$;

CREATE OR REPLACE FUNCTION pgtrickle.create_stream_table_if_not_exists(
    name text, query text, schedule text DEFAULT 'calculated', refresh_mode text DEFAULT 'AUTO',
    initialize boolean DEFAULT true,
    pooler_compatibility_mode boolean DEFAULT false, placement text DEFAULT NULL, key_columns text[] DEFAULT NULL)
RETURNS bigint
LANGUAGE sql
AS $$
    SELECT coalesce(pgtrickle._find_id(name),
                    pgtrickle.create_stream_table(name, query, schedule, refresh_mode, initialize,
                                                  pooler_compatibility_mode,
                                                  placement, key_columns))
$$;

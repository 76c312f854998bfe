-- Foreign tables of postgres_fdw: their targets, and the tables of registered databases that they stand for.

CREATE OR REPLACE FUNCTION pgtrickle._foreign_table_target(relation regclass) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object(
        'server', s.srvname,
        'address', (SELECT coalesce(jsonb_object_agg(o.option_name, o.option_value), '{}')
                    FROM pg_options_to_table(s.srvoptions) AS o
                    WHERE o.option_name IN ('host', 'hostaddr', 'port', 'dbname', 'service')),
        'schema',
        coalesce((SELECT o.option_value FROM pg_options_to_table(t.ftoptions) AS o
                  WHERE o.option_name = 'schema_name'), n.nspname),
        'name',
        coalesce((SELECT o.option_value FROM pg_options_to_table(t.ftoptions) AS o WHERE o.option_name = 'table_name'),
                 c.relname))
    FROM pg_foreign_table AS t
    JOIN pg_foreign_server AS s ON s.oid = t.ftserver
    JOIN pg_foreign_data_wrapper AS w ON w.oid = s.srvfdw AND w.fdwname = 'postgres_fdw'
    JOIN pg_class AS c ON c.oid = t.ftrelid
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE t.ftrelid = relation
$$;

-- Lets a foreign table stand for a table of a registered database. `definition` is the result of _describe_table()
-- there. The foreign table belongs to its owner: it is never altered, and has to match. Its owner can change its
-- target at any time, and the service follows. So the owner needs the right to use that database, and the tables that
-- the service is directed to must have been imported.
CREATE OR REPLACE FUNCTION pgtrickle._resolve_foreign_table(caller name, relation regclass, database text,
                                                            definition jsonb) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    target jsonb := pgtrickle._foreign_table_target(relation);
    owner name := (SELECT pg_get_userbyid(c.relowner) FROM pg_class AS c WHERE c.oid = relation);
    differing record;
BEGIN
    PERFORM pgtrickle._require_database_use(caller, database);
    PERFORM pgtrickle._require_database_use(owner, database);
    IF EXISTS (SELECT FROM pgtrickle.pgt_foreign_tables AS f
               WHERE f.relid = relation AND f.database = _resolve_foreign_table.database
                 AND f.node = definition ->> 'node' AND f.shape = definition ->> 'shape'
                 AND f.resolved_by = pgtrickle.stable_hash(target::text)) THEN
        RETURN; -- unchanged
    END IF;
    PERFORM pgtrickle._require_import(caller, database, definition);
    IF EXISTS (SELECT FROM pgtrickle.pgt_foreign_tables AS f
               WHERE f.relid = relation
                 AND (f.database, f.source_schema, f.source_name) <> (_resolve_foreign_table.database,
                                                                      definition ->> 'schema', definition ->> 'name'))
       AND NOT EXISTS (SELECT FROM pgtrickle.pgt_foreign_tables AS f
                       WHERE f.resolved_by IS NULL
                         AND (f.database, f.source_schema, f.source_name) = (_resolve_foreign_table.database,
                                                                             definition ->> 'schema',
                                                                             definition ->> 'name')) THEN
        PERFORM pgtrickle._require_import(owner, database, definition);
    END IF;
    IF NOT has_function_privilege(caller, 'pgtrickle._administer()', 'EXECUTE')
       AND NOT pgtrickle._acts_for(caller, (SELECT c.relowner FROM pg_class AS c WHERE c.oid = relation)) THEN
        RAISE EXCEPTION 'role % may not resolve foreign table %', quote_ident(caller), relation
            USING ERRCODE = 'insufficient_privilege', HINT = 'Ask its owner, or an administrator.';
    END IF;
    IF (target ->> 'schema', target ->> 'name') IS DISTINCT FROM (definition ->> 'schema', definition ->> 'name') THEN
        RAISE EXCEPTION 'foreign table % points to %.%, not to %.%', relation, target ->> 'schema', target ->> 'name',
                definition ->> 'schema', definition ->> 'name'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'See its options schema_name and table_name.';
    END IF;
    SELECT a.attname, format_type(a.atttypid, a.atttypmod) AS type, c ->> 'type' AS type_there,
           (SELECT o.option_value FROM pg_options_to_table(a.attfdwoptions) AS o
            WHERE o.option_name = 'column_name' AND o.option_value <> a.attname) AS other_name INTO differing
    FROM pg_attribute AS a
    LEFT JOIN jsonb_array_elements(definition -> 'columns') AS c ON c ->> 'name' = a.attname
    LEFT JOIN pg_collation AS l ON l.oid = a.attcollation
    WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
      AND (c IS NULL OR format_type(a.atttypid, a.atttypmod) <> c ->> 'type'
           OR c ->> 'labels' IS DISTINCT FROM (SELECT string_agg(quote_literal(e.enumlabel), ', '
                                                                 ORDER BY e.enumsortorder)
                                               FROM pg_enum AS e WHERE e.enumtypid = a.atttypid)
           OR c ->> 'collation' IS DISTINCT FROM CASE WHEN l.collname = 'default' THEN pgtrickle._default_collation()
                                                      ELSE l.collname END
           OR EXISTS (SELECT FROM pg_options_to_table(a.attfdwoptions) AS o
                      WHERE o.option_name = 'column_name' AND o.option_value <> a.attname))
    ORDER BY a.attnum LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'foreign table % does not match table %.% of database %: column % is %', relation,
                quote_ident(definition ->> 'schema'), quote_ident(definition ->> 'name'), quote_ident(database),
                quote_ident(differing.attname),
                CASE WHEN differing.other_name IS NOT NULL THEN 'named ' || quote_ident(differing.other_name)
                     || ' there'
                     WHEN differing.type_there IS NULL THEN 'missing there'
                     WHEN differing.type_there <> differing.type THEN
                         format('%s here and %s there', differing.type, differing.type_there)
                     ELSE 'of another collation, or an enum with different labels' END
            USING ERRCODE = 'datatype_mismatch',
                  HINT = format('Give it the same columns as there: IMPORT FOREIGN SCHEMA '
                                'does so; or name %I.%I.%I in the query.',
                                database, definition ->> 'schema', definition ->> 'name');
    END IF;
    DELETE FROM pgtrickle.pgt_foreign_tables AS f
    WHERE f.resolved_by IS NOT NULL AND NOT EXISTS (SELECT FROM pg_class AS c WHERE c.oid = f.relid);
    INSERT INTO pgtrickle.pgt_foreign_tables AS f
        (relid, database, source_relid, source_schema, source_name, source_stable_name, node, columns, shape, key,
         resolved_by)
    SELECT relation, _resolve_foreign_table.database, (definition ->> 'relid')::bigint, definition ->> 'schema',
           definition ->> 'name',
           definition ->> 'stable_name', definition ->> 'node', jsonb_agg(c), definition ->> 'shape',
           definition -> 'key',
           pgtrickle.stable_hash(target::text)
    FROM jsonb_array_elements(definition -> 'columns') AS c
    JOIN pg_attribute AS a ON a.attrelid = relation AND a.attname = c ->> 'name' AND NOT a.attisdropped
    ON CONFLICT (relid) DO UPDATE
    SET database = excluded.database, source_relid = excluded.source_relid, source_schema = excluded.source_schema,
        source_name = excluded.source_name, source_stable_name = excluded.source_stable_name, node = excluded.node,
        columns = excluded.columns, shape = excluded.shape, key = excluded.key, resolved_by = excluded.resolved_by;
    -- If its readers polled it, its changes are captured from now on.
    UPDATE pgtrickle.pgt_dependencies AS d
    SET source_type = 'OTHER_DATABASE', source_stable_name = database || '/' || (definition ->> 'stable_name')
    WHERE d.source_relid = relation;
END
$$;

-- Reading all of a foreign table at every refresh has to be requested.
CREATE OR REPLACE FUNCTION pgtrickle._check_polled(view regclass, refresh_mode text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    polled record;
BEGIN
    IF refresh_mode = 'FULL' OR pgtrickle._setting('foreign_table_polling') = 'on' THEN
        RETURN;
    END IF;
    SELECT s.relation, c.oid::regclass AS part, pgtrickle._foreign_table_target(c.oid) AS target INTO polled
    FROM pgtrickle._sources(view) AS s CROSS JOIN LATERAL pgtrickle._partition_tree(s.relation) AS member
    JOIN pg_class AS c ON c.oid = member AND c.relkind = 'f'
    WHERE NOT pgtrickle._is_stand_in(s.relation) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the changes of foreign table % cannot be captured: %', polled.part,
                CASE WHEN polled.target IS NULL THEN 'it does not use postgres_fdw'
                     WHEN polled.part <> polled.relation THEN
                         format('it is a partition or child of %s', polled.relation)
                     ELSE format('its server %I does not point to a known registered database',
                                 polled.target ->> 'server') END
            USING ERRCODE = 'feature_not_supported',
                  HINT = CASE WHEN polled.target IS NOT NULL AND polled.part = polled.relation
                              THEN
                                  format('Register that database (pgtrickle database add NAME '
                                         'DSN); then the command line and Python find it,'
                                          ' or tell which it is (pgtrickle database resolve %s --as NAME). Or ',
                                          polled.part)
                              ELSE 'To ' END
                         || 'have all of it read at every refresh: refresh_mode FULL, or the '
                            'setting pg_trickle.foreign_table_polling.';
    END IF;
END
$$;

-- Stand-ins: empty tables here that stand for tables of other databases.

CREATE OR REPLACE FUNCTION pgtrickle._is_stand_in(relation regclass) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM pgtrickle.pgt_foreign_tables WHERE relid = relation)
        OR EXISTS (SELECT FROM pgtrickle.pgt_sharded_tables WHERE relid = relation)
$$;

CREATE OR REPLACE FUNCTION pgtrickle._refuse_stand_in() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    RAISE EXCEPTION '%.% stands for a table of another database', TG_TABLE_SCHEMA, TG_TABLE_NAME
        USING ERRCODE = 'wrong_object_type', HINT = 'Write to that table, in its own database.';
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._grant_stand_ins(database text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    stand_in record;
    role text;
BEGIN
    FOR stand_in IN
        SELECT f.relid, n.nspname
        FROM (SELECT f.relid, f.database FROM pgtrickle.pgt_foreign_tables AS f WHERE f.resolved_by IS NULL
              UNION ALL SELECT t.relid, t.database_set FROM pgtrickle.pgt_sharded_tables AS t) AS f
        JOIN pg_class AS c ON c.oid = f.relid JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE f.database = _grant_stand_ins.database
    LOOP
        EXECUTE format('REVOKE ALL ON %s FROM PUBLIC', stand_in.relid);
        FOR role IN
            SELECT DISTINCT a.grantee::regrole::text FROM pg_class AS c CROSS JOIN aclexplode(c.relacl) AS a
            WHERE c.oid = stand_in.relid AND a.grantee <> 0 AND a.grantee <> c.relowner
        LOOP
            EXECUTE format('REVOKE ALL ON %s FROM %s', stand_in.relid, role);
        END LOOP;
        FOR role IN
            SELECT r.rolname FROM pg_roles AS r
            WHERE r.rolname = ANY (pgtrickle._allowed_roles(database))
               OR r.rolname = pgtrickle._service_role()
               OR r.oid = (SELECT datdba FROM pg_database WHERE datname = current_database())
        LOOP
            EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', stand_in.nspname, role);
            EXECUTE format('GRANT SELECT ON %s TO %I', stand_in.relid, role);
        END LOOP;
    END LOOP;
END
$$;

-- A schema for stand-ins. The owner of a schema could replace its tables, so it must be the catalog's owner.
CREATE OR REPLACE FUNCTION pgtrickle._create_stand_in_schema(name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    owner name := (SELECT pg_get_userbyid(n.nspowner) FROM pg_namespace AS n WHERE n.nspname = name);
BEGIN
    IF owner IS NULL THEN
        EXECUTE format('CREATE SCHEMA %I', name);
    ELSIF owner <> current_user THEN
        RAISE EXCEPTION 'schema % belongs to role %', quote_ident(name), quote_ident(owner)
            USING ERRCODE = 'duplicate_schema',
                  HINT = 'pgtrickle stores stand-ins for tables of another database in that '
                         'schema. Drop or rename it.';
    END IF;
END
$$;

-- Drops schemas of stand-ins that have become empty.
CREATE OR REPLACE FUNCTION pgtrickle._drop_empty_schemas(database text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    empty name;
BEGIN
    FOR empty IN
        SELECT n.nspname FROM pg_namespace AS n
        WHERE starts_with(n.nspname, database || '.')
          AND n.nspowner = (SELECT nspowner FROM pg_namespace WHERE nspname = 'pgtrickle')
          AND NOT EXISTS (SELECT FROM pg_class AS c WHERE c.relnamespace = n.oid)
    LOOP
        EXECUTE format('DROP SCHEMA %I', empty);
    END LOOP;
END
$$;

-- An empty table without columns that stands for one of `origin`, a database or every database of a set.
CREATE OR REPLACE FUNCTION pgtrickle._create_stand_in(schema text, name text, origin text) RETURNS regclass
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    local_name text := format('%I.%I', schema, name);
BEGIN
    PERFORM pgtrickle._create_stand_in_schema(schema);
    EXECUTE format('CREATE TABLE %s ()', local_name);
    EXECUTE format('COMMENT ON TABLE %s IS %L', local_name,
                   format('Stands for a table of %s, which pgtrickle reads there. It is always empty.', origin));
    EXECUTE format('CREATE TRIGGER pgtrickle_stand_in BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON %s'
                   ' FOR EACH STATEMENT EXECUTE FUNCTION pgtrickle._refuse_stand_in()', local_name);
    RETURN local_name::regclass;
END
$$;

-- The stand-ins for a table that several databases have.
CREATE OR REPLACE FUNCTION pgtrickle._member_stand_ins(table_schema text, table_name text, databases text[])
RETURNS SETOF pgtrickle.pgt_foreign_tables
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT f.* FROM pgtrickle.pgt_foreign_tables AS f
    WHERE f.resolved_by IS NULL AND f.source_schema = table_schema AND f.source_name = table_name
      AND f.database = ANY (databases)
$$;

-- Only administrators may describe a table of another database or node here. Others depend on the description, and its
-- stable name decides which change buffer is read there, with the service's rights.
CREATE OR REPLACE FUNCTION pgtrickle._require_import(caller name, database text, definition jsonb) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT has_function_privilege(caller, 'pgtrickle._administer()', 'EXECUTE') THEN
        RAISE EXCEPTION 'role % may not import table % of database %', quote_ident(caller),
                format('%I.%I', definition ->> 'schema', definition ->> 'name'), quote_ident(database)
            USING ERRCODE = 'insufficient_privilege',
                  HINT = format('Ask an administrator to run: pgtrickle database import %s %s', database,
                                format('%I.%I', definition ->> 'schema', definition ->> 'name'));
    END IF;
END
$$;

-- Creates or updates the table here that stands for one of a registered database. `definition` is the result of
-- _describe_table() there.
CREATE OR REPLACE FUNCTION pgtrickle._import_table(caller name, database text, definition jsonb) RETURNS regclass
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    local_schema text := database || '.' || (definition ->> 'schema');
    local_name text := format('%I.%I', local_schema, definition ->> 'name');
    known record;
    col record;
BEGIN
    PERFORM pgtrickle._lock('stand_in ' || database);
    -- The same table, or one that has taken its name.
    SELECT f.* INTO known FROM pgtrickle.pgt_foreign_tables AS f
    WHERE f.database = _import_table.database AND f.resolved_by IS NULL
      AND (f.source_relid = (definition ->> 'relid')::bigint AND f.node = definition ->> 'node'
           OR f.relid = to_regclass(local_name))
    ORDER BY f.relid = to_regclass(local_name) LIMIT 1;
    IF FOUND AND known.shape = definition ->> 'shape' THEN
        PERFORM pgtrickle._require_database_use(caller, database) WHERE database NOT LIKE '@%';
        RETURN known.relid;
    END IF;
    PERFORM pgtrickle._require_import(caller, database, definition);
    IF known.relid IS NOT NULL THEN
        UPDATE pgtrickle.pgt_foreign_tables AS f
        SET source_schema = definition ->> 'schema', source_name = definition ->> 'name',
            shape = definition ->> 'shape',
            source_relid = (definition ->> 'relid')::bigint, source_stable_name = definition ->> 'stable_name',
            node = definition ->> 'node',
            columns = pgtrickle._align_stand_in(known.relid, known.columns, definition,
                f.source_relid = (definition ->> 'relid')::bigint AND f.node = definition ->> 'node')
        WHERE f.relid = known.relid;
        UPDATE pgtrickle.pgt_dependencies AS d
        SET source_stable_name = database || '/' || (definition ->> 'stable_name')
        WHERE d.source_relid = known.relid;
        RETURN known.relid;
    END IF;
    IF octet_length(local_schema) > 63 THEN
        RAISE EXCEPTION 'the name of schema % of database % is too long', quote_ident(definition ->> 'schema'),
                quote_ident(database)
            USING ERRCODE = 'name_too_long', HINT = 'Register the database under a shorter name.';
    END IF;
    PERFORM pgtrickle._create_stand_in(local_schema, definition ->> 'name', 'database ' || database);
    FOR col IN SELECT c FROM jsonb_array_elements(definition -> 'columns') AS c LOOP
        PERFORM pgtrickle._add_stand_in_column(local_name::regclass, database, col.c);
    END LOOP;
    PERFORM pgtrickle._set_stand_in_key(local_name::regclass, definition -> 'key');
    INSERT INTO pgtrickle.pgt_foreign_tables (relid, database, source_relid, source_schema, source_name,
                                              source_stable_name, node, columns, shape)
    VALUES (local_name::regclass, database, (definition ->> 'relid')::bigint, definition ->> 'schema',
            definition ->> 'name',
            definition ->> 'stable_name', definition ->> 'node', definition -> 'columns', definition ->> 'shape');
    PERFORM pgtrickle._grant_stand_ins(database);
    RETURN local_name::regclass;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._default_collation() RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    own jsonb := (SELECT to_jsonb(d) FROM pg_database AS d WHERE d.datname = current_database());
BEGIN
    -- The column had another name before PostgreSQL 17.
    RETURN CASE own ->> 'datlocprovider' WHEN 'c' THEN own ->> 'datcollate'
                ELSE coalesce(own ->> 'datlocale', own ->> 'daticulocale') END;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._add_stand_in_column(stand_in regclass, database text, col jsonb) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    column_type regtype := to_regtype(col ->> 'type');
    collation_name text;
BEGIN
    IF EXISTS (SELECT FROM pg_type AS t WHERE t.oid = column_type
                 AND (t.typtype IN ('d', 'p') OR t.typnamespace = pg_my_temp_schema())) THEN
        -- The default of a domain is evaluated when a column is added, with the rights of the catalog's owner.
        -- _describe_table() never returns domains.
        RAISE EXCEPTION 'column % of % cannot have type %', quote_ident(col ->> 'name'), stand_in, column_type
            USING ERRCODE = 'wrong_object_type', HINT = 'Use the base type of the domain.';
    ELSIF column_type IS NULL THEN
        RAISE EXCEPTION 'column % of % has type %, which does not exist here', quote_ident(col ->> 'name'), stand_in,
                col ->> 'type'
            USING ERRCODE = 'undefined_object',
                  HINT = format('Create the type here as it is in database %s.', database);
    ELSIF col ->> 'labels' IS DISTINCT FROM (SELECT string_agg(quote_literal(e.enumlabel), ', '
                                                               ORDER BY e.enumsortorder)
                                             FROM pg_enum AS e WHERE e.enumtypid = column_type) THEN
        RAISE EXCEPTION 'type % of column % of % has different labels here', col ->> 'type',
                quote_ident(col ->> 'name'),
                stand_in
            USING ERRCODE = 'datatype_mismatch',
                  HINT = format('In database %s it has: %s.', database, coalesce(col ->> 'labels', 'none'));
    ELSIF col ->> 'collation' IS NOT NULL AND NOT EXISTS (
            SELECT FROM pg_collation AS l WHERE l.collname = col ->> 'collation'
                   AND l.collisdeterministic = (col ->> 'deterministic')::boolean
            AND l.collencoding IN (-1, pg_char_to_encoding(getdatabaseencoding())))
          AND col ->> 'collation' IS DISTINCT FROM pgtrickle._default_collation() THEN
        RAISE EXCEPTION 'column % of % has collation %, which does not exist in this database',
                quote_ident(col ->> 'name'), stand_in, quote_ident(col ->> 'collation')
            USING ERRCODE = 'undefined_object',
                  HINT = 'Create that collation here: pg_import_system_collations() or CREATE COLLATION.';
    END IF;
    SELECT format(' COLLATE %I.%I', n.nspname, l.collname) INTO collation_name
    FROM pg_collation AS l JOIN pg_namespace AS n ON n.oid = l.collnamespace
    WHERE l.collname = nullif(col ->> 'collation', pgtrickle._default_collation())
      AND l.collnamespace <> pg_my_temp_schema()
      AND l.collencoding IN (-1, pg_char_to_encoding(getdatabaseencoding()))
    ORDER BY n.nspname <> 'pg_catalog', n.nspname LIMIT 1;
    EXECUTE format('ALTER TABLE %s ADD COLUMN %I %s%s%s', stand_in, col ->> 'name', col ->> 'type',
                   coalesce(collation_name, ''),
                   CASE WHEN (col ->> 'not_null')::boolean THEN ' NOT NULL' ELSE '' END);
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._set_stand_in_key(stand_in regclass, key jsonb) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF key <> 'null' THEN
        EXECUTE format('ALTER TABLE %s ADD PRIMARY KEY (%s)', stand_in,
                       (SELECT string_agg(quote_ident(k), ', ' ORDER BY n)
                        FROM jsonb_array_elements_text(key) WITH ORDINALITY AS u (k, n)));
    END IF;
END
$$;

-- Follows columns that were renamed or added in the other database. Dropped or retyped columns stay here while queries
-- use them: those queries fail, others continue. Returns the columns that are the same in both.
CREATE OR REPLACE FUNCTION pgtrickle._align_stand_in(stand_in regclass, known jsonb, definition jsonb, same boolean)
RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    database text := (SELECT f.database FROM pgtrickle.pgt_foreign_tables AS f WHERE f.relid = stand_in);
    result jsonb := '[]';
    col jsonb;
    former name;
BEGIN
    IF NOT same THEN -- columns of a re-created table are identified by name
        known := (SELECT jsonb_agg(k || jsonb_build_object('attnum', coalesce(
                      (SELECT c -> 'attnum' FROM jsonb_array_elements(definition -> 'columns') AS c
                       WHERE c ->> 'name' = k ->> 'name'),
                      to_jsonb(-(k ->> 'attnum')::int)))) FROM jsonb_array_elements(known) AS k);
    END IF;
    -- Through temporary names, because two columns may have swapped names.
    FOR col IN SELECT jsonb_array_elements(known) LOOP
        EXECUTE format('ALTER TABLE %s RENAME COLUMN %I TO %I', stand_in, col ->> 'name',
                       '__pgt_' || (col ->> 'attnum'));
    END LOOP;
    former := (SELECT c.conname FROM pg_constraint AS c WHERE c.conrelid = stand_in AND c.contype = 'p');
    IF former IS NOT NULL THEN
        EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', stand_in, former);
    END IF;
    FOR col IN SELECT jsonb_array_elements(definition -> 'columns') LOOP
        IF EXISTS (SELECT FROM jsonb_array_elements(known) AS k
                   WHERE k - '{name,not_null,generated}'::text[] = col - '{name,not_null,generated}'::text[]) THEN
            EXECUTE format('ALTER TABLE %s RENAME COLUMN %I TO %I', stand_in, '__pgt_' || (col ->> 'attnum'),
                           col ->> 'name');
            EXECUTE format('ALTER TABLE %s ALTER COLUMN %I %s NOT NULL', stand_in, col ->> 'name',
                           CASE WHEN (col ->> 'not_null')::boolean THEN 'SET' ELSE 'DROP' END);
            result := result || col;
        END IF;
    END LOOP;
    FOR col IN SELECT k FROM jsonb_array_elements(known) AS k JOIN pg_attribute AS a
               ON a.attrelid = stand_in AND a.attname = '__pgt_' || (k ->> 'attnum') AND NOT a.attisdropped LOOP
        BEGIN
            EXECUTE format('ALTER TABLE %s DROP COLUMN %I', stand_in, '__pgt_' || (col ->> 'attnum'));
        EXCEPTION WHEN dependent_objects_still_exist THEN
            IF NOT EXISTS (SELECT FROM pg_attribute AS a
                           WHERE a.attrelid = stand_in AND a.attname = col ->> 'name') THEN
                EXECUTE format('ALTER TABLE %s RENAME COLUMN %I TO %I', stand_in, '__pgt_' || (col ->> 'attnum'),
                               col ->> 'name');
            END IF;
        END;
    END LOOP;
    FOR col IN SELECT c FROM jsonb_array_elements(definition -> 'columns') AS c
               WHERE NOT EXISTS (SELECT FROM pg_attribute AS a
                                 WHERE a.attrelid = stand_in AND a.attname = c ->> 'name') LOOP
        PERFORM pgtrickle._add_stand_in_column(stand_in, database, col);
        result := result || col;
    END LOOP;
    IF NOT EXISTS (SELECT FROM jsonb_array_elements_text(nullif(definition -> 'key', 'null')) AS k
                   WHERE NOT EXISTS (SELECT FROM jsonb_array_elements(result) AS r WHERE r ->> 'name' = k)) THEN
        PERFORM pgtrickle._set_stand_in_key(stand_in, definition -> 'key');
    END IF;
    RETURN result;
EXCEPTION WHEN dependent_objects_still_exist THEN
    RAISE EXCEPTION 'the key of table %.% of database % was changed, and queries here depend on it',
            quote_ident(definition ->> 'schema'), quote_ident(definition ->> 'name'), quote_ident(database)
        USING ERRCODE = 'undefined_object',
              HINT = 'Drop the stream tables that group by it, and create them again for the table as it is now.';
END
$$;
